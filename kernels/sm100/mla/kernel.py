"""Blackwell MLA decode of more than 16 packed rows: pairs of CTAs with tcgen05, scores and output in tensor memory."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvFetch, KvType
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import DecodeAddresses, DecodeGeometry
from hopwell.kernels.parts.core import cluster, copy
from hopwell.kernels.parts.core.device import load_scale, shared_address, shared_array
from hopwell.kernels.parts.core.fragment import LaneRow
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles
from hopwell.kernels.parts.load.kv_source import KvSource
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax, TileSoftmax
from hopwell.kernels.sm90.decode.base import DecodeKernel
from hopwell.kernels.sm90.mla.key_halves import LatentKernel, LatentLogits
from hopwell.kernels.sm100.common import pair, tmem
from hopwell.kernels.sm100.common.pair import LeaderRing, PairRing, RelayRing
from hopwell.kernels.sm100.mla.config import CTA_ROWS, CTAS, KEYS, ROLES, Sm100MlaConfig
from hopwell.kernels.sm100.mla.correction import Correction
from hopwell.kernels.sm100.mla.dequantize import Dequantize
from hopwell.kernels.sm100.mla.loads import (
    BOX_BYTES,
    VALUE_BOXES,
    EightBitRows,
    LatentBoxes,
    LatentRows,
    LoadK,
    LoadV,
)
from hopwell.kernels.sm100.mla.partition import partition_of
from hopwell.kernels.sm100.mla.products import Products, Relay
from hopwell.kernels.sm100.mla.softmax import FACTORS, Softmax

CORRECTION_WARP, MMA_WARP = ROLES.first("correction"), ROLES.first("mma")
K_WARP, V_WARP, SCHEDULE_WARP = (ROLES.first(name) for name in ("load_k", "load_v", "schedule"))
FACTOR_BYTES = 4 * FACTORS
FACTOR_STAGES = 2


class MlaSm100(LatentKernel, DecodeKernel):
    """Attention of up to 128 packed rows by a pair of CTAs with 64 rows each, in steps of 128 keys from right to left.

    Warp roles, in both CTAs
        warps 0..3    softmax     a thread has 64 keys of a row, from S in tensor memory to P in shared memory
        warps 4..7    correction  rescales O when a row's reference moves; at the end stores results or partials, and
                                  combines partials
        warp 8        mma         in the leader copies Q to tensor memory and issues all products; in the other CTA it
                                  is the relay, which tells the leader that tiles have been loaded
        warp 9        load_k      this CTA's 64 keys of a step, all columns; by TMA, or lanes copy rows
        warp 10       load_v      all keys of a step, this CTA's half of the value's columns
        warp 11       schedule    work tiles, the same in both CTAs, and this CTA's rows of Q
        warps 12..15  dequantize  only over 8-bit keys: boxes of K and V in turn, in place
        warps 12..15  combine     only in batch-invariant kernels: row shares whose partials are complete; over 8-bit
                                  keys it is warp 15 alone

    Edges (``MlaSm100(config).edges``). Products arrive at barriers of both CTAs; all warps that the leader waits for
    arrive at its barriers.
        q       schedule -> mma       released when the last S of the work tile has been computed
        k       load_k -> mma         boxes of 64 keys and 128 bytes, released one by one as S is computed
        v       load_v -> mma         stages of two boxes, released one by one as O is computed
        loaded_k, loaded_v  load -> dequantize  8-bit boxes; dequantize fills k and v, which products release
        relayed_q, relayed_k, relayed_v  mma of the other CTA -> mma of the leader: full when the other CTA's stage is
        work    schedule -> all others
        s       mma -> softmax        released when both CTAs have S in registers. After a work tile's last S, Q of the
                                      next one may replace Q in tensor memory
        p       softmax -> mma        full when both CTAs have written P; released when O has been computed
        factor  softmax -> correction a value per thread: the factor of a row of O for each step but the first, and at
                                      the end of a work tile the row's reference, then its sum over 64 of the keys
        partial correction -> schedule  only in batch-invariant kernels: released for each work tile when its slot may
                                      be written; full when this CTA's rows of the slot have been written
        o       mma -> correction     full after each step; released when O has been corrected or stored and may be
                                      added to

    Tensor memory: at head dim 576/512 S has 64 columns, O 256 and Q 192 in 16 bits, 160 in e4m3. Shared memory there:
    Q 72 KiB, K 72, V 64, P 16 in 16 bits; in e4m3 Q 40 KiB, two steps of K 40 and V 32, P 8.

    ``tcgen05.cp`` copies the first boxes of Q to tensor memory in both CTAs, once in a work tile. At head dim 576 it
    copies six of nine boxes in 16 bits, and all five in e4m3. Products read the other boxes from shared memory.

    In e4m3 each step has references of its own, see TileSoftmax, and O is rescaled in nearly every step.

    8-bit keys have the stages of 16-bit keys: their bytes are copied to half of the place of their results, see
    ``EightBitRows``. Each CTA dequantizes all boxes that it reads: 64 keys for K, half of the columns of 128 for V.

    Steady state: S of a step is computed before O of the step before, and overlaps its softmax.

        tensor cores   | S(i+1)                    | O += P(i) V(i)     | S(i+2)                  | O += P(i+1) V(i+1)
        softmax        | softmax of S(i)      P(i) | softmax of S(i+1)        P(i+1), when O is done |
        correction     |  O *= factor(i), if any row's is not 1  |        | O *= factor(i+1) ...
        load_k, load_v | boxes of V(i)             | boxes of K(i+2)    | boxes of V(i+1)         | boxes of K(i+3)

    A matrix instruction computes 128 rows, 64 in each CTA. Operand A, Q or P, is in each CTA for its own rows. Operand
    B is half in each: 64 of the keys for S = Q K^T, half of the value's columns for O += P V. So a CTA reads only
    half of K and half of V from shared memory, which is the limit of this kernel. A row of S and of O has two lanes of
    tensor memory, 64 apart. Each lane has 64 of the keys of S and half of the value's columns of O.
    """

    q_rows = CTA_ROWS
    storing_warps = 0
    staging_bytes = 0
    lanes_read_q = False

    def __init__(self, config: Sm100MlaConfig):
        self.partition = partition_of(self, config.batch_invariant)
        super().__init__(config)

    def kv_source(self) -> type[KvSource]:
        if self.config.kv_type is not KvType.WIDE:
            return EightBitRows
        return LatentBoxes if self.config.kv_fetch is KvFetch.PAGE_BOXES else LatentRows

    def _kv_atoms(self, a: DecodeAddresses, g: DecodeGeometry):
        if const_expr(self.copies_rows):
            return None, None
        page, head, row = self.layout.kv_strides(g.k_page, g.k_head, g.k_row)
        shape = (g.k_rows, sum(self.layout.kv_dims), g.k_pages * (page // head))
        atom = self._row_boxes(a.key, shape, (row, head), self.config.box_rows)
        return atom, atom

    @property
    def roles(self) -> dict[str, int]:
        warps = {name: role.warps for name, role in self.config.roles.roles.items()}
        both = {f"{name} of both": CTAS * warps[name] for name in ("softmax", "correction")}
        one = {"one of dequantize": 1} if "dequantize" in warps else {}
        others = sum(warps.values()) - warps.get("combine", 0) - 1
        return {**warps, **both, **one, "relay": 1, "all others": others}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        c, lanes = self.config, dict(producer_lanes=LANES, consumer_lanes=LANES)
        stages = {"k": c.steps_ahead * c.k_boxes, "v": c.steps_ahead * c.v_stages}
        sizes = {"k": BOX_BYTES, "v": VALUE_BOXES * BOX_BYTES}
        q, arrivals = self.q_edge(roles), Reader.TENSOR_CORES.arrivals(copies_rows=self.copies_rows, writes_zeros=False)
        loaded = stages if c.dequantized_boxes else {}
        producer = "one of dequantize" if loaded else "load_{}"
        return (
            q,
            *(roles.edge(n, producer.format(n), "mma", stages[n], sizes[n], **arrivals) for n in stages),
            *(
                roles.edge(f"loaded_{n}", f"load_{n}", "one of dequantize", loaded[n], producer_lanes=LANES)
                for n in loaded
            ),
            *(roles.edge(f"relayed_{name}", "relay", "mma", n) for name, n in {"q": q.stages, **stages}.items()),
            self._work_edge(roles),
            roles.edge("s", "mma", "softmax of both", 1),
            roles.edge("p", "softmax of both", "mma", 1, CTA_ROWS * KEYS * c.q_bytes),
            roles.edge("factor", "softmax", "correction", FACTOR_STAGES, FACTOR_BYTES, **lanes),
            *self.partition.edges(roles),
            roles.edge("o", "mma", "correction of both", 1),
        )

    def q_edge(self, roles: Roles) -> Edge:
        size = self.q_rows * self.layout.q_columns * HALFWORD_BYTES
        return roles.edge("q", "schedule", "mma", self.tile.q_stages, size, producer_lanes=LANES)

    @property
    def softmax_type(self) -> type[OnlineSoftmax]:
        return TileSoftmax if self.config.uses_fp8_mma else OnlineSoftmax

    @property
    def p_tiles(self) -> int:
        """Column blocks of P: of 128 bytes of keys."""
        return KEYS * self.config.q_bytes // copy.SWIZZLE_ROW_BYTES

    @property
    def more_bytes(self) -> int:
        """Bytes of the maxima that threads exchange, and of the address of tensor memory."""
        return 2 * FACTOR_BYTES + copy.VECTOR_BYTES

    def _allocate_tiles(self, smem) -> SharedTiles:
        c, n = self.config, self.tile.n
        shapes = (
            (CTA_ROWS, self.layout.q_columns, self.tile.q_stages),
            (n, BLOCK_COLUMNS, c.steps_ahead * c.k_boxes),
            (n, VALUE_BOXES * BLOCK_COLUMNS, c.steps_ahead * c.v_stages),
            (CTA_ROWS, BLOCK_COLUMNS, self.p_tiles),
        )
        per_word = 16 // self.dtype.width
        layouts = [
            copy.swizzled_layout(self.dtype, rows, columns * per_word, stages) for rows, columns, stages in shapes
        ]
        q, k, v, p = (
            smem.allocate_tensor(self.dtype, l.outer, copy.SWIZZLE_ATOM_BYTES, swizzle=l.inner) for l in layouts
        )
        return SharedTiles(q, k, v, None, loaded=(k, v), scales=(), p=p)

    @cute.jit
    def fetch_rows(self, descriptor, addresses, geometry, tile, tiles, ring, step):
        """Load this CTA's rows of Q."""
        own = replace(tile, first_row=tile.first_row + cluster.rank() * CTA_ROWS)
        LatentKernel.fetch_rows(self, descriptor, addresses, geometry, own, tiles, ring, step)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom | None,
        k_atom: cute.CopyAtom | None,
        v_atom: cute.CopyAtom | None,
        addresses: DecodeAddresses,
        geometry: DecodeGeometry,
        softmax_scale: Float32,
        output_scale: Float32,
        output_factor: Float32,
    ):
        smem = cutlass.memory.SmemAllocator()
        tiles, rings, work_queue, zeroing_barriers = self._allocate(smem)
        factors = shared_address(smem.allocate(FACTOR_STAGES * FACTOR_BYTES, copy.VECTOR_BYTES))
        maxima = shared_address(smem.allocate(2 * FACTOR_BYTES, copy.VECTOR_BYTES))
        slot = shared_address(smem.allocate(copy.VECTOR_BYTES, copy.VECTOR_BYTES))
        mask = self.mask_type(self.config.mask, Int32(geometry.mask_size))
        warp, rank = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cluster.rank()
        self.begin(warp, ((K_WARP, k_atom), (SCHEDULE_WARP, q_atom)), zeroing_barriers)
        cluster.meet()  # the other CTA runs, as the allocation needs, and its barriers are initialised
        if warp == MMA_WARP:
            tmem.allocate(slot, CTAS)
        cute.arch.sync_threads()
        tmem.after_signal()
        tensor_memory = shared_array(Int32, slot)[0]
        s_ring, p_ring, o_ring = (LeaderRing.of(ring) for ring in (rings.s, rings.p, rings.o))
        registers = self.config.registers

        if warp < CORRECTION_WARP:
            self.set_registers(registers[0])
            scale = load_scale(addresses.softmax_scale, softmax_scale)
            Softmax(
                kernel=self,
                s_ring=s_ring,
                p_ring=p_ring,
                factor_ring=rings.factor,
                factors=factors,
                maxima=maxima,
                weights=shared_address(tiles.p.iterator),
                work_queue=work_queue,
                mask=mask,
                logits=LatentLogits(self, mask, addresses, geometry),
                state=self.softmax_type.create(scale, LaneRow.rows),
                tensor_memory=tensor_memory,
                rank=rank,
            ).run(addresses, geometry)
        elif warp < MMA_WARP:
            self.set_registers(registers[1])
            combine = self.partition.combine(addresses, geometry)
            scale = self.output_scale(addresses, output_scale, output_factor)
            parts = (work_queue, rings, combine, scale, tensor_memory, rank)
            Correction(self, o_ring, rings.factor, factors, *parts).run(addresses, geometry)
        elif warp <= SCHEDULE_WARP:
            self.set_registers(registers[2])
            if warp == MMA_WARP:
                self.run_mma(rank, tiles, rings, work_queue, p_ring, s_ring, o_ring, tensor_memory)
            keys = (addresses, geometry, work_queue, rank)
            if warp == K_WARP:
                LoadK.create(self, rings.k, rings.loaded_k, tiles.k, k_atom, *keys).run()
            if warp == V_WARP:
                zeroing = dict(zeroing_barrier=zeroing_barriers)
                LoadV.create(self, rings.v, rings.loaded_v, tiles.v, v_atom, *keys, **zeroing).run()
            if warp == SCHEDULE_WARP:
                self.schedule(addresses, geometry, mask, q_atom, tiles, rings).publish(work_queue)
            cute.arch.griddepcontrol_launch_dependents()
        else:
            if const_expr(len(registers) > 3):
                self.set_registers(registers[-1])
            if const_expr(self.config.batch_invariant):
                schedule = self.schedule(addresses, geometry, mask, q_atom, tiles, rings)
                scale = self.output_scale(addresses, output_scale, output_factor)
                self.run_invariant(warp, rank, tiles, rings, work_queue, schedule, addresses, geometry, scale)
            else:
                self.run_dequantize(warp, rank, tiles, rings, work_queue)
        tmem.before_signal()
        cluster.meet()  # nothing arrives at the barriers of either CTA any more
        if warp == MMA_WARP:
            tmem.after_signal()
            tmem.free(tensor_memory, CTAS)

    @cute.jit
    def run_mma(self, rank, tiles, rings, work_queue, p_ring, s_ring, o_ring, tensor_memory):
        if rank == pair.LEADER:
            order = (self, work_queue, *PairRing.of_tiles(rings), p_ring, s_ring, o_ring)
            Products(*order, **Products.operands(self.config, tiles), tensor_memory=tensor_memory).run()
        else:
            Relay(self, work_queue, *RelayRing.of_tiles(rings), p_ring).run()

    @cute.jit
    def run_invariant(self, warp, rank, tiles, rings, work_queue, schedule, addresses, geometry, scale):
        """Run the warps after the schedule warp in batch-invariant kernels."""
        if const_expr(self.config.dequantized_boxes > 0):
            if warp < self.config.roles.first("combine"):
                self.run_dequantize(warp, rank, tiles, rings, work_queue)
            else:
                self.partition.run_idle_warp(addresses, geometry, schedule, scale)
        else:
            self.partition.run_idle_warp(addresses, geometry, schedule, scale)

    @cute.jit
    def run_dequantize(self, warp, rank, tiles, rings, work_queue):
        """Run the warps that only kernels over 8-bit keys have."""
        if const_expr(self.config.dequantized_boxes > 0):
            shared = [shared_address(tile.iterator) for tile in (tiles.k, tiles.v)]
            stages = (rings.k, rings.v, rings.loaded_k, rings.loaded_v)
            Dequantize(self, work_queue, *stages, *shared, warp - (SCHEDULE_WARP + 1), rank).run()


def build(config: Sm100MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return MlaSm100(config), example_arguments((DecodeAddresses, DecodeGeometry), floats=3)
