"""tcgen05 matrix products: operands in shared and tensor memory as descriptors, and their issue by one thread."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.config.base import BLOCK_COLUMNS, MMA_DEPTH
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import device_struct, shared_address

ROWS = 128  # of an accumulator: lanes of tensor memory

# PTX ISA, "Instruction descriptor" of kind::f16: accumulation in float32, whether B is stored with its N dimension
# innermost, the types of A and B, N / 8, M / 16.
_FLOAT32_ACCUMULATOR, _N_MAJOR_B = 1 << 4, 1 << 16
_A_TYPE, _B_TYPE, _N, _M = 7, 10, 17, 24
_TYPES = {Float16: 0, BFloat16: 1}
# PTX ISA, "Shared memory descriptor", in two words: address and strides in multiples of 16 bytes; the upper word also
# has the version of tcgen05 and the 128-byte swizzle.
_LEADING, _VERSION, _SWIZZLE_128 = 16, 1 << 14, 2 << 29


def instruction_descriptor(dtype, columns: int, n_major_b: bool) -> int:
    kinds = _TYPES[dtype] << _A_TYPE | _TYPES[dtype] << _B_TYPE
    return _FLOAT32_ACCUMULATOR | kinds | _N_MAJOR_B * n_major_b | columns // 8 << _N | ROWS // 16 << _M


@device_struct
class SharedOperand:
    """Stages of a tile in shared memory, in the layout of ``copy.swizzled_layout``.

    Products reduce over its columns (Q, K), or over its rows (V) if ``reduces_rows``.
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
        """Return the byte offset of an element in a stage, ignoring the swizzle."""
        swizzle_row = copy.block_row(row, column // BLOCK_COLUMNS, self.rows, self.columns, self.columns_first)
        return swizzle_row * copy.SWIZZLE_ROW_BYTES + column % BLOCK_COLUMNS * HALFWORD_BYTES

    def low_word(self, stage):
        """Return the low word of the descriptor of the first 16 elements to reduce over. It has their address and the
        stride between column blocks. The stride matters only if the product does not reduce over columns."""
        address = self.start + stage * (self.rows * self.columns * HALFWORD_BYTES)
        return (address >> 4) | (self._offset(0, BLOCK_COLUMNS) // 16 << _LEADING)

    @property
    def high_word(self) -> int:
        return self._offset(ATOM_ROWS, 0) // 16 | _VERSION | _SWIZZLE_128

    def step(self, k: int) -> int:
        """Return the difference between the descriptors of the k-th and of the first 16 elements."""
        offset = self._offset(MMA_DEPTH * k, 0) if self.reduces_rows else self._offset(0, MMA_DEPTH * k)
        return offset // 16


@cute.jit
def issue_shared(d, a, a_stage, b, b_stage, depth: cutlass.Constexpr[int], instruction: cutlass.Constexpr[int]):
    """Issue D = A B over ``depth`` elements, with A and B in shared memory and D in tensor memory. One thread calls
    this."""
    low_a, low_b = a.low_word(a_stage), b.low_word(b_stage)
    for k in cutlass.range_constexpr(depth // MMA_DEPTH):
        descriptors = _descriptor("a", "{$r1}", a, k) + _descriptor("b", "{$r2}", b, k)
        _mma(f"{descriptors} setp.ne.b32 p, {int(k > 0)}, 0;", "a", instruction, [d, low_a, low_b])


@cute.jit
def issue_tensor(d, a, b, b_stage, part: cutlass.Constexpr, instruction: cutlass.Constexpr[int], accumulate) -> None:
    """Issue D (+)= A B over the elements of ``part`` (begin, end). A is in tensor memory, with two 16-bit elements in a
    column. One thread calls this."""
    low_b = b.low_word(b_stage)
    begin, end = part
    for k in cutlass.range_constexpr(begin // MMA_DEPTH, end // MMA_DEPTH):
        adds = Int32(1) if const_expr(k > 0) else accumulate
        place = f"[{{$r1}} + {k * MMA_DEPTH // 2}]"
        _mma(f"{_descriptor('b', '{$r2}', b, k)} setp.ne.b32 p, {{$r3}}, 0;", place, instruction, [d, a, low_b, adds])


def _descriptor(register: str, low_word: str, operand: SharedOperand, k: int) -> str:
    return f"add.s32 low, {low_word}, {operand.step(k)}; mov.b64 {register}, {{low, {operand.high_word}}};"


@dsl_user_op
def _mma(prepare: str, a: str, instruction: int, arguments: list, *, loc=None, ip=None) -> None:
    cute.arch.inline_ptx(
        f"{{ .reg .pred p; .reg .b32 low; .reg .b64 a, b; {prepare} "
        f"tcgen05.mma.cta_group::1.kind::f16 [{{$r0}}], {a}, b, {instruction}, p; }}",
        read_only_args=arguments,
        loc=loc,
        ip=ip,
    )
