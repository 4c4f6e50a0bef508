"""Hopper decode of 17 to 32 rows over 8-bit and 4-bit caches: two warpgroups split the keys, not the rows.

K and V^T are dequantized in registers, as in ``dequant_wgmma.py``. Each warpgroup multiplies every second tile of a
leaf with all rows, so each key is dequantized once in a CTA. A warpgroup adds the leaves of a node of the tree in its
registers. At the end of a node each warpgroup hands half of the rows to the other one, through shared memory, and
combines the other half. From there on it has the nodes of its rows, as if the rows had been split.

The split needs registers for the scores and the output of all rows. With 64 rows they spill: 32 x 8192 tokens of e4m3
took 2.3 times as long as with split rows (H200, 2026-11-27).

Steady state: memory and instructions are the limit. A leaf is four tiles, A to D.

    memory         | K of A' to D'                           | V of A' to D'                | ...
    warpgroup 0    | K(A) | K(C) | softmax, P, sync | V(A) | V(C) | ... exchange of rows | nodes | waits
    warpgroup 1    | K(B) | K(D) | softmax, P, sync | V(B) | V(D) | ... exchange of rows | nodes | waits
    tensor cores   |      | S(A), S(B) | S(C), S(D) |             | O += P V (A), (B) | O += P V (C), (D)
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.parts.combine.tree import Node, joined
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import example_arguments
from hopwell.kernels.parts.core.warp_mma import QUAD
from hopwell.kernels.sm90.decode.base import argument_types
from hopwell.kernels.sm90.decode.dequant_wgmma import COMMON, WgmmaDequantOperands
from hopwell.kernels.sm90.decode.swap_ab import AccumulatedLeaves, LeafProducts, SwapABDecodeSm90


@device_struct(frozen=True)
class RowExchange:
    """Exchange of rows between the warpgroups at the end of a node.

    Vectors pass through the places of a warpgroup's own P and of its float32 values of rows.
    """

    operands: WgmmaDequantOperands

    @cute.jit
    def run(self, node: Node, softmax) -> None:
        """Set ``node``, which has this warpgroup's rows, to the sum over both warpgroups' keys.

        Each warpgroup gives the other one the rows that the other one keeps.
        """
        exchange = self.operands.exchange
        kept, given = self._halves(softmax)
        self._write_vectors(exchange.warpgroup, given)
        exchange.meet_all()
        node.assign(joined(kept, self._read_vectors(1 - exchange.warpgroup), node.rows // 2))
        exchange.meet_all()

    @cute.jit
    def _halves(self, softmax):
        """Return the vectors of the rows that this warpgroup keeps, and of the rows that it gives, see
        :meth:`Node.vectors`."""
        o, products = self.operands.o, self.operands.products
        is_second, half = self.operands.exchange.warpgroup == 1, products // 2
        kept, given = [], []
        for block in cutlass.range_constexpr(self.operands.blocks):
            for p in cutlass.range_constexpr(half):
                first, second = (4 * (block * products + each) for each in (p, half + p))
                kept.append([o[second + c] if is_second else o[first + c] for c in range(4)])
                given.append([o[first + c] if is_second else o[second + c] for c in range(4)])
        rows = [softmax.partial(r, ColumnFragment.lanes_per_row) for r in range(2 * products)]
        for p in cutlass.range_constexpr(half):
            lower, upper = ([rows[2 * each + c][part] for part in range(2) for c in range(2)] for each in (p, half + p))
            kept.append([upper[c] if is_second else lower[c] for c in range(4)])
            given.append([lower[c] if is_second else upper[c] for c in range(4)])
        return kept, given

    def _places(self, warpgroup) -> list:
        """Return the shared addresses of the vectors that a warpgroup gives. Lanes with the same rows share the
        statistics."""
        operands, kernel = self.operands, self.operands.kernel
        tile_bytes = kernel.tile.m * LEAF_TILE * HALFWORD_BYTES
        thread, half = cute.arch.thread_idx()[0] % WARPGROUP, operands.products // 2
        first = operands.p_tile + warpgroup * tile_bytes + thread * copy.VECTOR_BYTES
        of_block, each = kernel.config.consumer_warpgroups * tile_bytes, WARPGROUP * copy.VECTOR_BYTES
        output = [first + block * of_block + p * each for block in range(operands.blocks) for p in range(half)]
        in_warps = thread // LANES * QUAD + thread % QUAD
        state = operands.exchange.of_warpgroup(warpgroup) + in_warps * copy.VECTOR_BYTES
        return output + [state + p * (WARPS * QUAD * copy.VECTOR_BYTES) for p in range(half)]

    @cute.jit
    def _write_vectors(self, warpgroup, vectors: list) -> None:
        places, outputs = self._places(warpgroup), self.operands.blocks * self.operands.products // 2
        for i in cutlass.range_constexpr(outputs):
            copy.store_shared(places[i], vectors[i])
        if cute.arch.lane_idx() < QUAD:
            for i in cutlass.range_constexpr(outputs, len(places)):
                copy.store_shared(places[i], vectors[i])

    def _read_vectors(self, warpgroup) -> list:
        return [copy.load_shared(place, 4, Float32) for place in self._places(warpgroup)]


class SplitKeyLeaves(AccumulatedLeaves):
    """Main loop of warpgroups that have different tiles of a leaf. At the end of a node they exchange rows."""

    @cute.jit
    def attend_leaf(self, attend, operands, node: Node, q_stage, row: cutlass.Constexpr, n, masked, step, begins, ends):
        step = AccumulatedLeaves.attend_leaf(self, attend, operands, node, q_stage, row, n, masked, step, begins, ends)
        if ends:
            RowExchange(operands).run(node, attend.softmax)
        return step


@dataclass(frozen=True)
class SplitKeyProducts(LeafProducts):
    """Products of warpgroups that have different tiles of a leaf."""

    splits_keys: ClassVar[bool] = True

    def roles(self, kernel: Any) -> dict[str, int]:
        return {"attend of one": WARPS}

    def node(self, operands: Any, rows: int) -> Node:
        return Node.of(cute.make_rmem_tensor(cute.size(operands.o) // 2, Float32), rows)

    def main_loop(self, kernel: Any) -> SplitKeyLeaves:
        return SplitKeyLeaves()


SPLIT_KEYS = SplitKeyProducts(WgmmaDequantOperands, **COMMON, kv_consumer="attend of one")


def build(config: DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABDecodeSm90(config, SPLIT_KEYS), example_arguments(argument_types(config), floats=3)
