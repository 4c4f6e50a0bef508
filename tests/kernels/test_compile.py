"""Kernels compile without a GPU, and the assembler's report confirms their resource design.

Kernels come from the usual cache, so a second run only reads the reports.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.covering.configs import (
    COVERING_DECODE,
    COVERING_FP8,
    COVERING_MLA,
    COVERING_PAIR_MLA,
    COVERING_SM120_DECODE,
    PAGES16,
    PAGES64,
    RARER,
    ROWS,
    covering_blackwell_configs,
    covering_blackwell_fp8_configs,
    covering_blackwell_narrow_configs,
    covering_configs,
    head_scale_configs,
)

from hopwell.kernels import compile_ahead
from hopwell.kernels.append.config import CacheType, shipped_append_configs
from hopwell.kernels.config import splitting
from hopwell.kernels.config.base import KernelConfig, KvFetch, KvType
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, WARPGROUP
from hopwell.kernels.jit import toolchain
from hopwell.kernels.jit.toolchain import Artifact, artifact
from hopwell.kernels.parts.core.copy import EVICT_FIRST, EVICT_NORMAL
from hopwell.kernels.problem import Family, MaskKind, ScoreKind
from hopwell.kernels.registry import build
from hopwell.kernels.sm100.common.resources import TENSOR_MEMORY_COLUMNS
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig
from hopwell.kernels.sm100.prefill.config import Sm100PrefillConfig
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig
from hopwell.perf.resources import Resources
from hopwell.perf.sass import cuda_tool

SHARED_BYTES = ARCHITECTURES["sm_90a"].shared_bytes

pytestmark = pytest.mark.compile

SYSTEM_SHARED_BYTES = 1024  # of each CTA, beyond its usable SHARED_BYTES
PREFILL = covering_configs()
# sm_103a has the code of sm_100a, so a kernel of each head dim is enough, with one of the highest register use.
SM_103A_BF16 = "prefill_sm_103a_tcgen05_bf16_"
SM_103A = ("d64_full_contiguous", "d128_causal_pages16", "d192_128_causal_rows", "d128_causal_skip_softmax_pages16")
SM_103A += ("d256_causal_pages16", "d256_causal_skip_softmax_contiguous")
BLACKWELL = [
    *covering_blackwell_configs("sm_100a"),
    *covering_blackwell_fp8_configs("sm_100a"),
    *covering_blackwell_fp8_configs("sm_103a")[:1],
    *covering_blackwell_narrow_configs("sm_100a"),
    Sm100PrefillConfig("sm_100a", "bf16", "bf16", 128, 128, MaskKind.LOCAL, *PAGES16),
    *(c for c in covering_blackwell_configs("sm_103a") if c.name.removeprefix(SM_103A_BF16) in SM_103A),
]
# 8-bit K and V: boxes and rows, with one column block and several, with one consumer warpgroup and two.
FP8_PREFILL = [
    PrefillConfig("sm_90a", dtype, dtype, *dims, MaskKind.CAUSAL, *fetch, kv_type=KvType.E4M3)
    for dtype, dims, fetch in (
        ("bf16", (128, 128), PAGES16),
        ("fp16", (64, 64), ROWS),
        ("bf16", (192, 128), PAGES64),
        ("bf16", (256, 256), PAGES64),
        ("bf16", (512, 512), PAGES16),
        ("bf16", (40, 40), ROWS),
    )
]
# The first two would spill with a converting warpgroup each for K and V. The third has both, and the highest register
# use.
FP8_PREFILL += [
    PrefillConfig("sm_90a", "bf16", "bf16", 128, 128, mask, *fetch, kv_type=KvType.E4M3, **choices)
    for mask, fetch, choices in (
        (MaskKind.CAUSAL, PAGES16, dict(skip_softmax=True)),
        (MaskKind.CAUSAL, PAGES16, dict(score=ScoreKind.CAPPED_ALIBI)),
        (MaskKind.SLIDING_WINDOW, ROWS, dict(score=ScoreKind.LARGE_SOFT_CAP)),
    )
]
# At these head dims loaders of page boxes of 8-bit operands need the most registers.
FP8_PREFILL.append(PrefillConfig("sm_90a", "e4m3", "bf16", 192, 128, MaskKind.CAUSAL, *PAGES16))
# 4-bit K and V with block scales, and outputs with block scales: one thread and two for a row, all kinds of output.
NVFP4_PREFILL = [
    PrefillConfig("sm_90a", dtype, out, *dims, mask, *fetch, kv_type=kv_type, **choices)
    for dtype, out, dims, mask, fetch, kv_type, choices in (
        ("bf16", "bf16", (128, 128), MaskKind.CAUSAL, PAGES16, KvType.NVFP4, {}),
        ("fp16", "e4m3", (192, 192), MaskKind.CAUSAL, ROWS, KvType.NVFP4, {}),
        ("fp16", "nvfp4", (64, 64), MaskKind.SLIDING_WINDOW, PAGES16, KvType.NVFP4, dict(short_steps=True)),
        ("bf16", "bf16", (256, 256), MaskKind.CAUSAL, PAGES64, KvType.NVFP4, dict(packs_heads=True)),
        ("fp16", "bf16", (128, 128), MaskKind.CAUSAL, PAGES16, KvType.NVFP4, dict(dequantizes_q=True)),
        (
            "fp16",
            "e4m3",
            (192, 128),
            MaskKind.CAUSAL,
            PAGES64,
            KvType.NVFP4,
            dict(dequantizes_q=True, packs_heads=True),
        ),
        ("fp16", "bf16", (256, 256), MaskKind.CAUSAL, PAGES16, KvType.NVFP4, dict(dequantizes_q=True)),
        ("fp16", "fp16", (256, 256), MaskKind.SLIDING_WINDOW, ROWS, KvType.NVFP4, dict(packs_heads=True)),
        ("fp16", "fp16", (192, 192), MaskKind.CAUSAL, PAGES16, KvType.NVFP4, {}),
        ("e4m3", "nvfp4", (128, 128), MaskKind.CAUSAL, PAGES16, KvType.WIDE, {}),
    )
]
# Narrow outputs of 16-bit queries: few registers for many rows, and many columns.
NARROW_OUTPUTS = [
    PrefillConfig("sm_90a", "bf16", out, *dims, mask, *PAGES16, **choices)
    for out, dims, mask, choices in (
        ("e4m3", (64, 64), MaskKind.CAUSAL, {}),
        ("nvfp4", (128, 128), MaskKind.SLIDING_WINDOW, dict(packs_heads=True)),
        ("e4m3", (256, 256), MaskKind.CAUSAL, {}),
        ("nvfp4", (512, 512), MaskKind.CAUSAL, {}),
        ("e4m3", (128, 128), MaskKind.CAUSAL, dict(kv_type=KvType.E4M3)),
    )
]
SM120 = [
    Sm120PrefillConfig("sm_120a", dtype, dtype, *dims, mask, *fetch, **choices)
    for dtype, dims, mask, fetch, choices in (
        ("bf16", (128, 128), MaskKind.CAUSAL, (KvFetch.CONTIGUOUS, 0), {}),
        ("fp16", (128, 128), MaskKind.SLIDING_WINDOW, ROWS, dict(packs_heads=True)),
        ("bf16", (128, 128), MaskKind.CAUSAL, PAGES16, dict(skip_softmax=True)),
        ("bf16", (64, 64), MaskKind.FULL, PAGES16, {}),
        ("bf16", (192, 128), MaskKind.CAUSAL, PAGES16, {}),
        ("bf16", (192, 192), MaskKind.CAUSAL, (KvFetch.CONTIGUOUS, 0), {}),
        ("bf16", (256, 256), MaskKind.CHUNKED, PAGES16, {}),
        ("bf16", (512, 512), MaskKind.CAUSAL, PAGES16, {}),
        ("fp16", (512, 512), MaskKind.SLIDING_WINDOW, ROWS, dict(packs_heads=True)),
    )
]
SM120 += [
    Sm120PrefillConfig("sm_120a", dtype, out, *dims, mask, *fetch, **choices)
    for dtype, out, dims, mask, fetch, choices in (
        ("e4m3", "bf16", (128, 128), MaskKind.CAUSAL, PAGES16, {}),
        ("e4m3", "e4m3", (192, 192), MaskKind.CAUSAL, PAGES16, {}),
        ("bf16", "e4m3", (128, 128), MaskKind.CAUSAL, PAGES16, {}),
        ("bf16", "bf16", (128, 128), MaskKind.CAUSAL, PAGES16, dict(kv_type=KvType.E4M3)),
        ("bf16", "bf16", (128, 128), MaskKind.SLIDING_WINDOW, ROWS, dict(kv_type=KvType.NVFP4, packs_heads=True)),
        ("bf16", "bf16", (192, 128), MaskKind.CAUSAL, PAGES16, dict(kv_type=KvType.NVFP4)),
        # Kernels that spill most: of each class of operands, with most masks and packed heads, or no mask.
        ("bf16", "bf16", (128, 128), MaskKind.CHUNKED, ROWS, dict(packs_heads=True)),
        ("e4m3", "e4m3", (128, 128), MaskKind.SLIDING_WINDOW, ROWS, dict(packs_heads=True)),
        ("bf16", "bf16", (128, 128), MaskKind.FULL, PAGES16, dict(kv_type=KvType.E4M3)),
        ("bf16", "bf16", (80, 80), MaskKind.FULL, PAGES16, dict(kv_type=KvType.E4M3)),
        ("bf16", "bf16", (192, 192), MaskKind.FULL, PAGES16, dict(kv_type=KvType.E4M3)),
        ("e4m3", "bf16", (512, 512), MaskKind.CAUSAL, PAGES16, {}),
        ("bf16", "bf16", (512, 512), MaskKind.CAUSAL, PAGES16, dict(kv_type=KvType.E4M3)),
        ("bf16", "bf16", (192, 192), MaskKind.SLIDING_WINDOW, ROWS, dict(kv_type=KvType.NVFP4, packs_heads=True)),
    )
]
SM120_ON_HOPPER = Sm120PrefillConfig(
    "sm_120a", "e4m3", "bf16", 64, 64, MaskKind.CAUSAL, *PAGES16, compiled_for="sm_90a"
)
# ptxas for sm_120 uses 8 bytes of stack that are written and never read, and spills registers: see
# warp_mma/prefill/config.py. For decode it does so once a leaf; see warp_mma/decode/config.py.
SM120_STACK = {Family.PREFILL: 56, Family.DECODE: 112, Family.MLA: 96}
NARROW_STACK = 80  # if warps dequantize K and V for themselves
# For Blackwell the compiler keeps pairs of O's elements side by side, which take up to 128 registers, and spills: see
# docs/kernels/blackwell.md.
PAIRED_STACK = {KvType.WIDE: 360, KvType.E4M3: 512, KvType.NVFP4: 416}
# Kernels of sm_120 that serve Blackwell, with registers by role: these stand for all of them.
SM120_ON_BLACKWELL = [
    replace(config, arch="sm_100a")
    for config in (
        *(c for c in COVERING_SM120_DECODE if "d128_draft_rows32" in c.name),
        *(c for c in SM120 if re.search("e4m3_to_bf16_d128|bf16_d192_(full|sliding_window)_kv", c.name)),
        *(replace(c, kv_type=kv) for c in SM120 if "bf16_d256_chunked" in c.name for kv in (KvType.E4M3, KvType.NVFP4)),
        *(replace(c, head_dim_qk=248, head_dim_v=248) for c in SM120 if "bf16_d256_chunked" in c.name),
    )
]
# Scales of each KV head: every kernel over dequantized caches.
HEAD_SCALES = [
    replace(config, k_head_scales=True, v_head_scales=True)
    for config in (*COVERING_DECODE, *COVERING_SM120_DECODE)
    if re.search(r"_90a_bf16_d128_draft_kv_(e4m3|nvfp4).*pages16$|_120a_bf16_d128_draft_kv_e4m3", config.name)
]
CONFIGS: list[KernelConfig] = [
    *PREFILL,
    *RARER,
    *NVFP4_PREFILL,
    *NARROW_OUTPUTS,
    *SM120,
    *FP8_PREFILL,
    *COVERING_FP8,
    *COVERING_DECODE,
    *COVERING_MLA,
    *COVERING_SM120_DECODE,
    *HEAD_SCALES,
    *head_scale_configs(),
    *SM120_ON_BLACKWELL,
    *BLACKWELL,
    *COVERING_PAIR_MLA,
]
# Allowed spills: two values read once for each chunk, see ``_DEQUANTIZED_TILES``, and two of a warp that combines, once
# a share. Two more belong to a warpgroup that dequantizes to float16.
SPILL = (
    "prefill_sm_90a_fp16_d192_causal_kv_nvfp4",
    "decode_sm_90a_fp16_d512_draft_kv_e4m3",
    "decode_sm_90a_.*_kv_(e4m3|int8|nvfp4)_rows16_",  # see test_few_rows_compile.py
    *(f"mla_sm_90a_e4m3_to_bf16_d576_512_causal_pages{rows}" for rows in ("8", "16")),
)
# Bytes of stack of decode with 64 rows in two warpgroups and more than 64 columns, 16 over 8-bit caches.
# O, S and the state of 32 rows fill the registers of a warpgroup. Over 16-bit caches a leaf stores and reads three
# registers, and over 8-bit caches two. The others are stored once in a node or a segment. Stores take time: with twelve
# instead of three registers in a leaf, eight new tokens took 404 instead of 388 us (H100, 2026-11-26).
SHARED_ROWS_STACK = {KvType.WIDE: 40, KvType.NVFP4: 24}
# Code before the roles has 128 registers, so an address that all roles use is spilled, in e4m3 with boxes of up to 16
# keys as well. K reads it 4 times a step. With top-k indices the schedule warp spills five more.
INVARIANT_PAIR_STACK, FP8_PAIR_STACK = 24, 8
# Softmax threads of tcgen05 prefill have 104 registers, see ``test_tcgen05_resources.py``.
TCGEN05_STACK = 192
FIRST = [PREFILL[0], COVERING_DECODE[0], COVERING_MLA[0], BLACKWELL[0]]


class Usage(NamedTuple):
    """The assembler's report of a kernel: registers of a thread, and bytes."""

    registers: int
    stack: int
    shared: int
    local: int


