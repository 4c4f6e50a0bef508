"""Common parts of the Hopper kernels: four producer warps, and consumer warpgroups that hold S, P and O."""

from dataclasses import replace

from cutlass import const_expr

from hopwell.kernels.config.base import KernelConfig
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPS
from hopwell.kernels.parts.core.kernel import AttentionKernel
from hopwell.kernels.parts.core.pipeline import Edge, check_arrivals
from hopwell.kernels.parts.load.kv_rows import PageRows

K_WARP, V_WARP, Q_WARP, SCHEDULE_WARP = range(4)


class AttentionSm90(AttentionKernel):
    """Four producer warps and consumer warpgroups over tiles of ``tile.m`` query rows and ``tile.n`` keys."""

    def __init__(self, config: KernelConfig):
        self.warpgroups = config.consumer_warpgroups
        super().__init__(config)

    q_role = "load_q"  # role that loads Q
    warps_without_work = 0  # producer warps that do not read the work queue
    products_read_shared = True  # whether the tensor cores, not the lanes of a warp, read operands from shared memory

    @property
    def storing_warps(self) -> int:
        return 4 * self.warpgroups

    def _edges(self) -> tuple[Edge, ...]:
        c, t, consumers = self.config, self.tile, 4 * self.warpgroups
        roles = {"load_k": 1, "load_v": 1, "load_q": 1, "schedule": 1, "attend": consumers, **self.more_roles}
        others = roles["all others"] = 4 * len(c.registers) - 1 - self.warps_without_work
        q_bytes = t.m * c.q_columns * HALFWORD_BYTES
        edges = (
            Edge("Q", self.q_role, "attend", t.q_stages, 1, consumers, q_bytes, **self.q_arrivals),
            *self._kv_edges("attend", consumers),
            self._work_edge(others),
            *self._more_edges(),
        )
        check_arrivals(edges, roles)
        return edges

    @property
    def q_arrivals(self) -> dict[str, int]:
        """Arrive counts of Q's edge that differ from a TMA load."""
        return {}

    @property
    def more_roles(self) -> dict[str, int]:
        """Warps of the roles beyond the producers and attend."""
        return {}

    def edges_in_place(self, edges: list[Edge], role: str) -> list[Edge]:
        """Return the edges of K and V for dequantization in place by the warpgroup ``role``."""
        copies_rows = issubclass(self.source, PageRows)
        # Lanes of load_v write zeros, and lanes read them.
        lanes = [LANES if copies_rows or edge.name == "V" else 1 for edge in edges]
        wide = [replace(edge, producer=role, producer_warps=WARPS, producer_lanes=LANES) for edge in edges]
        loaded = [
            Edge(f"loaded {edge.name}", edge.producer, role, edge.stages, 1, WARPS, 0, count)
            for edge, count in zip(edges, lanes, strict=True)
        ]
        return [*wide, *loaded]

    def loading_ring(self, rings, part: int):
        """Return the ring that the load warp of K (part 0) or V (part 1) fills. With dequantization in place, the
        consumers of the products release its stages."""
        ring = (rings.k, rings.v)[part]
        if const_expr(not self.config.dequantizes_in_place):
            return ring
        loaded = (rings.loaded_k, rings.loaded_v)[part]
        return replace(ring, full=loaded.full, producer_lanes=loaded.producer_lanes)

    def _more_edges(self) -> tuple[Edge, ...]:
        return ()
