"""sm_120 prefill: TMA, warp specialisation and mma.sync, with the roles, schedules and parts of Hopper's kernel."""

from dataclasses import replace
from typing import Any

from hopwell.kernels.config.base import KvType
from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core.pipeline import Edge
from hopwell.kernels.sm90.prefill.kernel import PrefillSm90, with_arguments
from hopwell.kernels.warp_mma.common.lane_readers import LaneReaders
from hopwell.kernels.warp_mma.common.narrow_operands import E4m3Operands, Nvfp4Operands, WarpFp8Operands
from hopwell.kernels.warp_mma.common.row_loop import ConvertedOperands, SkippingWarpAttend, WarpAttend, WarpOperands
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig


class PrefillSm120(LaneReaders, PrefillSm90):
    """Attention over query tiles of ``tile.m`` rows, 16 rows for each warp, in steps of ``tile.n`` keys from right to
    left.

    Warp roles
        warp 0 load_k      K tiles, through the KV source
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      Q tiles
        warp 3 schedule    work tiles: the query rows, the keys and their locations
        warps 4.. attend   16 query rows each, from Q K^T to the output; at head dim 512 two warps have the same rows,
                           each with half of V's columns
        the last 4 convert dequantize 8-bit and 4-bit K and V to 16 bits, see ``dequantizes_by_warpgroup``

    Edges (``PrefillSm120(config).edges``, printed by ``pipeline.describe``)
        Q       load_q -> attend      released when the output has been written, which is staged in Q's place
        K       load_k -> attend      released when S has been computed
        V       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read
        With a convert role, K and V lead to convert. From there converted K and converted V lead to attend.

    Steady state: a step of two warps, A and B, that share a scheduler. Only the scheduler alternates between them:
    while one waits for its exponentials, the other's products are issued.

        tensor cores   |  A: S(i) = Q K(i)^T, O += P(i+1) V(i+1)  |  B: S(i) = Q K(i)^T, O += P(i+1) V(i+1)  |
        warp A         |                                          |  maximum, 2^(S(i) - reference), P(i)     |
        warp B         |  maximum, 2^(S(i+1) - ...), P(i+1)       |                                          |
        load_k, load_v |  fill the stages that the step before has released

    Without a convert role, each warp converts narrow K and V on the way to its products, see ``narrow_operands.py``.
    """

    staging_bytes = 0  # the output is staged in Q's place

    @property
    def operands_type(self) -> type[WarpOperands]:
        """Type of the operands that warps multiply."""
        if self.config.uses_fp8_mma:
            return WarpFp8Operands
        if self.config.dequantizes:
            return ConvertedOperands
        return {KvType.WIDE: WarpOperands, KvType.E4M3: E4m3Operands, KvType.NVFP4: Nvfp4Operands}[self.config.kv_type]

    def _more_edges(self) -> tuple[Edge, ...]:
        # Lanes, not the tensor cores, read the converted tiles.
        return tuple(replace(edge, consumer_lanes=LANES, consumer_fences=False) for edge in super()._more_edges())

    @property
    def attend_types(self) -> tuple[type, type]:
        return WarpAttend, SkippingWarpAttend


def build(config: Sm120PrefillConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return with_arguments(PrefillSm120(config))
