"""Skip-softmax: which KV tiles cannot matter to any row of a warpgroup.

A tile other than the first is left out when in each of the warpgroup's rows its largest weight is below
``factor / kv_len`` of the largest weight so far. Its exponentials and its product with V are left out; K and V are
still fetched, because other rows may need them, and waited for: a stage is given back only when all is there that TMA
writes to it.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from hopwell.kernels.parts.core.device import DeviceStruct, global_pointer


@dataclass
class SkipRule(DeviceStruct):
    factor: Float32
    scale: Float32  # of the softmax, to base-2 logits
    pending: Any  # whether the latest tile has a product with V to come
    skipped: Any  # tiles left out by this warpgroup, once for each 64 rows, or for a tile of fewer

    @staticmethod
    def create(factor, scale) -> "SkipRule":
        state = [cute.make_rmem_tensor(1, Int32) for _ in range(2)]
        state[1].fill(0)
        return SkipRule(factor, scale, *state)

    def note(self, counts: bool, row_blocks=1) -> None:
        """Remember of the latest tile whether it counts, for so many ``row_blocks`` of 64 rows."""
        self.pending[0] = int(counts)
        if not counts:
            self.skipped[0] += row_blocks

    def unneeded(self, largest, maxima, kv_len):
        """Tell whether a tile with the row maxima ``maxima`` is too small beside the ``largest`` scores so far."""
        # A row without a key yet has -inf in both; the difference is NaN, which fmax ignores.
        excess = maxima[0] - largest[0]
        for r in range(1, len(maxima)):
            excess = cute.arch.fmax(excess, maxima[r] - largest[r])
        threshold = cute.math.log2(self.factor / kv_len.to(Float32), fastmath=True)
        return 1 - (excess * self.scale >= threshold).to(Int32)

    @cute.jit
    def report(self, address, is_reporter) -> None:
        """Add what this warpgroup left out. One thread of those that share its rows reports."""
        if address != 0 and is_reporter:
            cute.arch.atomic_add(global_pointer(Int32, address), self.skipped[0])
