"""How pairs of CTAs split keys. Both CTAs of a pair find its work tiles, and store and combine its partials."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.config.base import CTAS
from hopwell.kernels.hardware import WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core import cluster
from hopwell.kernels.sm90.mla.partition import LIST_ATTEND_LOADS, CtaParts, RequestSplits


class PairParts(CtaParts):
    """Equal parts of all keys for the pairs. The warps of correction of both CTAs store and combine a partial."""

    attend_loads = LIST_ATTEND_LOADS

    @cute.jit
    def finish(self, combine, work_queue, tile, work, addresses: Addresses, geometry: DecodeGeometry, output_scale):
        outputs = (addresses, geometry, output_scale, self.kernel.out_dtype)
        warp = cluster.rank() * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        while tile.exists:
            combine.combine(tile, warp, *outputs)
            work += 1
            tile = work_queue.read(work)


class PairSplits(RequestSplits):
    """Splits of each request by its own length. Pairs take work tiles in turn. The warps of correction store partials;
    they and the warps of the role ``combine`` take row shares by tickets."""

    attend_loads = LIST_ATTEND_LOADS
    storing_role = "correction"

    def _combining_warps(self, geometry: DecodeGeometry) -> Any:
        return Int32(geometry.grid) * (CTAS * (WARPS + self.kernel.config.warps_of("combine")))


def partition_of(kernel: Any, batch_invariant: bool) -> PairParts | PairSplits:
    """Return the partition of a kernel."""
    return PairSplits(kernel) if batch_invariant else PairParts(kernel)
