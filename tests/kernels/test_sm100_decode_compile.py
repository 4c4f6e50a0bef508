"""Instructions, tensor memory, copies and spills of the compiled tcgen05 decode kernels.

``test_tcgen05_resources.py`` checks registers, stack and shared memory of these kernels.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import pytest
from helpers.covering.sm100_decode import COVERING_SM100_DECODE

from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.jit.toolchain import artifact
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig
from hopwell.perf.sass import disassemble, sass_loops
from tests.kernels import test_compile as compiled

pytestmark = pytest.mark.compile

of_each_kernel = pytest.mark.parametrize("config", COVERING_SM100_DECODE, ids=lambda config: config.name)
MMA_DEPTH, MMA_ROWS = 16, 64  # elements that an instruction reduces over; keys, or columns of V
TYPES = {"fp16": 0, "bf16": 1}


class Product(NamedTuple):
    """A matrix instruction in the PTX, with the fields of the descriptor of the PTX ISA."""

    a_in_tensor_memory: bool
    n: int
    m: int
    m_major_a: bool
    n_major_b: bool
    types: tuple[int, int]

    @staticmethod
    def of(a: str, descriptor: int) -> Product:
        """Read the fields: types of A and B from bits 7 and 10, their majorness in bits 15 and 16, N / 8 from bit 17,
        M / 16 from bit 24."""
        return Product(
            a.startswith("["),
            (descriptor >> 17 & 63) * 8,
            (descriptor >> 24 & 31) * 16,
            bool(descriptor >> 15 & 1),
            bool(descriptor >> 16 & 1),
            (descriptor >> 7 & 7, descriptor >> 10 & 7),
        )


def products(ptx: str) -> Counter[Product]:
    found = re.findall(r"\btcgen05\.mma\.cta_group::1\.kind::f16 \[%r\d+\], (a|\[%r\d+ \+ \d+\]), b, (\d+), p;", ptx)
    assert len(found) == ptx.count("tcgen05.mma")
    return Counter(Product.of(a, int(descriptor)) for a, descriptor in found)


@of_each_kernel
def test_products(config: Sm100DecodeConfig) -> None:
    """A tile of keys takes an instruction for 16 columns of K, and four for 64 columns of V. The loops over tiles are
    not unrolled. M is 64 keys or columns of V, and N is the rows of all warpgroups. V is M-major in shared memory.
    Dequantized operands are in tensor memory, and products of each warpgroup's tile have code of their own."""
    ptx = artifact(config).ptx.read_text()
    assert not re.search(r"\bwgmma\.|\bmma\.sync", ptx)
    dequantizes = config.kv_type is not KvType.WIDE
    types = (TYPES["fp16" if dequantizes else config.dtype],) * 2
    blocks, found = -(-config.head_dim_v // MMA_ROWS), products(ptx)
    assert {(p.n, p.m, p.n_major_b, p.types) for p in found} == {(config.rows, MMA_ROWS, False, types)}
    assert {p.a_in_tensor_memory for p in found} == {dequantizes}
    of_values = blocks * LEAF_TILE // MMA_DEPTH
    if dequantizes:  # whole column blocks of K
        k_columns = -(-config.layout.tile_dims[0] // MMA_ROWS) * MMA_ROWS
        assert [*found.values()] == [config.consumer_warpgroups * (k_columns // MMA_DEPTH + of_values)]
    else:
        of_keys = 2 * config.layout.depth[0] // MMA_DEPTH  # of a segment's first leaf, and of the next leaf
        assert {p.m_major_a: count for p, count in found.items()} == {False: of_keys, True: of_values}


@of_each_kernel
def test_tensor_memory(config: Sm100DecodeConfig) -> None:
    """The kernel allocates its columns once, and frees as many. A leaf loads S once and O once, as 16 lanes of each
    warp. Warps store dequantized tiles in the order of wgmma's operand A."""
    ptx = artifact(config).ptx.read_text()
    for instruction in ("alloc", "dealloc"):
        found = re.findall(rf"\btcgen05\.{instruction}\b.*, (\d+);", ptx)
        assert found == [str(config.allocated_columns)], instruction
    loads = re.findall(r"\btcgen05\.ld\.sync\.aligned\.(\w+)\.x(\d+)\.b32", ptx)
    warpgroups, products = config.consumer_warpgroups, config.leaf_tiles + config.value_blocks
    assert {shape for shape, _ in loads} == {"16x256b"}
    assert sum(8 * int(count) for _, count in loads) == config.rows // warpgroups * products
    # The rows of a warpgroup are some columns of each product.
    assert ptx.count("tcgen05.wait::ld") == (2 if warpgroups == 1 else products)
    assert ptx.count("tcgen05.wait::st") == (0 if config.kv_type is KvType.WIDE else 2)
    stores = re.findall(r"\btcgen05\.st\.sync\.aligned\.(\w+)\.x(\d+)\.b32", ptx)
    assert {shape for shape, _ in stores} == (set() if config.kv_type is KvType.WIDE else {"16x128b"})
    # One commit releases each tile of K and of V, or of operand A, and one signals S and O of a leaf. Over 16-bit
    # caches S of a segment's first leaf has code of its own.
    assert ptx.count("tcgen05.commit") == (6 if config.kv_type is KvType.WIDE else 2 + 2 * warpgroups)


@of_each_kernel
def test_copies(config: Sm100DecodeConfig) -> None:
    """TMA takes a box with all columns for each box of rows; whole tiles of V and others have separate loops. If rows
    fill no whole column block, it takes a box for each column block, and all tiles have one loop."""
    ptx, layout = artifact(config).ptx.read_text(), config.layout
    boxes = LEAF_TILE // config.box_rows if config.box_rows else 0
    loops = 3 if layout.columns == layout.kv_dims else sum(layout.columns) // 64
    if config.kv_type is KvType.WIDE:
        assert len(re.findall(r"\bcp\.async\.bulk\.tensor\b", ptx)) == loops * boxes
    assert bool(re.search(r"\bcp\.async\.bulk\.tensor\b", ptx)) == (config.kv_fetch is KvFetch.PAGE_BOXES)


@of_each_kernel
def test_touches_no_memory_before_the_grid_in_front_is_done(config: Sm100DecodeConfig) -> None:
    compiled.test_touches_no_memory_before_the_grid_in_front_is_done(config)


@of_each_kernel
def test_registers_of_roles(config: Sm100DecodeConfig) -> None:
    built = artifact(config)
    compiled.check_shares(config, compiled.kernel_parameters(built.ptx.read_text()), compiled.usage(built.cubin))


def leaf_spills(config: Sm100DecodeConfig) -> int:
    """Count the instructions of the loop over leaves that store or load a spilled register.

    This loop is the smallest one with all loads of accumulators: a segment's first S is issued before the loop. It has
    loops over tiles inside, so ``Resources.step_spills`` counts less.
    """
    code = disassemble(artifact(config).cubin)
    wanted = {i for i, one in enumerate(code) if one.root == "LDTM"}
    leaf = next(loop for loop in sass_loops(code) if wanted <= loop.body)
    return sum(code[i].root in ("LDL", "STL") for i in leaf.body)


def most_leaf_spills(config: Sm100DecodeConfig) -> int:
    """Return the spills that a leaf may have. A leaf takes microseconds of memory time.

    With two warpgroups a thread has 232 registers. 64 rows with leaves of four tiles take 64 for S, up to 64 for O,
    and the state of 32 rows. They have 8 to 24 spills, and 65 with drafts over padded columns (2026-11-27). 32 rows
    have up to 3, and 14 at head dim 64 with a window. With one warpgroup, 16 rows of 256 columns spill 17, and of fewer
    columns up to 6. NVFP4 spills up to 2.
    """
    if config.rows == 64:
        return 66 if config.head_dim_v % 64 else 24
    if config.rows == 32:
        return 14 if config.head_dim_v == 64 else 3
    if config.rows == 16:
        return 17 if config.head_dim_v > 192 else 6
    return 2 if config.kv_type is KvType.NVFP4 else 0


@of_each_kernel
def test_spills_of_a_leaf(config: Sm100DecodeConfig) -> None:
    assert leaf_spills(config) <= most_leaf_spills(config)
