"""Map raw scores q k^T to softmax inputs: scaled, soft-capped, or with an ALiBi bias.

A map replaces the scores of a fragment by values in its own unit. ``softmax_scale`` converts this unit to natural
logits inside the softmax's exponential, so a plain scale costs nothing here.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.parts.core.device import bit_length, device_struct
from hopwell.kernels.parts.rows.softmax import LOG2_E
from hopwell.kernels.problem import ScoreKind

SERIES_END = 0.125  # up to this x, the series of tanh x to x^5 is as accurate as float32


def tanh(power):
    """Return tanh x within 2^-23; ``power`` is 2 x in powers of two.

    tanh.approx has 11 accurate bits, which is an error of 0.02 with a cap of 50.
    """
    return 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(power, fastmath=True))


def precise_tanh(power):
    """Return tanh x with a relative error of a few 2^-22; ``power`` is 2 x in powers of two."""
    x = power * (0.5 / LOG2_E)
    square = x * x
    series = x * (1.0 + square * (square * (2.0 / 15.0) - 1.0 / 3.0))
    return cutlass.select_(square > SERIES_END * SERIES_END, tanh(power), series)


@device_struct(frozen=True)
class ScoreMap:
    kind: ScoreKind
    scale: Float32  # natural scale of q k^T
    soft_cap: Float32
    heads: Int32

    @property
    def softmax_scale(self):
        """Natural logits per unit of the values that :meth:`apply` writes."""
        if const_expr(self.kind.has_slopes):
            return Float32(1.0)
        return self.soft_cap if const_expr(self.kind.caps) else self.scale

    @cute.jit
    def slope(self, head):
        """Return the ALiBi slope of a head, or 0 without ALiBi.

        Let n be the largest power of two up to the number of heads. The first n heads have the slope 2^(-8 (h + 1) /
        n). The other heads have 2^(-4 (2 (h - n) + 1) / n).
        """
        slope = Float32(0.0)
        if const_expr(self.kind.has_slopes):
            numerator, power = 8 * (head + 1), Int32(1) << (bit_length(self.heads) - 1)
            if head >= power:
                numerator = 4 * (2 * (head - power) + 1)
            slope = cute.math.exp2(-numerator.to(Float32) / power.to(Float32))
        return slope

    @cute.jit
    def apply(self, scores, slope, tile_start, positions) -> None:
        """Map the ``scores`` (a RowFragment) of the keys from ``tile_start`` on, row r at ``positions[r]``."""
        if const_expr(self.kind.caps):
            factor = self.scale * (2.0 * LOG2_E) / self.soft_cap
            for r in cutlass.range_constexpr(scores.rows):
                for c in cutlass.range_constexpr(scores.columns):
                    power = scores.get(r, c) * factor
                    scores.set(r, c, tanh(power) if self.kind is ScoreKind.SOFT_CAP else precise_tanh(power))
        if const_expr(self.kind.has_slopes):
            factor = self.soft_cap if const_expr(self.kind.caps) else self.scale
            # Distances from the row's own key give the same softmax as absolute positions, but are not rounded.
            for r in cutlass.range_constexpr(scores.rows):
                distance = tile_start + scores.first_column() - positions[r]
                bias = slope * distance.to(Float32)
                for c in cutlass.range_constexpr(scores.columns):
                    scores.set(r, c, scores.get(r, c) * factor + (bias + slope * float(scores.column_offset(c))))

    def shift(self, slope, position):
        """Return the natural logits that the softmax of a row at ``position`` omits.

        ALiBi counts distances from the first key, :meth:`apply` from the row's own key.
        """
        return slope * position.to(Float32) if self.kind.has_slopes else Float32(0.0)

    def largest_logit(self, largest, shift):
        """Return the natural logit of a row's largest value. For plain scores this is the raw q k^T."""
        return largest * self.soft_cap if self.kind.caps and not self.kind.has_slopes else largest + shift
