"""tcgen05 matrix products: operands in shared and tensor memory as descriptors, and their issue by one thread.

An instruction multiplies 32 bytes of each row of A and of each column of B: ``Mma.depth`` elements.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS, MMA_DEPTH
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import device_struct, ptx, shared_address
from hopwell.kernels.sm100.common.resources import BOX_TENSOR_COLUMNS

ROWS = 128  # of an accumulator: lanes of tensor memory
DEPTH_COLUMNS = 8  # tensor-memory columns that hold the 32 bytes of a row of A

# PTX ISA, "Instruction descriptor". Its fields are accumulation in float32, types of A and B, majorness of A and B, N /
# 8, and M / 16. Majorness is 1 if M or N is the contiguous dimension.
_FLOAT32_ACCUMULATOR = 1 << 4
_A_TYPE, _B_TYPE, _M_MAJOR_A, _N_MAJOR_B, _N, _M = 7, 10, 15, 16, 17, 24
# Kind of the instruction, and the number of the type in its descriptor.
_TYPES = {Float16: ("f16", 0), BFloat16: ("f16", 1), Float8E4M3FN: ("f8f6f4", 0)}
# PTX ISA, "Shared memory descriptor", in two words. Address and strides are multiples of 16 bytes. The upper word also
# has the version of tcgen05 and the 128-byte swizzle.
_LEADING, _VERSION, _SWIZZLE_128 = 16, 1 << 14, 2 << 29


@dataclass(frozen=True)
class Mma:
    """Type and shape of a matrix instruction D [m, n] += A B. With ``ctas`` 2, a pair of CTAs shares its rows."""

    dtype: Any
    n: int
    m: int = ROWS
    m_major_a: bool = False
    n_major_b: bool = False
    ctas: int = 1

    @property
    def name(self) -> str:
        return f"tcgen05.mma.cta_group::{self.ctas}.kind::{_TYPES[self.dtype][0]}"

    @property
    def depth(self) -> int:
        """Elements that an instruction reduces over."""
        return HALFWORD_BYTES * MMA_DEPTH * 8 // self.dtype.width

    @property
    def descriptor(self) -> int:
        number = _TYPES[self.dtype][1]
        types = number << _A_TYPE | number << _B_TYPE
        majors = self.m_major_a << _M_MAJOR_A | self.n_major_b << _N_MAJOR_B
        return _FLOAT32_ACCUMULATOR | types | majors | self.n // 8 << _N | self.m // 16 << _M


@device_struct
class SharedOperand:
    """Stages of a tile in shared memory, in the layout of ``copy.swizzled_layout``. ``columns`` counts halfwords.

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

    def at(self, stage) -> "StagedOperand":
        """Return the operand in one of the stages."""
        address = self.start + stage * (self.rows * self.columns * HALFWORD_BYTES)
        return StagedOperand((address >> 4) | (self._offset(0, BLOCK_COLUMNS) // 16 << _LEADING), self)

    def from_column(self, column: int) -> "SharedOperand":
        """Return the operand whose first column is ``column``, in halfwords. Its offset in a column block is a multiple
        of 16 bytes."""
        return replace(self, start=self.start + self._offset(0, column))

    def _offset(self, row: int, column: int) -> int:
        """Return the byte offset of a halfword in a stage, ignoring the swizzle."""
        swizzle_row = copy.block_row(row, column // BLOCK_COLUMNS, self.rows, self.columns, self.columns_first)
        return swizzle_row * copy.SWIZZLE_ROW_BYTES + column % BLOCK_COLUMNS * HALFWORD_BYTES

    @property
    def high_word(self) -> int:
        return self._offset(ATOM_ROWS, 0) // 16 | _VERSION | _SWIZZLE_128

    def step(self, k: int, depth: int) -> int:
        """Return the difference between the descriptors of the k-th and of the first ``depth`` elements to reduce
        over."""
        offset = self._offset(depth * k, 0) if self.reduces_rows else self._offset(0, MMA_DEPTH * k)
        return offset // 16


@device_struct
class StagedOperand:
    """An operand in one stage of shared memory."""

    # Low word of the descriptor of the first elements to reduce over: their address, and the stride between column
    # blocks. The stride matters only if the product does not reduce over columns.
    word: Int32
    operand: SharedOperand

    def prepare(self, name: str, word: str, k: int, depth: int) -> str:
        """Return the PTX that computes the descriptor ``name`` of the k-th ``depth`` elements."""
        step, high = self.operand.step(k, depth), self.operand.high_word
        return f"add.s32 low, {word}, {step}; mov.b64 {name}, {{low, {high}}};"

    @staticmethod
    def place(name: str, word: str, k: int) -> str:
        return name


@device_struct
class TensorOperand:
    """A in tensor memory; ``word`` is the address of the column of its elements from instruction ``first`` on."""

    word: Int32
    first: int = 0

    @staticmethod
    def prepare(name: str, word: str, k: int, depth: int) -> str:
        return ""

    def place(self, name: str, word: str, k: int) -> str:
        return f"[{word} + {DEPTH_COLUMNS * (k - self.first)}]"


def copy_box(place, box: StagedOperand, ctas: int) -> None:
    """Copy a box of 64 rows of 128 bytes from shared to tensor memory, as operand A. One thread calls this.

    The accumulators of 64 rows of a CTA have two lanes for each row, and so does the copy. Products that the same
    thread issues later read it (PTX ISA, "Implicitly pipelined tcgen05 instructions").
    """
    vectors = copy.SWIZZLE_ROW_BYTES // copy.VECTOR_BYTES
    for i in range(vectors):
        ptx(
            f"{{ .reg .b32 low; .reg .b64 a; add.s32 low, {{$r1}}, {i}; mov.b64 a, {{low, {box.operand.high_word}}}; "
            f"tcgen05.cp.cta_group::{ctas}.64x128b.warpx2::02_13 "
            f"[{{$r0}} + {BOX_TENSOR_COLUMNS // vectors * i}], a; }}",
            place,
            box.word,
        )


@cute.jit
def issue(d, a, b, mma: cutlass.Constexpr, span: cutlass.Constexpr, accumulate=False) -> None:
    """Issue D = A B over the elements of ``span`` (begin, end), or D += A B if ``accumulate``. A span that does not
    begin at 0 always adds. D is in tensor memory. One thread calls this."""
    begin, end = span
    for k in cutlass.range_constexpr(begin // mma.depth, end // mma.depth):
        prepare = a.prepare("a", "{$r1}", k, mma.depth) + b.prepare("b", "{$r2}", k, mma.depth)
        arguments, adds = [d, a.word, b.word], int(k > 0)
        if const_expr(isinstance(accumulate, bool)):
            adds |= accumulate
        else:
            arguments, adds = [*arguments, Int32(1) if const_expr(adds) else accumulate], "{$r3}"
        place = a.place("a", "{$r1}", k)
        _mma(mma, f"{prepare} setp.ne.b32 p, {adds}, 0;", place, arguments)


def _mma(mma: Mma, prepare: str, a: str, arguments: list) -> None:
    ptx(
        f"{{ .reg .pred p; .reg .b32 low; .reg .b64 a, b; {prepare} "
        f"{mma.name} [{{$r0}}], {a}, b, {mma.descriptor}, p; }}",
        *arguments,
    )
