"""sm_120 prefill: TMA, warp specialisation and mma.sync, with the roles, schedules and parts of Hopper's kernel."""

from typing import Any

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.pipeline import Reader
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS
from hopwell.kernels.sm90.common.attend import MainLoop
from hopwell.kernels.sm90.prefill.kernel import PrefillSm90
from hopwell.kernels.warp_mma.common.narrow_operands import (
    E4m3Elements,
    Fp8Elements,
    NarrowElements,
    NarrowOperands,
    Nvfp4Elements,
)
from hopwell.kernels.warp_mma.common.operands import DequantizedElements, WarpOperands, WarpPlace, WideElements
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig


class PrefillSm120(PrefillSm90):
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
        q       load_q -> attend      released when the output has been written, which is staged in Q's place
        k       load_k -> attend      released when S has been computed
        v       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read
        With a convert role, k and v lead to convert. From there converted_k and converted_v lead to attend.

    Steady state: a step of two warps, A and B, that share a scheduler. Only the scheduler alternates between them:
    while one waits for its exponentials, the other's products are issued.

        tensor cores   |  A: S(i) = Q K(i)^T, O += P(i+1) V(i+1)  |  B: S(i) = Q K(i)^T, O += P(i+1) V(i+1)  |
        warp A         |                                          |  maximum, 2^(S(i) - reference), P(i)     |
        warp B         |  maximum, 2^(S(i+1) - ...), P(i+1)       |                                          |
        load_k, load_v |  fill the stages that the step before has released

    Without a convert role, each warp converts 8-bit and 4-bit K and V on the way to its products, see
    ``narrow_operands.py``.
    """

    staging_bytes = 0  # the output is staged in Q's place
    reader = Reader.LANES
    place = WarpPlace
    stages_in_q = True
    ping_pong_warpgroups = 1
    main_loop = MainLoop()

    @property
    def operands(self) -> type[WarpOperands]:
        """Matrix operands of a consumer warp."""
        return NarrowOperands if issubclass(self.elements, NarrowElements) else WarpOperands

    @property
    def elements(self) -> type[WideElements]:
        """Elements of K and V, with their conversion."""
        c = self.config
        if c.uses_fp8_mma:
            return Fp8Elements
        if c.dequantizes:
            return DequantizedElements
        return {KvType.WIDE: WideElements, KvType.E4M3: E4m3Elements, KvType.NVFP4: Nvfp4Elements}[c.kv_type]

    @property
    def peels_unmasked_step(self) -> bool:
        """Whether a loop of one step precedes the loop over unmasked steps.

        With 128 registers ptxas moves and spills O in the first of a kernel's loops over steps: 27 of 467 instructions
        at 128 columns without a mask. A loop of one step before it leaves none of 363 instructions, and under masks at
        most 3 of the 14 to 16. Up to 64 columns there are 2 to 4 without this loop, and up to 12 with it (2026-11-25).
        """
        return self.config.dequantizes and max(self.layout.depth) > BLOCK_COLUMNS

    @property
    def stages_pairs(self) -> bool:
        return not self.config.has_narrow_kv

    def output_staging(self, tiles, consumer_warp):
        """Return the address of this warp's part of Q's place, which stages its output. It is the warp's own rows of
        the first column block, unless several warps have the same rows."""
        return shared_address(tiles.q.iterator) + consumer_warp * (WARP_ROWS * copy.SWIZZLE_ROW_BYTES)


def build(config: Sm120PrefillConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return PrefillSm120(config).with_arguments()
