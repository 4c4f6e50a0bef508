"""tcgen05 matrix products: operands in shared and tensor memory as descriptors, and their issue by one thread."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.config import BLOCK_COLUMNS, MMA_COLUMNS
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.copy import GROUP_ROWS
from hopwell.kernels.parts.device import DeviceStruct, shared_address

ROWS = 128  # of an accumulator: lanes of tensor memory

# PTX ISA, "Instruction descriptor" of kind::f16: accumulation in float32, whether B is stored with its N dimension
# innermost, the types of A and B, N / 8, M / 16.
_FLOAT32_ACCUMULATOR, _N_MAJOR_B = 1 << 4, 1 << 16
_A_TYPE, _B_TYPE, _N, _M = 7, 10, 17, 24
_TYPES = {Float16: 0, BFloat16: 1}
# PTX ISA, "Shared memory descriptor": strides in units of 16 bytes, the version of tcgen05, the 128-byte swizzle.
_LEADING, _STRIDE, _VERSION, _SWIZZLE_128 = 16, 32, 1 << 46, 2 << 61


def instruction_descriptor(dtype, columns: int, n_major_b: bool) -> int:
    kinds = _TYPES[dtype] << _A_TYPE | _TYPES[dtype] << _B_TYPE
    return _FLOAT32_ACCUMULATOR | kinds | _N_MAJOR_B * n_major_b | columns // 8 << _N | ROWS // 16 << _M


@dataclass
class SharedOperand(DeviceStruct):
    """The stages of a tile in shared memory, as laid out by ``copy.swizzled_layout``.

    Products reduce over its columns (Q, K), or, where ``reduces_rows``, over its rows (V).
    """

    start: Int32
    rows: int
    columns: int
    columns_first: bool
    reduces_rows: bool

    @staticmethod
    def of(tile, rows: int, columns: int, columns_first: bool, reduces_rows: bool = False) -> "SharedOperand":
        return SharedOperand(shared_address(tile.iterator), rows, columns, columns_first, reduces_rows)

    def _offset(self, row: int, column: int) -> int:
        """Of an element in bytes, the swizzle aside."""
        line = copy.block_row(row, column // BLOCK_COLUMNS, self.rows, self.columns, self.columns_first)
        return line * copy.SWIZZLE_ROW_BYTES + column % BLOCK_COLUMNS * 2

    def descriptor(self, stage):
        """Of the first 16 elements to reduce over. The leading stride is that between column blocks, which only counts
        where they are not what is reduced over."""
        leading, stride = self._offset(0, BLOCK_COLUMNS), self._offset(GROUP_ROWS, 0)
        fixed = leading // 16 << _LEADING | stride // 16 << _STRIDE | _VERSION | _SWIZZLE_128
        address = self.start + stage * (self.rows * self.columns * 2)
        return (address >> 4).to(Int64) | Int64(fixed)

    def step(self, k: int) -> int:
        """What descriptors of the k-th 16 elements have more than that of the first."""
        offset = self._offset(MMA_COLUMNS * k, 0) if self.reduces_rows else self._offset(0, MMA_COLUMNS * k)
        return offset // 16


@cute.jit
def issue_shared(d, a, a_stage, b, b_stage, depth: cutlass.Constexpr[int], instruction: cutlass.Constexpr[int]):
    """D = A B over ``depth`` elements, both in shared memory, D in tensor memory. Called by one thread."""
    first_a, first_b = a.descriptor(a_stage), b.descriptor(b_stage)
    for k in cutlass.range_constexpr(depth // MMA_COLUMNS):
        _mma_shared(d, first_a + a.step(k), first_b + b.step(k), instruction, Int32(const_expr(k > 0)))


@cute.jit
def issue_tensor(
    d, a, b, b_stage, depth: cutlass.Constexpr[int], instruction: cutlass.Constexpr[int], accumulate
) -> None:
    """D (+)= A B over ``depth`` elements, A in tensor memory, two 16-bit elements in a column. Called by one thread."""
    first_b = b.descriptor(b_stage)
    for k in cutlass.range_constexpr(depth // MMA_COLUMNS):
        adds = Int32(1) if const_expr(k > 0) else accumulate
        _mma_tensor(d, a + k * (MMA_COLUMNS // 2), first_b + b.step(k), instruction, adds)


@dsl_user_op
def _mma_shared(d, a, b, instruction, accumulate, *, loc=None, ip=None) -> None:
    _mma("{$r1}", d, a, b, instruction, accumulate, loc, ip)


@dsl_user_op
def _mma_tensor(d, a, b, instruction, accumulate, *, loc=None, ip=None) -> None:
    _mma("[{$r1}]", d, a, b, instruction, accumulate, loc, ip)


def _mma(a_operand: str, d, a, b, instruction: int, accumulate, loc, ip) -> None:
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r4}, 0; "
        f"tcgen05.mma.cta_group::1.kind::f16 [{{$r0}}], {a_operand}, {{$r2}}, {{$r3}}, p; }}",
        read_only_args=[d, a, b, Int32(instruction), accumulate],
        loc=loc,
        ip=ip,
    )
