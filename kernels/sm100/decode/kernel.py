"""Blackwell decode of few rows (swap-AB, stream-K): the leaves of Hopper's kernels, with S and O in tensor memory.

The products are S^T = K Q^T and O^T = V^T P^T. M is 64 keys, or 64 columns of V. N is up to 64 packed rows. An
accumulator with M = 64 is in the first 16 lanes of each warp. ``tcgen05.ld.16x256b`` loads it into the registers in
which wgmma has it. So softmax, masks, the tree, stream-K and the output are Hopper's code.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.barriers import NamedBarrier
from hopwell.kernels.parts.core.device import device_struct, shared_address, shared_array, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Rings, Roles
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS
from hopwell.kernels.parts.rows.softmax import HalfLeafSoftmax, HalfSoftmax
from hopwell.kernels.sm90.common.kernel import LOAD_ROLES
from hopwell.kernels.sm90.decode.base import DecodeKernel, argument_types
from hopwell.kernels.sm90.decode.dequant_swap_ab import VectorOutput
from hopwell.kernels.sm90.decode.leaves import STATE_BYTES, LeafTree, write_weights
from hopwell.kernels.sm90.decode.loads import KvLoads
from hopwell.kernels.sm90.decode.swap_ab import AccumulatedLeaves, LeafAttend, LeafProducts, SwapABTree, WholeLeaf
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.mma import Mma, SharedOperand, issue
from hopwell.kernels.sm100.decode.accumulators import ISSUING_WARP, MMA_ROWS, Accumulators
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig
from hopwell.kernels.sm100.decode.dequant import TensorDequantOperands


@device_struct
class TensorLeafOperands:
    """Operands of a warpgroup's products of a leaf: K, Q, V and P in shared memory, S and O in tensor memory, and in
    registers once they are complete."""

    kernel: Any  # configuration only
    q: SharedOperand
    k: SharedOperand
    v: SharedOperand
    p: SharedOperand
    s: Any  # scores of the tiles of a leaf in registers, in the order of wgmma's accumulators
    o: Any
    accumulators: Accumulators

    @staticmethod
    def create(kernel, tiles: SharedTiles, rings: Rings, accumulators: Accumulators) -> "TensorLeafOperands":
        c, m, n, part = kernel.config, kernel.tile.m, kernel.tile.n, accumulators.part
        columns_first, (qk_columns, v_columns) = kernel.source.columns_first, c.layout.columns
        return TensorLeafOperands(
            kernel,
            q=SharedOperand.of(tiles.q, m, c.layout.q_columns, columns_first=False).from_row(part.first_row),
            k=SharedOperand.of(tiles.k, n, qk_columns, columns_first),
            v=SharedOperand.of(tiles.v, n, v_columns, columns_first, reduces_rows=True),
            p=SharedOperand.of(tiles.p, m, LEAF_TILE, columns_first=False).from_row(part.first_row),
            s=cute.make_rmem_tensor(part.rows * c.leaf_tiles // 2, Float32),
            o=cute.make_rmem_tensor(part.rows * c.value_blocks // 2, Float32),
            accumulators=accumulators,
        )

    @property
    def products(self) -> int:
        """Products of 8 rows, side by side."""
        return self.accumulators.rows // MMA_COLUMNS

    @property
    def leaf_tiles(self) -> int:
        return self.kernel.config.leaf_tiles

    def begin(self, q_ring, work) -> None:
        """Do nothing: Q of a segment stays in shared memory."""

    def end(self, q_ring, work) -> None:
        """Release Q after the segment's last product."""
        q_ring.release(work)

    def multiply_keys(self, ring, step, q_stage) -> None:
        """Compute S^T of a leaf; ``step`` is the number of its first tile."""
        self._issue_scores(ring, step, q_stage)
        self.accumulators.take_s(step, self.s)

    @cute.jit
    def _issue_scores(self, ring, step, q_stage):
        if warp_in_warpgroup() == ISSUING_WARP:
            place, rows = self.accumulators.place("s"), self.accumulators.rows
            mma, depth, q = Mma(self.kernel.dtype, rows, MMA_ROWS), self.kernel.layout.depth[0], self.q.at(q_stage)
            # Not unrolled: the compiler would compute all descriptors and barriers before the leaves, and spill.
            for i in cutlass.range(self.leaf_tiles, unroll=1):
                ring.wait_full(step + i)
                tmem.after_signal()
                with cute.arch.elect_one():
                    issue(place + i * rows, self.k.at(ring.stage(step + i)), q, mma, (0, depth))
                    tmem.commit(shared_address(ring.empty + ring.stage(step + i)))
            self.accumulators.signal(self.accumulators.s_ring, step)

    def write_weights(self, p, scores, tile: int) -> None:
        """Write P of a tile of keys to ``p`` in shared memory, as tile number ``tile``."""
        write_weights(p, self.kernel.tile.m, self.kernel.dtype, scores, tile, self.accumulators.part.first_row)

    def prepare_values(self, rings, step) -> None:
        """Make P in shared memory visible to the tensor cores, before the warps meet."""
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def multiply_values(self, ring, step):
        """Issue O^T of a leaf. The products are still in flight on return."""
        if warp_in_warpgroup() == ISSUING_WARP:
            place, rows = self.accumulators.place("o"), self.accumulators.rows
            mma = Mma(self.kernel.dtype, rows, MMA_ROWS, m_major_a=True)
            for i in cutlass.range(self.leaf_tiles, unroll=1):
                ring.wait_full(step + i)
                tmem.after_signal()
                with cute.arch.elect_one():
                    stage, p = ring.stage(step + i), self.p.at(i)
                    for block in cutlass.range_constexpr(self.kernel.config.value_blocks):
                        v = self.v.from_column(block * BLOCK_COLUMNS).at(stage)
                        issue(place + block * rows, v, p, mma, (0, LEAF_TILE), (i > 0).to(Int32))
                    tmem.commit(shared_address(ring.empty + stage))
            self.accumulators.signal(self.accumulators.o_ring, step)

    def finish_values(self, ring, step) -> None:
        """Wait for O^T of a leaf, and load or add it."""
        self.accumulators.take_o(step, self.o)

    def scores(self) -> ColumnFragment:
        """Return the scores of all tiles; a warp has 16 keys of each tile."""
        return ColumnFragment(self.s, 2 * self.leaf_tiles, self.products)

    def tile_scores(self, i: int) -> ColumnFragment:
        """Return the scores of tile i of the leaf; a warp has 16 of its keys."""
        registers = 4 * self.products
        tile = cute.make_tensor(self.s.iterator + i * registers, cute.make_layout(registers))
        return ColumnFragment(tile, 2, self.products)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)