def usage(cubin: Path) -> Usage:
    # A missing tool is a failure, not a skip, because no other test checks spills.
    command = [cuda_tool("cuobjdump"), "-res-usage", str(cubin)]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
    return Usage(*map(int, found))


class Parameters(NamedTuple):
    """Threads of a CTA, and the register counts that roles go down and up to."""

    threads: int
    less: set[int]
    more: set[int]


def kernel_parameters(ptx: str) -> Parameters:
    (threads,) = re.findall(r"\.(?:req|max)ntid (\d+)", ptx)
    less, more = (
        set(map(int, re.findall(rf"setmaxnreg\.{kind}\.sync\.aligned\.u32\s+(\d+)", ptx))) for kind in ("dec", "inc")
    )
    return Parameters(int(threads), less, more)


def check_shares(config: KernelConfig, found: Parameters, used: Usage) -> None:
    """Check that the launch registers of all threads cover the registers that the roles then take.

    With fewer registers, the kernel would hang.
    """
    launched = REGISTERS // (found.threads * config.ctas_per_sm) // 8 * 8
    assert set(config.registers) <= found.less | found.more
    most = min(found.more, default=REGISTERS)  # two warpgroups have more at launch than they may request
    assert max(found.less) <= launched < most, "setmaxnreg the other way is an illegal instruction"
    assert WARPGROUP * sum(config.registers) <= used.registers * found.threads


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_compiles_and_fits(config: KernelConfig) -> None:
    built = artifact(config)
    assert built.is_sound()
    threads = WARPGROUP * len(config.registers)
    ptx = built.ptx.read_text()
    assert re.search(rf"^\.target {config.target}$", ptx, re.MULTILINE)
    found, used = kernel_parameters(ptx), usage(built.cubin)
    assert found.threads == threads
    assert used.registers * threads * config.ctas_per_sm <= REGISTERS, "a CTA does not fit the SM"
    if config.arch == "sm_120a":
        assert not found.less | found.more, "threads keep what they have at launch"
    else:
        check_shares(config, found, used)
    assert used.stack <= most_stack(config), "registers are spilled"
    assert used.local == 0, "registers are spilled"
    assert not re.search(r"\.local\b", ptx), "an array is indexed at run time"
    # Kernels request all shared memory at the launch, except the system's share.
    assert used.shared <= SYSTEM_SHARED_BYTES
    kernel, _ = build(config)
    assert kernel.shared_bytes <= ARCHITECTURES[config.arch].shared_bytes
    # The DSL compares the launch with the kernel's allocation, and records an error in the host code if it is exceeded.
    assert b"exceed" not in built.object_file.read_bytes()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_append_kernels_do_not_spill(arch: str) -> None:
    shipped = list(shipped_append_configs(arch))
    scaled = [replace(c, k_head_scales=True, v_head_scales=True) for c in shipped if c.dtype == "bf16"]
    for config in (*shipped, *scaled):
        used = usage(artifact(config).cubin)
        assert (used.stack, used.local) == (0, 0), config.name
        # An SM has room for all of its threads, or for half of them if they quantize.
        assert used.registers <= 32 if config.kind is CacheType.WIDE else used.registers <= 64, config.name


