"""The first four warps of Hopper's kernels and of kernels on mma.sync, and conversion of K and V in place."""

from dataclasses import replace

from cutlass import const_expr

from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core.kernel import AttentionKernel
from hopwell.kernels.parts.core.pipeline import Edge, Roles

K_WARP, V_WARP, Q_WARP, SCHEDULE_WARP = range(4)
LOAD_ROLES = {"load_k": 1, "load_v": 1, "load_q": 1, "schedule": 1}


def kv_edges_in_place(
    kernel: AttentionKernel, roles: Roles, converter: str = "convert", consumer: str = "attend"
) -> list[Edge]:
    """Return the edges of K and V for conversion in place.

    Loaded tiles lead from the load warps to ``converter``, and K and V from there to the tensor cores of ``consumer``,
    which releases the stages.
    """
    wide, loaded = [], []
    for i, name in enumerate(("k", "v")):
        stages, size = kernel.tile.loaded_stages[i], kernel.stage_bytes[i]
        wide.append(roles.edge(name, converter, consumer, stages, size, producer_lanes=LANES))
        # Lanes of load_v write zeros, and lanes read them.
        lanes = LANES if kernel.copies_rows or name == "v" else 1
        loaded.append(roles.edge(f"loaded_{name}", f"load_{name}", converter, stages, producer_lanes=lanes))
    return [*wide, *loaded]


def loading_ring(kernel: AttentionKernel, rings, part: int):
    """Return the ring that the load warp of K (part 0) or V (part 1) fills. With conversion in place, the consumers of
    the products release its stages."""
    ring = (rings.k, rings.v)[part]
    if const_expr(not kernel.config.dequantizes_in_place):
        return ring
    loaded = (rings.loaded_k, rings.loaded_v)[part]
    return replace(ring, full=loaded.full, producer_lanes=loaded.producer_lanes)
