"""CTA parts for pairs of CTAs: a pair takes a CTA part, and both CTAs find it by themselves."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from hopwell.kernels.hardware import WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.sm90.mla.partition import LIST_ATTEND_LOADS, CtaParts, QueryHooks
from hopwell.kernels.sm100.common import pair


@dataclass
class PairHooks(QueryHooks):
    """Hooks of the schedule warps of a pair, which take the same places."""

    def first_place(self):
        return pair.index()


class PairParts(CtaParts):
    """Equal parts of all keys for the pairs. The warps of correction of both CTAs store and combine a partial."""

    attend_loads = LIST_ATTEND_LOADS

    def hooks(self, *parts: Any) -> QueryHooks:
        return PairHooks(*parts)

    @cute.jit
    def finish(self, combine, work_queue, tile, work, addresses: Addresses, geometry: DecodeGeometry, output_scale):
        outputs = (addresses, geometry, output_scale, self.kernel.out_dtype)
        warp = pair.rank() * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        while tile.exists:
            combine.combine(tile, warp, *outputs)
            work += 1
            tile = work_queue.read(work)
