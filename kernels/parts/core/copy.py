"""Data movement: TMA boxes, swizzled shared memory, 16-byte accesses and packing.

One source serves every architecture that has TMA.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint16, Uint32, const_expr
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.parts.core.device import ptx, shared_address

VECTOR_BYTES = 16  # bytes per access of a lane to shared memory, registers and global memory
SWIZZLE_ROW_BYTES = 128  # a row of the 128-byte swizzle: its vectors are permuted by the row number mod 8
ATOM_ROWS = 8  # rows of a swizzle atom: the permutation repeats after them, also with 64 and 32 bytes
SWIZZLE_ATOM_BYTES = ATOM_ROWS * SWIZZLE_ROW_BYTES  # tiles are aligned to this
# Upper halves of the cache policies of createpolicy.fractional, as in CUTLASS's TMA::CacheHintSm90.
EVICT_NORMAL, EVICT_FIRST = 0x10000000, 0x12F00000
VECTORS_PER_ROW = SWIZZLE_ROW_BYTES // VECTOR_BYTES


_ATOMS = {
    128: warpgroup.SmemLayoutAtomKind.K_SW128,
    64: warpgroup.SmemLayoutAtomKind.K_SW64,
    32: warpgroup.SmemLayoutAtomKind.K_SW32,
}


def swizzled_layout(dtype, rows: int, columns: int, stages: int | None = None, *, columns_first: bool = False):
    """Shared-memory layout with the 128-byte swizzle, made of atoms of 8 rows by 64 16-bit columns.

    Rows of 64 or 32 bytes use the 64- or 32-byte swizzle, so that no space is empty. By default, atoms follow each
    other row after row, so that a column block is [rows, 128 bytes]. With ``columns_first``, all column blocks of 8
    rows are adjacent, so that 8 rows are contiguous in memory.
    """
    atom = warpgroup.make_smem_layout_atom(_ATOMS[row_bytes(columns * dtype.width // 16)], dtype)
    shape = (rows, columns) if stages is None else (rows, columns, stages)
    order = (1, 0, 2) if const_expr(columns_first) else (0, 1, 2)
    return cute.tile_to_shape(atom, shape, order[: len(shape)])


def row_bytes(columns: int) -> int:
    """Return the bytes of a row of a column block in a stage of :func:`swizzled_layout`; columns have 16 bits."""
    return min(HALFWORD_BYTES * columns, SWIZZLE_ROW_BYTES)


def column_blocks(columns: int) -> int:
    """Return the number of column blocks of ``columns`` 16-bit columns."""
    return max(columns // BLOCK_COLUMNS, 1)


def block_row(row, block, rows: int, columns: int, columns_first: bool):
    """Return the index of row ``row`` of column block ``block`` in a stage of :func:`swizzled_layout`.

    The unit is a row of :func:`row_bytes` bytes.
    """
    if const_expr(columns_first):
        return (row // ATOM_ROWS * column_blocks(columns) + block) * ATOM_ROWS + row % ATOM_ROWS
    return block * rows + row


def tile_vector(stage, row, vector, rows: int, columns: int, columns_first: bool):
    """Return the address of a row's vector in a stage of :func:`swizzled_layout`; ``columns`` counts halfwords."""
    block, place = vector // VECTORS_PER_ROW, vector % VECTORS_PER_ROW
    # The index of a row in memory equals its index in the tile modulo the period of the swizzle.
    return swizzled_vector(stage, block_row(row, block, rows, columns, columns_first), place)


@dsl_user_op
def tma_descriptor(atom, *, loc=None, ip=None):
    """Return the address of the descriptor that a TMA copy atom carries in the kernel's parameters."""
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    pointer = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    return cute_nvgpu.get_tma_desc_addr(pointer, executable, loc=loc, ip=ip)


