"""The load warps of decode kernels: K and V of a paged cache, and the packed rows of Q."""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import const_expr

from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles
from hopwell.kernels.parts.load.block_scales import SharedScales
from hopwell.kernels.parts.load.kv_source import KvOperand
from hopwell.kernels.parts.rows.mask import IntervalMask
from hopwell.kernels.sm90.common.kernel import K_WARP, LOAD_ROLES, Q_WARP, V_WARP, loading_ring
from hopwell.kernels.sm90.decode.rows import PackedLogits


class KvLoads:
    """Loads of K by warp 0, of V by warp 1 and of Q by warp 2."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    @property
    def roles(self) -> dict[str, int]:
        return LOAD_ROLES

    def edges(self, roles: Roles, reader: Reader, consumer: str = "attend") -> list[Edge]:
        """Return the edges of K and V."""
        return self.kernel._kv_edges(roles, (consumer, reader), (consumer, reader))

    def logits(self, mask: IntervalMask, addresses: Addresses, geometry: DecodeGeometry) -> PackedLogits:
        """Return the rows' view of the keys."""
        return PackedLogits(mask, addresses, geometry)

    @cute.jit
    def run(self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry):
        """Run the load warps."""
        operands = (
            KvOperand.key(addresses, geometry, self.kernel.config),
            KvOperand.value(addresses, geometry, self.kernel.config),
        )
        if warp == K_WARP:
            self._load_operand(0, atoms, operands, tiles, rings, zeroing_barriers, work_queue)
        if warp == V_WARP:
            self._load_operand(1, atoms, operands, tiles, rings, zeroing_barriers, work_queue)
        if warp == Q_WARP:
            self.kernel.load_all_q(addresses, geometry, tiles, rings, work_queue)

    def _load_operand(self, which: int, atoms, operands, tiles, rings, zeroing_barriers, work_queue) -> None:
        """Load K (0) or V (1) of every work tile."""
        shared, operand = shared_address((tiles.k, tiles.v)[which].iterator), operands[which]
        operand = self.kernel.divided(operand)
        if const_expr(self.kernel.config.copies_scales):
            operand = replace(operand, shared_scales=SharedScales.of(self.kernel, tiles, which))
        ring = loading_ring(self.kernel, rings, which)
        self.kernel.load_kv(atoms[which], shared, ring, zeroing_barriers + which, work_queue, operand)
