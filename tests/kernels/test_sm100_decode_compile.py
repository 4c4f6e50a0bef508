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
MMA_DEPTH, MMA_ROWS = 16, 64  # elements that an instruction reduces over; keys, or columns of V, of a block
PAIR = 2  # tiles of K, or blocks of V, of operand A in tensor memory
LANE_SHIFT = 16  # of the lane in an address of tensor memory
SECOND_HALF = 16 << LANE_SHIFT  # from the first to the last 16 lanes of a warp
MOST_COLUMNS = 32  # of a load
TYPES = {"fp16": 0, "bf16": 1}
SUM = re.compile(r"\badd\.s32\s+(%r\d+), (%r\d+), (\d+);")


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


def of_keys(config: Sm100DecodeConfig) -> Counter[Product]:
    """Return the instructions of a tile of K, or of a pair of dequantized tiles. A pair is 128 rows of operand A.

    Loops over tiles are not unrolled. S of a segment's first leaf has code of its own."""
    if config.kv_type is KvType.WIDE:
        return Counter({of(config, MMA_ROWS): 2 * config.layout.depth[0] // MMA_DEPTH})
    return Counter({of(config, PAIR * MMA_ROWS): 2 * dequantized_columns(config) // MMA_DEPTH})


def dequantized_columns(config: Sm100DecodeConfig) -> int:
    """Return the columns of a dequantized tile of K: whole column blocks."""
    return -(-config.layout.tile_dims[0] // MMA_ROWS) * MMA_ROWS


def of_values(config: Sm100DecodeConfig) -> Counter[Product]:
    """Return the instructions of V of a tile, or of a pair of dequantized tiles. They have 64 columns of V as rows, or
    two times 64 dequantized ones. A last block that is alone has 64."""
    blocks = -(-config.head_dim_v // MMA_ROWS)
    of_tile = LEAF_TILE // MMA_DEPTH
    if config.kv_type is KvType.WIDE:
        return Counter({of(config, MMA_ROWS, m_major_a=True): blocks * of_tile})
    pairs, alone = divmod(blocks, PAIR)
    found = {of(config, PAIR * MMA_ROWS): PAIR * pairs * of_tile, of(config, MMA_ROWS): PAIR * alone * of_tile}
    return +Counter(found)


def of(config: Sm100DecodeConfig, m: int, m_major_a: bool = False) -> Product:
    """Return an instruction with ``m`` rows. N is the packed rows of all warpgroups."""
    dequantizes = config.kv_type is not KvType.WIDE
    types = (TYPES["fp16" if dequantizes else config.dtype],) * 2
    return Product(dequantizes, config.rows, m, m_major_a, False, types)


@of_each_kernel
def test_products(config: Sm100DecodeConfig) -> None:
    """16-bit operands are in shared memory, V as M-major operand A. Dequantized operands are in tensor memory. The
    pairs of tiles of both warpgroups share the code of their products."""
    ptx = artifact(config).ptx.read_text()
    assert not re.search(r"\bwgmma\.|\bmma\.sync", ptx)
    assert products(ptx) == of_keys(config) + of_values(config)


@of_each_kernel
def test_allocations(config: Sm100DecodeConfig) -> None:
    """The kernel makes each allocation once, keeps their addresses in neighbouring words, and frees them."""
    ptx = artifact(config).ptx.read_text()
    taken = re.findall(r"\btcgen05\.alloc\.\S+ \[%r\d+ \+ (\d+)\], (\d+);", ptx)
    assert taken == [(str(4 * i), str(columns)) for i, columns in enumerate(config.allocations)]
    freed = re.findall(r"\btcgen05\.dealloc\.\S+ (%r\d+), (\d+);", ptx)
    assert [columns for _, columns in freed] == [str(columns) for columns in config.allocations]
    assert len({address for address, _ in freed}) == len(freed)
    assert ptx.count("tcgen05.relinquish_alloc_permit") == 1


def loads_of(config: Sm100DecodeConfig, blocks: int) -> list[tuple[int, int]]:
    """Return the offset and the columns of each load of S or O. An accumulator of one block has its columns in 16
    lanes of each warp. A second block of dequantized operands has the other 16 lanes of the same columns.

    A warpgroup has some columns of each block, and reads up to 32 at once. One warpgroup has the blocks of 16-bit
    operands side by side."""
    own = config.rows // config.consumer_warpgroups
    if config.kv_type is not KvType.WIDE:
        parts = [(i // PAIR * config.rows + i % PAIR * SECOND_HALF, own) for i in range(blocks)]
    elif config.consumer_warpgroups > 1:
        parts = [(i * config.rows, own) for i in range(blocks)]
    else:
        parts = [(0, blocks * own)]
    return [load for first, columns in parts for load in in_powers_of_two(first, columns)]


def in_powers_of_two(first: int, columns: int) -> list[tuple[int, int]]:
    found = []
    while columns:
        count = min(MOST_COLUMNS, 1 << columns.bit_length() - 1)
        found.append((first, count))
        first, columns = first + count, columns - count
    return found


@of_each_kernel
def test_loads_of_accumulators(config: Sm100DecodeConfig) -> None:
    """A leaf loads S, then O, each with one wait for all blocks."""
    statements = re.findall(r"^.*\btcgen05\.(?:ld|wait::ld)\b.*$", artifact(config).ptx.read_text(), re.MULTILINE)
    assert len(statements) == 2
    for text, blocks in zip(statements, (config.leaf_tiles, -(-config.head_dim_v // MMA_ROWS)), strict=True):
        found = re.findall(r"\btcgen05\.ld\.sync\.aligned\.16x256b\.x(\d+)\.b32 [^;]*\[%r\d+ \+ (\d+)\];", text)
        assert [(int(offset), 8 * int(count)) for count, offset in found] == loads_of(config, blocks)
        assert re.findall(r"\btcgen05\.(?!ld\.sync\.aligned\.16x256b)\S+", text) == ["tcgen05.wait::ld.sync.aligned;"]


def stored_words(ptx: str) -> Counter[int]:
    """Return the words that a lane stores to the tensor memory of each first lane of a warp, 0 or 16."""
    sums = {result: (base, int(number)) for result, base, number in SUM.findall(ptx)}
    found: Counter[int] = Counter()
    for count, place in re.findall(r"\btcgen05\.st\.sync\.aligned\.16x128b\.x(\d+)\.b32 \[(%r\d+)\]", ptx):
        offset = 0
        while place in sums:
            place, number = sums[place]
            offset += number
        found[offset >> LANE_SHIFT] += 2 * int(count)
    return found


@of_each_kernel
def test_stores_of_operand_a(config: Sm100DecodeConfig) -> None:
    """Warps store pairs of dequantized tiles in the order of wgmma's operand A, with one wait and one commit for each
    pair. The two tiles of K have 16 lanes each. So have every two blocks of V, tile by tile. K of a segment's first
    leaf has code of its own."""
    ptx = artifact(config).ptx.read_text()
    found = stored_words(ptx)
    if config.kv_type is KvType.WIDE:
        assert not found
    else:
        columns, blocks = 2 * dequantized_columns(config), -(-config.head_dim_v // MMA_ROWS)
        first, second = PAIR * -(-blocks // PAIR), PAIR * (blocks // PAIR)
        # Of 16 rows, a lane has two words in four columns of tensor memory, which hold eight elements.
        assert found == {0: (columns + first * LEAF_TILE) // 4, 16: (columns + second * LEAF_TILE) // 4}
    assert set(re.findall(r"\btcgen05\.st\.\w+\.\w+\.(\w+)", ptx)) == ({"16x128b"} if found else set())
    assert ptx.count("tcgen05.wait::st") == (0 if config.kv_type is KvType.WIDE else 3)
    # One commit releases each tile of K and of V, or each pair of operand A, and one signals S and O of a leaf.
    assert ptx.count("tcgen05.commit") == 6


@of_each_kernel
def test_conversions_of_codes(config: Sm100DecodeConfig) -> None:
    """NVFP4 codes are converted by an instruction, once for each word of operand A of a pair of tiles."""
    code = Counter(one.op for one in disassemble(artifact(config).cubin))
    words = stored_words(artifact(config).ptx.read_text()).total() if config.kv_type is KvType.NVFP4 else 0
    assert code["F2FP.F16.E2M1.UNPACK_B"] == words


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
    columns up to 6. With 8 rows over NVFP4 caches up to head dim 128, three CTAs share an SM. An attend thread has 136
    registers then. 4 spill, and up to 8 at head dim 64.
    """
    if config.rows == 64:
        return 66 if config.head_dim_v % 64 else 24
    if config.rows == 32:
        return 14 if config.head_dim_v == 64 else 3
    if config.rows == 16:
        return 17 if config.head_dim_v > 192 else 6
    return (8 if config.head_dim_v == 64 else 4) if config.ctas_per_sm == 3 else 0


@of_each_kernel
def test_spills_of_a_leaf(config: Sm100DecodeConfig) -> None:
    assert leaf_spills(config) <= most_leaf_spills(config)