def tma_load(descriptor, destination, barrier, coordinates, policy=None) -> None:
    """Load one TMA box into shared memory, with completion on ``barrier`` by bytes. Issued by every active lane.

    ``policy`` is the L2 policy: EVICT_NORMAL, or EVICT_FIRST for data that leaves the cache first. None means
    EVICT_NORMAL.
    """
    operands = ", ".join(f"{{$r{3 + i}}}" for i in range(len(coordinates)))
    hint, value = (".L2::cache_hint", f", {{$r{3 + len(coordinates)}}}") if policy is not None else ("", "")
    ptx(
        f"cp.async.bulk.tensor.{len(coordinates)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{hint} "
        f"[{{$r0}}], [{{$r1}}, {{{operands}}}], [{{$r2}}]{value};",
        Int32(destination),
        descriptor.toint(),
        shared_address(barrier),
        *(Int32(c) for c in coordinates),
        *([Int64(policy) << 32] if policy is not None else []),
    )


def async_copy_or_zero(destination, source, wanted, size=VECTOR_BYTES) -> None:
    """Issue a cp.async that writes 16 bytes to shared memory: ``size`` bytes from global memory, or none of them if not
    ``wanted``, and zeros behind them."""
    ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", destination, source, wanted.to(Int32) * size)


def async_word_or_zero(destination, source, wanted, size=4) -> None:
    """Issue a cp.async that writes 4 bytes to shared memory: ``size`` bytes from global memory, or none of them if not
    ``wanted``, and zeros behind them."""
    ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        destination,
        source,
        size if wanted is True else wanted.to(Int32) * size,
    )


def store_shared_zero(address) -> None:
    """Store 16 zero bytes to shared memory."""
    ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", address, Int32(0))


def store_matrix_x4(address, words) -> None:
    """Store four 8x8 matrices of 16-bit elements (stmatrix). Lane l gives the address of row l % 8 of matrix l // 8."""
    ptx("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", address, *words)


def load_matrix_x4(address, transposes: bool = False) -> list:
    """Load four 8x8 matrices of 16-bit elements (ldmatrix). Lane l gives the address of row l % 8 of matrix l // 8."""
    kind = "trans.shared" if transposes else "shared"
    return ptx(
        f"ldmatrix.sync.aligned.m8n8.x4.{kind}.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        address,
        results=[Uint32] * 4,
    )


def swizzled_vector(rows, row, vector, size: int = SWIZZLE_ROW_BYTES):
    """Return the swizzled address of a vector in a row of ``size`` bytes. The permutation avoids bank conflicts."""
    return rows + row * size + permuted(row, vector, size) * VECTOR_BYTES