def most_stack(config: KernelConfig) -> int:
    """Return the bytes of stack that a kernel may use."""
    if config in SM120_ON_BLACKWELL and config.family is Family.PREFILL and config.head_dim_v > 192:
        return PAIRED_STACK[config.kv_type]
    if config.arch == "sm_120a" or config in SM120_ON_BLACKWELL:
        return NARROW_STACK if dequantizes_for_itself(config) else SM120_STACK[config.family]
    if isinstance(config, Sm100PrefillConfig):
        return 0 if config.is_pair else TCGEN05_STACK
    if isinstance(config, Sm100MlaConfig):
        return INVARIANT_PAIR_STACK if config.batch_invariant else FP8_PAIR_STACK * config.uses_fp8_mma
    if isinstance(config, DecodeConfig) and config.accumulated_levels and config.head_dim_v > 64:
        return SHARED_ROWS_STACK.get(config.kv_type, 16) if config.rows == splitting.ROWS else 0
    return 8 if re.match("|".join(SPILL), config.name) else 0


def dequantizes_for_itself(config: KernelConfig) -> bool:
    return isinstance(config, Sm120PrefillConfig) and config.has_narrow_kv and not config.uses_fp8_mma


@pytest.mark.parametrize("config", SM120, ids=lambda config: config.name)
def test_spills_in_steps(config: Sm120PrefillConfig) -> None:
    """Count instructions that load or store a spilled register, in the step with most of them, of 280 to 2300
    instructions.
    """
    most = 26 if dequantizes_for_itself(config) else 12 if config.dequantizes else 6
    assert Resources.of(artifact(config)).step_spills <= most


