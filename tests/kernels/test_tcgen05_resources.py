"""Resources of every registered kernel with tcgen05, on sm_100a and sm_103a: a new kernel is here by itself.

``python -m hopwell.perf resources --arch sm_100a`` prints the same figures as a table.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet
from helpers.covering.configs import (
    COVERING_PAIR_MLA,
    covering_blackwell_configs,
    covering_blackwell_narrow_configs,
    tcgen05_configs,
)
from helpers.covering.sm100_decode import COVERING_SM100_DECODE

from hopwell.kernels.config.base import KernelConfig, KvType
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, WARPGROUP
from hopwell.kernels.jit.toolchain import artifact
from hopwell.kernels.problem import ScoreKind
from hopwell.kernels.registry import build
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig, Sm100SwapABMlaConfig
from hopwell.kernels.sm100.prefill.config import Sm100PrefillConfig
from hopwell.kernels.support import BLACKWELL
from hopwell.perf import resources
from hopwell.perf.loops import innermost
from hopwell.perf.resources import Resources
from hopwell.perf.sass import Sass, disassemble, sass_loops

SYSTEM_SHARED_BYTES = 1024  # of each CTA, beyond the most that a kernel may allocate
# Bytes. Decode kernels spill in the combine of nodes, where ptxas uses all registers, as in the kernels of sm_120. The
# spills of a leaf are in test_sm100_decode_compile.py.
MOST_DECODE_STACK = 256
# Likewise: 232 bytes in the warp that loads e4m3 keys of 576 columns in boxes of 8 tokens, none of it in a step.
# test_sm100_swap_ab_compile.py has the limits of each kernel.
MOST_SWAP_AB_MLA_STACK = 232
FEWEST_COLUMNS = 32  # of an allocation of tensor memory, a power of two


def cell(config: KernelConfig) -> tuple[Hashable, ...]:
    """Return the fields that decide a kernel's resources most."""
    kind = (type(config), config.arch, config.dtype, config.kv_type)
    return (*kind, config.head_dim_qk, config.head_dim_v)


def cases() -> Iterator[ParameterSet]:
    """Yield all kernels. Covering ones and the first of each cell belong to every set of tests, others to the nightly
    one."""
    covering = {*covering_blackwell_configs(), *covering_blackwell_narrow_configs(), *COVERING_SM100_DECODE}
    cells: set[object] = set()
    for config in tcgen05_configs():
        stands_for_others = config in covering or cell(config) not in cells
        cells.add(cell(config))
        yield pytest.param(config, id=config.name, marks=() if stands_for_others else pytest.mark.nightly)


def on_demand() -> list[ParameterSet]:
    """Return covering decode kernels that are compiled on demand only."""
    shipped = set(tcgen05_configs())
    return [pytest.param(config, id=config.name) for config in COVERING_SM100_DECODE if config not in shipped]


def most_step_spills(config: KernelConfig) -> int:
    """Return the instructions of a step that may load or store a spilled register: 0 to 25 with plain scores, 26 with
    others (2026-11-27). Softmax threads of prefill have 104 registers, see ``ROLES`` in the config. Pairs of CTAs spill
    with boxes of 8 rows alone: a loader has most addresses there."""
    if isinstance(config, Sm100DecodeConfig):
        # One register in a loop over tiles, with 16 rows of wide heads, and with 64 rows over NVFP4 caches. With three
        # CTAs of an SM, one in the loop that dequantizes K at head dim 64.
        wide, three = config.rows == 16 and config.head_dim_v > 192, config.ctas_per_sm == 3
        nvfp4 = config.kv_type is KvType.NVFP4 and (config.rows == 64 or (three and config.head_dim_v == 64))
        return int(wide or nvfp4)
    if isinstance(config, Sm100MlaConfig) and (config.batch_invariant or config.uses_fp8_mma):
        return 4  # reads of an address that all roles use, see INVARIANT_PAIR_STACK of test_compile.py
    if not isinstance(config, Sm100PrefillConfig):
        return 0
    if config.is_pair:
        return 3 * (config.box_rows == 8)
    if config.out_dtype == "nvfp4":
        return 46  # of the store of O, once a work tile: correction has 32 registers
    return 30 if config.score is ScoreKind.SCALED else 51


