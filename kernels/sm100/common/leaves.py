"""Leaves of Hopper's kernels with S and O in tensor memory: edges, allocation and the attend role."""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_address, shared_array
from hopwell.kernels.parts.core.pipeline import Edge, NamedBarrier, Roles
from hopwell.kernels.parts.partition.stream_k import StreamKTile
from hopwell.kernels.sm90.decode.swap_ab import LeafAttend, LeafProducts
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.accumulators import Accumulators


@device_struct
class TensorLeafAttend(LeafAttend):
    """Consumer warpgroup whose accumulators are in tensor memory."""

    tensor_memory: list  # addresses of the allocations

    def create_operands(self) -> Any:
        rings, kernel = self.rings, self.kernel
        tiles = self.operands.tiles_at_once(kernel)
        stacked = kernel.config.operand_buffers > 0
        accumulators = Accumulators(kernel, rings.s, rings.o, self.tensor_memory, kernel.row_part(), tiles, stacked)
        operands = self.operands.create(kernel, self.tiles, rings, accumulators)
        if const_expr(kernel.config.accumulated_levels > 0):
            # The compiler selects the state that a node begins with, and a select reads the state before it, too.
            self.softmax.reset()
            operands.o.fill(0.0)
        return operands

    def begin_segment(self, operands, tile: StreamKTile, work, step) -> None:
        operands.begin(self.rings.q, work)
        if const_expr(operands.issues_ahead):
            operands.issue_first(step, tile.keys.end - tile.keys.begin, self.rings.q.stage(work))


class ScoresAhead:
    """Mixin of operands: S of the next leaf is issued behind O of this one. So its products overlap the load of O and
    the tree."""

    issues_ahead = True  # whether S of a leaf is issued before the leaf before it is complete
    leaf_tiles: int
    end_step: Any  # in a register: the step after the segment's last tile
    q_stage: Any  # in a register

    def issue_first(self, step, leaves, q_stage) -> None:
        """Issue S^T of the first of a segment's ``leaves``."""
        self.end_step[0] = step + leaves * self.leaf_tiles
        self.q_stage[0] = q_stage
        self.issue_scores(step)

    def issue_scores(self, step):
        """Issue S^T of the leaf whose first tile is number ``step``, if the segment has the leaf."""
        raise NotImplementedError


@dataclass(frozen=True)
class TensorProducts(LeafProducts):
    """Products of leaves by tcgen05, in the kernels ``SwapABDecodeSm90`` and ``SwapABMlaSm90``.

    The kernels have the roles of Hopper's. In addition, a thread of the first consumer warp issues the products of the
    rows of all warpgroups, and this warp allocates tensor memory. A thread of the second warp issues the products of
    dequantized V.

    Edges that differ from Hopper's
        k, v    load -> issue         K and V of 16 bits, and of fp8 MMA: released when their products are done
        s, o    issue -> attend       full when products are done. They are not released: the warps of all warpgroups
                                      meet before the next products are issued
        a       attend of one -> issue  dequantized tiles of K and V in tensor memory, see decode/dequant.py
    """

    kv_consumer: str = "issue"
    shares_rows: ClassVar[bool] = True

    def roles(self, kernel: Any) -> dict[str, int]:
        return {"attend of one": WARPS, "issue": 1}

    def edges(self, kernel: Any, roles: Roles) -> list[Edge]:
        warpgroups, buffers = kernel.config.consumer_warpgroups, kernel.config.operand_buffers
        edges = [roles.edge(name, "issue", "attend", stages=1) for name in ("s", "o")]
        if buffers:
            edges.append(roles.edge("a", "attend of one", "issue", buffers * warpgroups))
        return edges

    def attend(self, kernel: Any, fields: dict[str, Any], addresses, geometry) -> None:
        # The last bytes of the state, behind the values of the most rows.
        slot = shared_address(fields["tiles"].staging) + (kernel.nodes_bytes + kernel.state_bytes - copy.VECTOR_BYTES)
        allocated = allocate_columns(kernel, slot)
        role = TensorLeafAttend(**fields, operands=self.operands, tensor_memory=allocated)
        role.run(addresses, geometry)
        free_columns(kernel, allocated)


@cute.jit
def allocate_columns(kernel, slot) -> list:
    """Allocate tensor memory for all consumer warps, and return the addresses of the allocations. They pass through
    ``slot`` in shared memory."""
    if cute.arch.warp_idx() == WARPS:
        tmem.allocate(slot, columns=kernel.config.allocations)
    meet_all(kernel)
    tmem.after_signal()
    return [shared_array(Int32, slot)[i] for i in range(len(kernel.config.allocations))]


@cute.jit
def free_columns(kernel, allocated) -> None:
    """Free tensor memory once all consumer warps are done with it."""
    tmem.before_signal()
    meet_all(kernel)
    if cute.arch.warp_idx() == WARPS:
        tmem.after_signal()
        for address, columns in zip(allocated, kernel.config.allocations, strict=True):
            tmem.free(address, columns=columns)


def meet_all(kernel) -> None:
    """Wait for all consumer warps."""
    threads = kernel.config.consumer_warpgroups * WARPGROUP
    cute.arch.barrier(barrier_id=NamedBarrier.ALL_CONSUMERS, number_of_threads=threads)