@pytest.mark.parametrize("config", [*SM120, SM120_ON_HOPPER], ids=lambda config: config.name)
def test_products_of_warps(config: Sm120PrefillConfig) -> None:
    """Each kernel multiplies by the one kind of mma.sync for its operands; sm_120 uses block scaling for
    byte operands.
    """
    found = set(re.findall(r"\bmma\.sync\.aligned\.(\S+)", artifact(config).ptx.read_text()))
    if config.uses_fp8_mma:
        scaled = "kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
        assert found == {"m16n8k32.row.col." + ("f32.e4m3.e4m3.f32" if config.compiled_for else scaled)}
    else:
        kind = {"bf16": "bf16", "fp16": "f16"}[config.dtype]
        assert found == {f"m16n8k16.row.col.f32.{kind}.{kind}.f32"}


@pytest.mark.parametrize("config", [*COVERING_DECODE, *COVERING_MLA, PREFILL[0]], ids=lambda config: config.name)
def test_keys_leave_the_cache_as_their_kernel_says(config: KernelConfig) -> None:
    """Keys are evicted first; with swap-AB, they are evicted first or normally, as the schedule decides.

    Copies by lanes do not have a policy.
    """
    ptx = artifact(config).ptx.read_text()
    by_tma = config.reads_kv_once and config.kv_fetch is KvFetch.PAGE_BOXES
    has_tree = isinstance(config, DecodeConfig | MlaConfig) and config.has_tree
    assert ("L2::cache_hint" in ptx) == by_tma
    assert (str(EVICT_FIRST << 32) in ptx) == (by_tma and not has_tree)
    assert bool(re.search(rf"selp\.b32\s.*, {EVICT_NORMAL}, {EVICT_FIRST},", ptx)) == has_tree