@device_struct
class TensorLeafAttend(LeafAttend):
    """Consumer warpgroup whose accumulators are in tensor memory."""

    tensor_memory: Int32

    def create_operands(self) -> Any:
        rings, part = self.rings, self.kernel.row_part()
        accumulators = Accumulators(self.kernel, rings.s, rings.o, self.tensor_memory, part)
        return self.operands.create(self.kernel, self.tiles, rings, accumulators)


class DecodeSm100(SwapABTree, DecodeKernel):
    """Attention of ``tile.m`` packed rows, leaf by leaf from right to left.

    Warp roles
        warp 0 load_k      K tiles, through the KV source
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    segments of output tiles, see parts/partition/stream_k.py
        warps 4..7 attend  from S in tensor memory to a leaf's node, and from nodes to the output, see
                           parts/combine/tree.py; a warp has 16 keys of each tile, and 16 of every 64 columns of the
                           output. A thread of warp 4 issues the products
        warps 8..11 attend  the other half of the rows, if two warpgroups share the rows of a tile; a thread of warp 8
                           issues their products

    Edges
        q       load_q -> attend      released after the segment's last leaf
        k       load_k -> issue       released when the tile's S has been computed; 8-bit and 4-bit tiles go to attend,
                                      which releases them when they are in registers
        v       load_v -> issue       released when the tile's product has been added to O; likewise
        work    schedule -> all       released as soon as it has been read
        s, o    issue -> attend       full when the products of a leaf are done, with a stage for each warpgroup. They
                                      are not released: the warps meet before the next products are issued
        a       attend -> issue       dequantized tiles of K and V in tensor memory, for each warpgroup; see dequant.py

    Tensor memory: S has a column for each row and tile of a leaf, O one for each row and 64 columns of V. With 8 rows
    at head dim 128 they take 32 columns, and with 64 rows 384. A dequantized tile takes a column for each two columns
    of K, or for each two keys and 64 columns of V.

    Steady state: memory is the limit. A leaf is two tiles, A and B, or four.

        memory         | A'                                    | B'                                    | ...
        tensor cores   | S(A) | S(B) |                         | O = P V (A) | O += P V (B) |         waits
        attend         |    waits    | load S | P of both | meet |          waits           | load O | nodes | waits
    """

    def __init__(self, config: Sm100DecodeConfig, products: LeafProducts):
        self.products, self.reader, self.loads = products, products.reader, KvLoads(self)
        super().__init__(config)

    @property
    def roles(self) -> dict[str, int]:
        warpgroups = self.config.consumer_warpgroups
        attend = {"attend": self.storing_warps, "attend of one": WARPS, "issue": 1, "issue of all": warpgroups}
        return {**LOAD_ROLES, **attend, "all others": WARPS * len(self.config.registers) - 1}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        consumer = ("issue of all" if self.reader is Reader.TENSOR_CORES else "attend", self.reader)
        warpgroups, buffers = self.config.consumer_warpgroups, self.config.operand_buffers
        edges = [roles.edge(name, "issue", "attend", warpgroups) for name in ("s", "o")]
        if buffers:
            edges.append(roles.edge("a", "attend of one", "issue", buffers * warpgroups))
        return self.q_edge(roles), *self._kv_edges(roles, consumer, consumer), self._work_edge(roles), *edges

    def load(
        self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry, schedule, output_scale
    ) -> None:
        self.loads.run(warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry)

    def run_attend(
        self, parts: dict[str, Any], softmax_scale, output_scale, addresses: Addresses, geometry: DecodeGeometry
    ) -> None:
        tiles, exchange = parts["tiles"], self.exchange(parts["tiles"])
        # The last bytes of the state, behind the values of the most rows.
        tensor_memory = self._allocate_columns(
            shared_address(tiles.staging) + (self.nodes_bytes + STATE_BYTES - copy.VECTOR_BYTES)
        )
        leaves = LeafTree(
            self, exchange, self.tree(addresses, geometry, tiles), self.products.output(self), output_scale
        )
        TensorLeafAttend(
            **parts,
            logits=self.loads.logits(parts["mask"], addresses, geometry),
            exchange=exchange,
            leaves=leaves,
            main_loop=AccumulatedLeaves() if self.config.accumulated_levels else WholeLeaf(),
            operands=self.products.operands,
            tensor_memory=tensor_memory,
        ).run(addresses, geometry)
        self._free_columns(tensor_memory)

    @cute.jit
    def _allocate_columns(self, slot):
        if cute.arch.warp_idx() == WARPS:
            tmem.allocate(slot, columns=self.config.allocated_columns)
        self._meet_all()
        tmem.after_signal()
        return shared_array(Int32, slot)[0]

    @cute.jit
    def _free_columns(self, tensor_memory):
        tmem.before_signal()
        self._meet_all()
        if cute.arch.warp_idx() == WARPS:
            tmem.after_signal()
            tmem.free(tensor_memory, columns=self.config.allocated_columns)

    def _meet_all(self) -> None:
        """Wait for all consumer warps."""
        threads = self.config.consumer_warpgroups * WARPGROUP
        cute.arch.barrier(barrier_id=NamedBarrier.TENSOR_MEMORY, number_of_threads=threads)


WIDE = LeafProducts(TensorLeafOperands, Reader.TENSOR_CORES)
DEQUANT = LeafProducts(TensorDequantOperands, Reader.SYNCED_LANES, HalfLeafSoftmax, VectorOutput)


def build(config: Sm100DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    products = WIDE if config.kv_type is KvType.WIDE else DEQUANT
    if config.accumulated_levels and products is DEQUANT:
        products = replace(DEQUANT, softmax=HalfSoftmax)
    return DecodeSm100(config, products), example_arguments(argument_types(config), floats=3)
