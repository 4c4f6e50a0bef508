"""Online softmax over rows of a score fragment, in base 2.

The state of a row is (reference, sum). The reference is a stale row max: a raw logit near the largest one so far. The
sum adds 2^(scale * (s - reference)) over the keys so far, and is still split over the lanes that share the row. The sum
and the accumulated output are relative to the reference. When the reference moves, ``rescale`` is the factor for both.

``scale`` is the natural softmax scale times log2(e). It multiplies inside the exponential, so raw scores are touched
once.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from hopwell.kernels.parts.core.device import device_struct

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

# Independent chains for the row max and sum: FMNMX and FADD have a latency of 4 cycles.
CHAINS = 4

# Lazy rescale: powers of two by which an exponential may exceed 1 before the reference moves. Most steps then leave the
# output unchanged. This saved 64 of 484 instructions a step and gained 2.5 % at 8192 and 16384 tokens (H200,
# 2026-11-21). 2^8 is exact in every output type. Each row decides for itself, so its result does not depend on its
# neighbours.
SLACK = 8.0
FLOAT32_TINY = 1.1754944e-38
FLOAT32_MAX = 3.4028235e38
LARGE_FLOAT32 = 1e38  # the sum of three does not overflow
MOST_BELOW = 60.0  # powers of two by which a tile's reference may lie below the largest score
# The largest powers of two of the element types that weights are rounded to. bf16 has the range of float32 instead.
E4M3_POWER, FLOAT16_POWER = 8.0, 15.0


@device_struct
class OnlineSoftmax:
    scale: Float32  # softmax scale * log2(e), positive
    reference: Any
    largest: Any  # raw logit
    row_sum: Any
    rescale: Any  # factor for everything accumulated before the latest step

    headroom = 0.0  # weights reach up to 2^headroom

    @classmethod
    def create(cls, scale, rows: int) -> "OnlineSoftmax":
        scale = _base_2(scale)
        state = [cute.make_rmem_tensor(rows, Float32) for _ in range(4)]
        return cls(scale, *state)

    def with_scale(self, scale) -> "OnlineSoftmax":
        """Return this softmax, with the same state, under another natural softmax scale."""
        return replace(self, scale=_base_2(scale))

    def reset(self) -> None:
        self.reference.fill(-Float32.inf)
        self.largest.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    def step(self, scores) -> None:
        """Replace the scores by their exponentials and update the state."""
        for r in range(scores.rows):
            self.accumulate(scores, r, self.maximum(scores, r))

    @cute.jit
    def maximum(self, scores, r: cutlass.Constexpr[int]):
        """Return the largest score of row r."""
        return self.largest_of_lanes(largest_of_lane(scores, r), scores.lanes_per_row)

    def largest_of_lanes(self, value, lanes: int):
        """Return the largest ``value`` of the lanes that share a row."""
        return cute.arch.warp_reduction_max(value, threads_in_group=lanes)

    def sum_of_lanes(self, value, lanes: int):
        return cute.arch.warp_reduction_sum(value, threads_in_group=lanes)

    def accumulate(self, scores, r: int, row_max) -> None:
        """Replace the scores of row r by their exponentials; ``row_max`` is the largest score."""
        self.choose_reference(r, row_max)
        self.exponentials(scores, r)

    @cute.jit
    def choose_reference(self, r: cutlass.Constexpr[int], row_max, slack=SLACK) -> None:
        """Move the reference of row r to ``row_max`` if that is more than ``slack`` powers of two above it."""
        self.largest[r] = cute.arch.fmax(self.largest[r], row_max)
        self.follow(r, row_max if self.moves(r, row_max, slack) else self.reference[r])

    def moves(self, r: int, row_max, slack=SLACK):
        """Whether ``row_max`` is more than ``slack`` powers of two above the reference of row r. A row that has seen no
        key has the reference -inf, which any logit exceeds."""
        return row_max * self.scale > self.reference[r] * self.scale + slack

    def begin_at(self, r: int, reference) -> None:
        """Initialise row r, which has seen no key. ``reference`` is the largest score that it will see."""
        self.reference[r] = reference
        self.row_sum[r] = Float32(0.0)

    @cute.jit
    def exponentials(self, scores, r: cutlass.Constexpr[int]) -> None:
        """Replace the scores of row r by their exponentials relative to its reference, and add them to its sum."""
        self.add_up(r, self.some_exponentials(scores, r, None, 0, scores.columns))

    def some_exponentials(self, scores, r: int, sums, begin: int, end: int) -> list:
        """Replace the scores of row r in columns [begin, end) by their exponentials, and return the sum of each chain.

        ``sums`` holds the chain sums of the columns before, or None at the first column.
        """
        offset = self._safe(self.reference[r]) * self.scale
        if const_expr(self.headroom > 0.0):
            offset -= self.headroom
        sums = [Float32(0.0)] * CHAINS if sums is None else list(sums)
        for c in range(begin, end):
            p = cute.math.exp2(scores.get(r, c) * self.scale - offset, fastmath=True)
            scores.set(r, c, p)
            sums[c % CHAINS] = p if c < CHAINS else sums[c % CHAINS] + p
        return sums

    def add_up(self, r: int, sums) -> None:
        """Add the sums of the chains to the sum of row r."""
        self.row_sum[r] += (sums[0] + sums[1]) + (sums[2] + sums[3])

    @cute.jit
    def _safe(self, reference):
        """Return ``reference``, or 0 for a row that has seen no key, because -inf - -inf is NaN."""
        return Float32(0.0) if reference == -Float32.inf else reference

    @cute.jit
    def follow(self, r: cutlass.Constexpr[int], reference) -> None:
        """Adopt a reference that was chosen elsewhere."""
        self.rescale[r] = cute.math.exp2((self.reference[r] - self._safe(reference)) * self.scale, fastmath=True)
        self.row_sum[r] = self.row_sum[r] * self.rescale[r]
        self.reference[r] = reference

    @cute.jit
    def factor_from(self, r: cutlass.Constexpr[int], reference):
        """Return the factor from values relative to ``reference`` to values relative to the reference of row r."""
        return cute.math.exp2((reference - self._safe(self.reference[r])) * self.scale, fastmath=True)

    @cute.jit
    def reference_moved(self):
        """Whether any row of this warp has a ``rescale`` other than 1."""
        moved = self.rescale[0] != 1.0
        for r in cutlass.range_constexpr(1, cute.size(self.rescale)):
            moved = moved or self.rescale[r] != 1.0
        return cute.arch.vote_any_sync(moved)

    @cute.jit
    def rescale_output(self, output) -> None:
        """Rescale O, a fragment of the same rows, to the references that the latest step has chosen."""
        if self.reference_moved():
            output.scale_rows(self.rescale)

    @cute.jit
    def sum_of_largest(self, r: int, lanes_per_row: int):
        """Return the sum of the exponentials of row r relative to its largest logit, or 0 if it saw no key."""
        seen = self.sum_of_lanes(self.row_sum[r], lanes_per_row)
        moved = cute.math.exp2((self.reference[r] - self.largest[r]) * self.scale - self.headroom, fastmath=True)
        # ``moved`` is NaN if the row saw no key. The sum is then 0, or NaN if all scores were NaN.
        return seen * moved if self.largest[r] > -Float32.inf else seen

    @cute.jit
    def partial(self, r: int, lanes_per_row: int):
        """Return (reference, sum) of row r over the keys so far. The reference is an exponent of 2."""
        seen = self.sum_of_lanes(self.row_sum[r], lanes_per_row)
        reference = -Float32.inf if self.reference[r] == -Float32.inf else self.reference[r] * self.scale
        return reference - self.headroom, seen

    def finish(self, r: int, sink, lanes_per_row: int):
        """Return (factor for the accumulated output, base-2 LSE) of row r, see :func:`normalised`."""
        return normalised(*self.partial(r, lanes_per_row), sink)


def _base_2(scale):
    """Return a natural softmax scale times log2(e)."""
    # A scale of zero is legal (uniform attention). The smallest normal number keeps -inf * scale from being NaN.
    return cute.arch.fmax(scale * LOG2_E, FLOAT32_TINY)


@dataclass
class TileSoftmax(OnlineSoftmax):
    """Softmax for low-precision weights, which reach 2^HEADROOM: each tile's reference fits its own largest score.

    A tile's reference may be lower than the reference of the tile before. e4m3 ends at 2^-9. If weights were rounded
    relative to the largest score so far, a tile whose scores all lie well below other tiles would lose its weight. The
    caller rescales the accumulated sums to the new reference when it adds a tile's product. It has to add in float32
    anyway: see ``sm90/prefill/fp8.py``.
    """

    headroom = E4M3_POWER

    @cute.jit
    def choose_reference(self, r: cutlass.Constexpr[int], row_max) -> None:
        self.largest[r] = cute.arch.fmax(self.largest[r], row_max)
        self.follow(r, tile_reference(self, r, row_max))


@dataclass
class ColumnSoftmax(OnlineSoftmax):
    """Softmax of the rows that a :class:`ColumnFragment` holds."""

    @classmethod
    def over(cls, scale, rows: int) -> "ColumnSoftmax":
        """Return a softmax of ``rows`` rows per lane. ``scale`` is the ``scale`` attribute of another softmax."""
        return cls(scale, *[cute.make_rmem_tensor(rows, Float32) for _ in range(4)])

    def largest_of_lanes(self, value, lanes: int):
        return _over_row(value, cute.arch.fmax)

    def sum_of_lanes(self, value, lanes: int):
        return _over_row(value, lambda one, other: one + other)


@dataclass
class HalfLeafSoftmax(ColumnSoftmax):
    """Softmax of leaves whose weights are rounded to float16.

    float16 has few bits below 2^-14 and none below 2^-25. If a heavy key's weight were 1, thousands of light keys
    beside it would lose their weight. So weights reach up to float16's largest power of two. Sums and outputs are
    relative to a reference that is lower by the same power, so combines and sinks need no special case. Only scores
    beyond 2^23 powers of two could overflow, and float32 cannot distinguish their weights anyway.
    """

    headroom = FLOAT16_POWER  # the reference of a leaf is its largest score


@dataclass
class HalfSoftmax(ColumnSoftmax):
    """Softmax of float16 weights over steps of keys.

    The reference moves only when scores exceed it by more than ``slack`` powers of two, and the headroom leaves room
    for this. With this small slack, weights have all bits of float16 down to 2^-25 of the largest weight. Scores with a
    usual spread still leave the reference where the first step set it.
    """

    slack = 4.0
    headroom = FLOAT16_POWER - slack

    def accumulate(self, scores, r: int, row_max) -> None:
        self.choose_reference(r, row_max, self.slack)
        self.exponentials(scores, r)


def tile_reference(softmax: OnlineSoftmax, r: int, row_max):
    """Return the reference that fits a tile whose largest score in row r is ``row_max``; ``softmax.largest`` is up to
    date."""
    # Weights further below the largest score are negligible, and the accumulated values would overflow.
    depth = cute.arch.fmin(MOST_BELOW * cute.arch.rcp_approx(softmax.scale), LARGE_FLOAT32)
    return cute.arch.fmax(row_max, softmax.largest[r] - depth)


def _over_row(value, operation):
    """Combine ``value`` by ``operation`` over the lanes that share a row; these lanes are a quad apart."""
    for k in range(3):
        value = operation(value, cute.arch.shuffle_sync_bfly(value, offset=4 << k))
    return value


@cute.jit
def largest_of_lane(fragment, r: cutlass.Constexpr[int], absolute: cutlass.Constexpr[bool] = False):
    """Return the largest element of row r in this lane, or the largest magnitude with ``absolute``. NaN is ignored."""
    chains = [fragment.get(r, c) for c in range(min(CHAINS, fragment.columns))]
    for c in cutlass.range_constexpr(CHAINS, fragment.columns):
        chains[c % CHAINS] = cute.arch.fmax(chains[c % CHAINS], fragment.get(r, c), abs=absolute)
    for c in cutlass.range_constexpr(1, len(chains)):
        chains[0] = cute.arch.fmax(chains[0], chains[c], abs=absolute)
    return chains[0]


@cute.jit
def normalised(reference, seen, sink):
    """Return (factor for an output accumulated relative to ``reference``, base-2 LSE) of a row with the sum ``seen``.

    ``sink`` is the natural logit of one more key with a zero value; -inf means no sink. A row that saw no key has the
    factor 0. Its LSE is the sink's, or -inf without a sink. A row with a NaN score or sink gets NaN for both.
    :func:`log_sum_exp` converts the LSE to the caller's base, and covers sinks that overflow float32 in base 2.
    """
    exponent = sink * LOG2_E
    # inf - inf would be NaN. A maximum instead of the comparison would drop a NaN sink.
    exponent = Float32(FLOAT32_MAX) if exponent > FLOAT32_MAX else exponent
    # Terms are relative to the larger exponent, so that a sink far above every logit does not overflow.
    largest = cute.arch.fmax(reference, exponent)
    largest = Float32(0.0) if largest == -Float32.inf else largest
    weight = cute.math.exp2(reference - largest, fastmath=True)
    total = seen * weight + cute.math.exp2(exponent - largest, fastmath=True)
    # A NaN total is not equal to 0 and reaches both results.
    factor = Float32(0.0) if total == 0.0 else weight * cute.arch.rcp_approx(total)
    lse = -Float32.inf if total == 0.0 else largest + cute.math.log2(total, fastmath=True)
    return factor, lse


@cute.jit
def log_sum_exp(lse, sink, natural):
    """Convert a base-2 LSE to base e if ``natural`` is not 0; otherwise keep base 2.

    A sink beyond ``FLOAT32_MAX / LOG2_E`` outweighs every logit. The natural LSE is then the sink, and the base-2 LSE
    is +inf.
    """
    value = lse * LN_2 if natural != 0 else lse
    if sink > FLOAT32_MAX / LOG2_E:
        value = sink if natural != 0 else Float32.inf
    return value


@cute.jit
def combined(references, sums):
    """Return the weights of a row's partials, and the (reference, sum) of all partials together.

    ``references`` are exponents of 2, or -inf for a partial that saw no key.
    """
    largest = references[0]
    for i in cutlass.range_constexpr(1, len(references)):
        largest = cute.arch.fmax(largest, references[i])
    safe = Float32(0.0) if largest == -Float32.inf else largest
    weights, total = [], Float32(0.0)
    for i in cutlass.range_constexpr(len(references)):
        weights.append(cute.math.exp2(references[i] - safe, fastmath=True))
        total += weights[i] * sums[i]
    return weights, largest, total