@pytest.mark.compile
@pytest.mark.parametrize("config", [*cases(), *on_demand()])
def test_resources(config: KernelConfig) -> None:
    built = artifact(config)
    has, ptx = Resources.of(built), built.ptx.read_text()
    assert has.local == 0, "registers are spilled"
    assert has.step_spills <= most_step_spills(config), "registers are spilled"
    most = {Sm100DecodeConfig: MOST_DECODE_STACK, Sm100SwapABMlaConfig: MOST_SWAP_AB_MLA_STACK}.get(type(config), 0)
    assert has.stack <= most or most_step_spills(config) > 0, "registers are spilled"
    assert not re.search(r"\.local\b", ptx), "an array is indexed at run time"
    (threads,) = map(int, re.findall(r"\.(?:req|max)ntid (\d+)", ptx))
    assert threads == WARPGROUP * len(config.registers)
    assert has.registers * threads * config.ctas_per_sm <= REGISTERS, "a CTA does not fit the SM"
    assert WARPGROUP * sum(config.registers) <= has.registers * threads, "the roles take more than the launch has"
    kernel, _ = build(config)
    arch = ARCHITECTURES[config.arch]
    assert kernel.shared_bytes <= arch.shared_bytes_of(config.ctas_per_sm)
    assert has.system_shared <= SYSTEM_SHARED_BYTES
    check_tensor_memory(ptx, arch.tensor_memory_columns // config.ctas_per_sm)


@pytest.mark.compile
@pytest.mark.parametrize("config", covering_blackwell_narrow_configs(), ids=lambda config: config.name)
def test_spills_of_dequantization(config: KernelConfig) -> None:
    """The loop that dequantizes K and V of a step reads and writes vectors of shared memory, as loaders' loops do."""
    code = disassemble(artifact(config).cubin)
    loops = innermost(sass_loops(code), lambda loop: {"LDS.128", "STS.128"} <= {code[i].op for i in loop.path})
    spills = max(sum(code[i].root in ("LDL", "STL") for i in loop.path) for loop in loops)
    # Of 320 to 1120 instructions. At 192/128 a thread has six blocks of K, with a scale each.
    assert spills <= (35 if config.kv_type is KvType.NVFP4 and config.head_dim_qk == 192 else 8)


def check_tensor_memory(ptx: str, columns: int) -> None:
    """Check that a kernel allocates powers of two of columns, frees them, and is of one CTA group."""
    taken, freed = (
        sorted(map(int, re.findall(rf"\btcgen05\.{what}\.\S+ [^;]*, (\d+);", ptx))) for what in ("alloc", "dealloc")
    )
    assert taken, "no tensor memory is allocated"
    assert taken == freed, "an allocation is not freed"
    assert all(count >= FEWEST_COLUMNS and count & count - 1 == 0 for count in taken), "not a power of two"
    assert sum(taken) <= columns, "more columns than tensor memory has"
    groups = set(re.findall(r"\btcgen05\.[\w.]*?cta_group::(\d)", ptx))
    assert len(groups) == 1, "PTX ISA: all tcgen05 instructions of a kernel have one cta_group"
    if groups == {"2"}:
        assert "barrier.cluster.wait" in ptx[: ptx.index("tcgen05.alloc")], "the peer CTA may not have been launched"


def test_every_cell_of_both_architectures_is_in_the_smaller_sets() -> None:
    kept = [case.values[0] for case in cases() if not case.marks]
    assert {cell(config) for config in kept} == {cell(config) for config in tcgen05_configs()}
    assert {config.arch for config in kept} == set(BLACKWELL)
    without_arch = [{cell(replace(c, arch="")) for c in kept if c.arch == arch} for arch in BLACKWELL]
    assert without_arch[0] == without_arch[1], "a kernel is registered for one of the two only"


PTX = """
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;
    tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2 + 8], b, 135332880, p;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 512;
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("", "", None),
        ("dealloc.cta_group::1", "other.cta_group::1", "not freed"),
        ("mma.cta_group::1", "mma.cta_group::2", "one cta_group"),
        ("512", "96", "power of two"),
        ("512", "1024", "more columns"),
        ("alloc", "other", "no tensor memory"),
        ("cta_group::1", "cta_group::2", "not have been launched"),
    ],
)
def test_tensor_memory_that_breaks_a_rule(before: str, after: str, message: str | None) -> None:
    ptx = PTX.replace(before, after) if before else PTX
    if message is None:
        check_tensor_memory(ptx, 512)
    else:
        with pytest.raises(AssertionError, match=message):
            check_tensor_memory(ptx, 512)


def test_spills_of_steps_are_found_beside_tensor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax has no matrix instruction: its loop is a step because it loads S from tensor memory."""

    class Built:
        cubin = "kernel.cubin"

        class ptx:  # noqa: N801
            read_text = staticmethod(lambda: PTX)

    class Said:
        stdout = "REG:128 STACK:8 SHARED:1024 LOCAL:0"

    code = [Sass("LDTM.x32 R4, tmem[UR4]", 0), Sass("STL [R1], R4", 0), Sass("BRA `(.L_x)", 0, 0), Sass("EXIT", 0)]
    monkeypatch.setattr(resources, "cuda_tool", lambda name: name)
    monkeypatch.setattr(resources.subprocess, "run", lambda *arguments, **options: Said)
    monkeypatch.setattr(resources, "disassemble", lambda cubin: code)
    assert Resources.of(Built) == Resources(128, 8, 1, 1, 1024, 0, 512)  # type: ignore[arg-type]


@pytest.mark.compile
@pytest.mark.parametrize("config", COVERING_PAIR_MLA, ids=lambda config: config.name)
def test_arrivals_at_the_other_cta_do_not_fence_global_memory(config: KernelConfig) -> None:
    """With release at cluster scope, ptxas emits a fence of the whole GPU; with acquire it invalidates L1."""
    ptx = artifact(config).ptx.read_text()
    assert "mbarrier.arrive.relaxed.cluster" in ptx
    assert not re.search(r"mbarrier\.\S*\.(release|acquire)\.cluster", ptx)
