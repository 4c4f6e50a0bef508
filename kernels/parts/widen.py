"""From 8-bit keys and values in shared memory to the 16-bit tiles that the tensor cores multiply.

Every e4m3 and int8 value is exact in bf16 and fp16, so that attention over an 8-bit cache is bit for bit that over the
same values in 16 bits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.config import WARPGROUP, KvType
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct


@dataclass(frozen=True)
class Widen(DeviceStruct):
    """K or V tiles of ``rows`` tokens by ``row_bytes`` 8-bit elements; stage 0 lies at ``source`` and at ``target``."""

    source: Int32
    target: Int32
    rows: int
    row_bytes: int
    tile_bytes: int  # of a stage of the target
    kind: KvType
    dtype: type
    zero_outside: bool  # rows that are not wanted become zeros

    @cute.jit
    def tile(self, source_stage, target_stage, begin, end) -> None:
        """Widen one tile; rows [begin, end) are wanted. Called by a whole warpgroup."""
        source = self.source + source_stage * (self.rows * self.row_bytes)
        target = self.target + target_stage * self.tile_bytes
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        chunks = self.rows * self.row_bytes // copy.CHUNK_BYTES
        # All loads first: with one warp for each scheduler nothing else hides their latency. Threads that are left over
        # at the end load the last chunk once more and store nothing.
        places = [thread + first for first in range(0, chunks, WARPGROUP)]
        loaded = [copy.load_shared_x4(source + cutlass.min(p, chunks - 1) * copy.CHUNK_BYTES) for p in places]
        for place, words in zip(places[:-1], loaded[:-1], strict=True):
            self._store(target, place, words, begin, end)
        if places[-1] < chunks:
            self._store(target, places[-1], loaded[-1], begin, end)

    @cute.jit
    def _store(self, target, place, words, begin, end) -> None:
        """Widen the tile's chunk number ``place``."""
        chunks = self.row_bytes // copy.CHUNK_BYTES
        row, chunk = place // chunks, place % chunks
        wide = [half for word in words for half in widened(self.kind, self.dtype, word)]
        if const_expr(self.zero_outside):
            wanted = row >= begin and row < end
            wide = [word if wanted else Uint32(0) for word in wide]
        # Eight lanes store at a time: where they reach over two column blocks, those of the second store their
        # halves the other way round, or they would meet the first's banks.
        block, half = chunk // 4, 2 * (chunk % 4)
        rows = target + block * (self.rows * copy.SWIZZLE_ROW_BYTES)
        odd = block % 2
        first = [wide[4 + k] if odd != 0 else wide[k] for k in range(4)]
        second = [wide[k] if odd != 0 else wide[4 + k] for k in range(4)]
        copy.store_shared_x4(copy.swizzled_chunk(rows, row, half + odd), first)
        copy.store_shared_x4(copy.swizzled_chunk(rows, row, half + 1 - odd), second)


def widened(kind: KvType, dtype, word):
    """Four 8-bit elements as two words of two 16-bit ones."""
    if kind is KvType.INT8:
        return _from_int8(dtype, word)
    low, high = _from_e4m3(word)
    return (_to_bfloat16(low), _to_bfloat16(high)) if dtype is BFloat16 else (low, high)


@dsl_user_op
def _from_e4m3(word, *, loc=None, ip=None):
    """Four e4m3 as two words of two float16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _to_bfloat16(pair, *, loc=None, ip=None):
    """Two float16 as two bf16, which hold what comes from e4m3."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .f32 a, b; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 a, low; cvt.f32.f16 b, high; cvt.rn.bf16x2.f32 {$w0}, b, a; }",
        write_only_types=[Uint32],
        read_only_args=[pair],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _from_int8(dtype, word, *, loc=None, ip=None):
    """Four int8 as two words of two 16-bit numbers. A byte with its sign flipped, in the lowest place of 2^23 as a
    float32, is 2^23 + 128 + the number: two cheap instructions instead of a conversion."""
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    bytes_ = " ".join(
        f"prmt.b32 n, flipped, 0x4b000000, 0x744{i}; mov.b32 f{i}, n; sub.rn.f32 f{i}, f{i}, 0f4B000080;"
        for i in range(4)
    )
    return cute.arch.inline_ptx(
        "{ .reg .b32 flipped, n; .reg .f32 f0, f1, f2, f3; xor.b32 flipped, {$r0}, 0x80808080; "
        f"{bytes_} cvt.rn.{name}.f32 {{$w0}}, f1, f0; cvt.rn.{name}.f32 {{$w1}}, f3, f2; }}",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
        loc=loc,
        ip=ip,
    )