@pytest.mark.parametrize("config", BLACKWELL, ids=lambda config: config.name)
def test_tensor_cores_and_copies_of_blackwell(config: Sm100PrefillConfig) -> None:
    """The test counts instructions of each kind in the PTX; loops over steps and query tiles are not unrolled."""
    ptx, tile = artifact(config).ptx.read_text(), config.tile
    assert "wgmma" not in ptx

    # The kernel allocates all of tensor memory once, and frees it.
    for instruction in ("alloc", "dealloc"):
        assert re.findall(rf"\btcgen05\.{instruction}\b.*, (\d+);", ptx) == [str(TENSOR_MEMORY_COLUMNS)], instruction
        assert len(re.findall(rf"\btcgen05\.{instruction}\b", ptx)) == 1

    # One instruction takes 32 bytes. Both products occur in the steps between and in the last step, which has S of the
    # next work tile. Q K^T also occurs in the first step, and P V in a last step that nothing follows.
    kind = "f8f6f4" if config.uses_fp8_mma else "f16"
    mma = rf"\btcgen05\.mma\.cta_group::{config.cluster_ctas}\.kind::{kind} "
    kinds = re.findall(mma + r"\[%r\d+\], (\w+|\[%r\d+ \+ \d+\]), b, (\d+), p;", ptx)
    assert len(kinds) == ptx.count("tcgen05.mma")
    # Pairs issue P V once less: the next S comes before the last one.
    for a_in_tensor_memory, times, depth, columns in (
        (False, 3, config.layout.depth[0], tile.n),
        (True, 1 + config.q_tiles, tile.n, config.output_columns),
    ):
        found = [int(kind) for a, kind in kinds if a.startswith("[") == a_in_tensor_memory]
        assert len(found) == times * depth // config.mma_depth
        # PTX ISA, "Instruction descriptor": N / 8 in bits 17 to 22, M / 16 in bits 24 to 28.
        rows = 128 * config.cluster_ctas // 16
        assert {(kind >> 17 & 63, kind >> 24 & 31) for kind in found} == {(columns // 8, rows)}

    # TMA takes a box for each column block of 64. For pages it takes one box with all column blocks for each box of
    # rows. Whole tiles of V and other tiles have separate loops. For pages whose rows fill no whole block, it takes
    # a box for each column block again, and all tiles have one loop. So have pairs, whose CTAs have half of K's rows.
    (blocks_k, blocks_v), rows = (count // 64 for count in config.layout.columns), config.box_rows
    whole = config.layout.columns == config.layout.kv_dims
    loops_k, loops_v = ((1, 2) if whole else (blocks_k, blocks_v)) if rows else (blocks_k, 2 * blocks_v)
    boxes = tile.n // rows if rows else int(config.kv_fetch is KvFetch.CONTIGUOUS)
    boxes_k = boxes // config.cluster_ctas if rows else boxes
    copies = config.q_tiles * config.layout.q_columns // 64 + loops_k * boxes_k + loops_v * boxes
    assert len(re.findall(r"\bcp\.async\.bulk\.tensor\b", ptx)) == copies
    assert bool(re.search(r"\bcp\.async\.cg\b", ptx)) == (config.kv_fetch is KvFetch.PAGE_ROWS)


@pytest.mark.parametrize("config", COVERING_PAIR_MLA, ids=lambda config: config.name)
def test_tensor_cores_and_copies_of_pairs(config: Sm100MlaConfig) -> None:
    """All tcgen05 instructions of a kernel have one CTA group. The loops over boxes are not unrolled."""
    ptx = artifact(config).ptx.read_text()
    groups = re.findall(r"\btcgen05\.(\w+)\.cta_group::(\d)", ptx)
    assert {group for _, group in groups} == {"2"}
    assert {name for name, _ in groups} == {"alloc", "relinquish_alloc_permit", "dealloc", "mma", "commit", "cp"}
    assert re.findall(r"\btcgen05\.(?:alloc|dealloc)\b.*, (\d+);", ptx) == [str(TENSOR_MEMORY_COLUMNS)] * 2
    assert config.columns.total <= TENSOR_MEMORY_COLUMNS

    # A box of K takes four instructions, the rest of a key up to two. Boxes of Q that are not in tensor memory have a
    # loop of their own. A stage of V takes four. S is issued in the first step and in the others, then O.
    kinds = re.findall(r"\btcgen05\.mma\S*::(\w+) \[%r\d+\], (?:a|\[%r\d+ \+ \d+\]), b, (\d+), p;", ptx)
    found = [(int(kind) >> 17 & 63, int(kind) >> 24 & 31) for _, kind in kinds]
    assert sorted(set(found)) == [(128 // 8, 128 // 16), (256 // 8, 128 // 16)]
    assert {name for name, _ in kinds} == {"f8f6f4" if config.uses_fp8_mma else "f16"}
    boxes, rest = divmod(config.head_dim_qk * config.q_bytes, 128)
    in_shared = 4 if boxes > config.q_boxes_in_tmem else 0
    assert len(found) == ptx.count("tcgen05.mma") == 2 * (4 + in_shared + rest // 32 + 4)
    assert ".multicast::cluster" in ptx
    # Threads of both CTAs arrive at the leader's barriers with the scope of the cluster.
    assert not re.search(r"mbarrier\.arrive\.(?:release\.cta\.)?shared::cluster", ptx)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_touches_no_memory_before_the_grid_in_front_is_done(config: KernelConfig) -> None:
    """Under programmatic dependent launch, the previous grid may still write this grid's operands, or read
    its output.
    """
    before, *after = artifact(config).ptx.read_text().split("griddepcontrol.wait")
    assert len(after) == 1
    assert "mbarrier.init" in before, "nothing overlaps"
    assert not re.search(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|\bcp\.async", before)


@pytest.mark.parametrize("config", FIRST, ids=lambda config: config.name)
def test_loads_from_disk(config: KernelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object file alone gives the launch function; loading needs no GPU."""
    artifact(config)
    monkeypatch.setenv("HOPWELL_JIT", "forbid")
    monkeypatch.setattr(toolchain, "_functions", {})
    function = toolchain.function(config)
    assert callable(function)
    assert toolchain.function(config) is function


CALL = """
import sys
import torch
import hopwell
from hopwell.kernels.jit import toolchain
from hopwell.kernels.registry import shipped_configs

config = next(config for config in shipped_configs() if config.name == sys.argv[1])
function = toolchain.function(config)
try:
    function(torch.empty(0, dtype=torch.int32), (0,) * 23, (0,) * 40, 1.0, 1.0, 0.0, 0.0, 0)
except ValueError as error:
    print(error)
print("cutlass" in sys.modules)
"""


def test_a_compiled_kernel_is_called_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that finds its kernel on disk never imports the DSL.

    For a call on the CPU, the function itself reports that it does not run there.
    """
    artifact(PREFILL[0])
    monkeypatch.setenv("HOPWELL_JIT", "forbid")
    command = [sys.executable, "-c", CALL, PREFILL[0].name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said, imported = done.stdout.rsplit(maxsplit=1)
    assert "expected device_type=cuda" in said
    assert "argument #0" in said
    assert imported == "False"
    assert done.stderr == ""


def test_output_of_the_other_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is not shipped. Other processes compile it, and the cache of shipped kernels does not have it."""
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    mixed = [
        PrefillConfig("sm_90a", *dtypes, 128, 128, PREFILL[0].mask, PREFILL[0].kv_fetch, 0)
        for dtypes in (("bf16", "fp16"), ("fp16", "bf16"))
    ]
    built = {one.path.name: one for one in compile_ahead(mixed, jobs=2)}
    assert set(built) == {config.name for config in mixed}
    for config in mixed:
        one = built[config.name]
        assert one == Artifact(toolchain.cache_dir() / config.name)
        assert one.is_sound()
        assert (usage(one.cubin).stack, usage(one.cubin).local) == (0, 0)
        rounded = {"bf16": "cvt.rn.bf16x2.f32", "fp16": "cvt.rn.f16x2.f32"}
        assert rounded[config.out_dtype] in one.ptx.read_text()