def permuted(row, vector, size: int = SWIZZLE_ROW_BYTES):
    """Return the position of a vector in its row of ``size`` bytes.

    The hardware permutes by the index of the 128-byte row that contains the row.
    """
    shift = (SWIZZLE_ROW_BYTES // size).bit_length() - 1
    swizzle_row = row >> shift if const_expr(shift > 0) else row
    return vector ^ (swizzle_row & (size // VECTOR_BYTES - 1))


def load_shared(address, count: int, dtype=Uint32):
    """Load one, two or four words from shared memory, as a list."""
    operands = ", ".join(f"{{$w{i}}}" for i in range(count))
    vector, operands = (f".v{count}", f"{{{operands}}}") if count > 1 else ("", operands)
    words = ptx(f"ld.shared{vector}.b32 {operands}, [{{$r0}}];", address, results=[dtype] * count)
    return words if count > 1 else [words]


def load_bytes(address, count: int):
    """Load one, two or four bytes from shared memory into the low bytes of a word."""
    return ptx(f"ld.shared.u{8 * count} {{$w0}}, [{{$r0}}];", address, results=[Uint32])


def store_shared(address, words) -> None:
    """Store one, two or four words to shared memory."""
    operands = ", ".join(f"{{$r{1 + i}}}" for i in range(len(words)))
    vector, operands = (f".v{len(words)}", f"{{{operands}}}") if len(words) > 1 else ("", operands)
    ptx(f"st.shared{vector}.b32 [{{$r0}}], {operands};", address, *words)


def store_global(address, words) -> None:
    """Store two or four words to global memory."""
    operands = ", ".join(f"{{$r{1 + i}}}" for i in range(len(words)))
    ptx(f"st.global.v{len(words)}.b32 [{{$r0}}], {{{operands}}};", address, *words)


def store_element(kind, address, word) -> None:
    """Store one element of ``kind``, b16 or b32."""
    ptx(f"st.global.{kind} [{{$r0}}], {{$r1}};", address, word)


def pack_x2(dtype, low, high):
    """Round two float32 values to nearest even and pack them into 32 bits."""
    name = {BFloat16: "bf16x2", Float16: "f16x2"}[dtype]
    return ptx(f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", low, high, results=[Uint32])


def pack_e4m3_x2(low, high):
    """Round two float32 values to e4m3 (nearest even, saturating at the largest finite value), packed into 16 bits."""
    return ptx("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", low, high, results=[Uint16])


def pack_e4m3_x4(values):
    """Round four float32 values to e4m3 (nearest even, saturating at the largest finite value), packed into 32 bits."""
    return ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        *values,
        results=[Uint32],
    )


def store_rounded(address, values, dtype) -> None:
    """Store an even number of float32 values as adjacent elements of ``dtype``, two at a time."""
    for i in range(0, len(values), 2):
        if dtype is Float8E4M3FN:
            store_element("b16", address + i, pack_e4m3_x2(values[i], values[i + 1]))
        else:
            store_element("b32", address + 2 * i, pack_x2(dtype, values[i], values[i + 1]))


QUAD = 4  # lanes that hold a row of accumulators
CORE_MATRIX_ROWS = 8  # 16-bit elements per store or load of a lane


@cute.jit
def transpose_quad(words) -> list:
    """Transpose four words of each lane of a quad: lane q gets word q of every lane, in lane order."""
    lane = cute.arch.lane_idx()
    odd, upper = lane % 2 == 1, lane % QUAD >= 2
    sent = [words[0] if odd else words[1], words[2] if odd else words[3]]
    kept = [words[1] if odd else words[0], words[3] if odd else words[2]]
    came = [cute.arch.shuffle_sync_bfly(word, offset=1) for word in sent]
    pairs = [(came[i] if odd else kept[i], kept[i] if odd else came[i]) for i in range(2)]
    sent = [pairs[0][i] if upper else pairs[1][i] for i in range(2)]
    kept = [pairs[1][i] if upper else pairs[0][i] for i in range(2)]
    came = [cute.arch.shuffle_sync_bfly(word, offset=2) for word in sent]
    first = [came[i] if upper else kept[i] for i in range(2)]
    return [*first, *[kept[i] if upper else came[i] for i in range(2)]]


def unpack_f16_x2(word):
    """Return (low, high) of a word of two float16 as float32."""
    return ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }",
        word,
        results=[Float32, Float32],
    )


def unpack_bf16_x2(word):
    """Return (low, high) of a word of two bfloat16 as float32."""
    return ptx(
        "{ .reg .b32 half; shl.b32 half, {$r0}, 16; mov.b32 {$w0}, half; "
        "and.b32 half, {$r0}, 0xffff0000; mov.b32 {$w1}, half; }",
        word,
        results=[Float32, Float32],
    )


def prefetch_line(address, wanted) -> None:
    """Prefetch the cache line of an address of global memory into L2 if ``wanted``."""
    ptx("{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p prefetch.global.L2 [{$r0}]; }", address, wanted.to(Int32))


def load_global_or_zero(address, count: int, wanted, dtype=Uint32):
    """Load one or four words that no SM writes meanwhile, or zeros if not ``wanted``."""
    operands = ", ".join(f"{{$w{i}}}" for i in range(count))
    vector, operands = (f".v{count}", f"{{{operands}}}") if count > 1 else ("", operands)
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    words = ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} @p ld.global.nc{vector}.b32 {operands}, [{{$r0}}]; }}",
        address,
        wanted.to(Int32),
        results=[dtype] * count,
    )
    return words if count > 1 else [words]


def load_global(address, count: int, dtype=Float32):
    """Load two or four words that another SM may have written. The load bypasses L1, which is not coherent."""
    operands = ", ".join(f"{{$w{i}}}" for i in range(count))
    return ptx(f"ld.global.cg.v{count}.b32 {{{operands}}}, [{{$r0}}];", address, results=[dtype] * count)
