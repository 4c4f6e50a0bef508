"""Blackwell prefill: TMA, warp specialisation and tcgen05, with scores and output in tensor memory; ragged and paged
KV. Head dims 160 to 256 have pairs of CTAs, see ``pairs.py``."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import CTAS, TileShape
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.parts.core import cluster, copy
from hopwell.kernels.parts.core.device import shared_address, shared_array
from hopwell.kernels.parts.core.kernel import AttentionKernel, PrefillLaunch
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles
from hopwell.kernels.parts.load.kv_source import KvOperand, OperandHalf
from hopwell.kernels.parts.rows import head_scales
from hopwell.kernels.parts.rows.mask import create_mask
from hopwell.kernels.parts.rows.padding import fill_padding
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.skip import SkipRule
from hopwell.kernels.sm90.common.dequant import Conversion
from hopwell.kernels.sm90.common.kernel import kv_edges_in_place, loading_ring
from hopwell.kernels.sm100.common import pair, tmem
from hopwell.kernels.sm100.common.pair import LeaderRing, PairRing, RelayRing
from hopwell.kernels.sm100.prefill.config import HALVES, Q_TILE_ROWS, S_STAGES, Sm100PrefillConfig
from hopwell.kernels.sm100.prefill.correction import Correction
from hopwell.kernels.sm100.prefill.pairs import PairProducts, PairSchedule, Relay
from hopwell.kernels.sm100.prefill.products import Products, operands
from hopwell.kernels.sm100.prefill.schedule import LoadingSchedule
from hopwell.kernels.sm100.prefill.skip import SkippingSoftmax
from hopwell.kernels.sm100.prefill.softmax import EXCHANGED_BYTES, Fp8PackedSoftmax, PackedSoftmax, Softmax

FACTOR_BYTES = 4 * Q_TILE_ROWS


class PrefillSm100(PrefillLaunch, AttentionKernel):
    """Attention over two query tiles of 128 rows, in steps of ``tile.n`` keys from right to left.

    Warp roles
        warps 0..7, 8..15 softmax     of query tile 0 and 1: two threads share a row, from S to P, each with half of the
                                      keys of a step; the first four warps also write the log-sum-exp
        warps 16..19      correction  rescales O when a row's reference moves; at the end normalises and stores it
        warp 20           mma         issues all products, and allocates tensor memory
        warp 21           load_k      K tiles, through the KV source
        warp 22           load_v      V tiles; rows past the visible keys become zeros
        warp 23           load_q      work tiles (the query rows, the keys and their locations) and their Q tiles
        warps 24..27      dequantize  only for 8-bit and 4-bit K and V: dequantizes them in place

    Edges (``PrefillSm100(config).edges``); edges of query tiles have one stage per tile, factor has two
        q       load_q -> mma            released when the query tile's last S of the work tile has been computed
        k       load_k -> mma            released when both S have been computed
        v       load_v -> mma            released when both products have been added to O
                With 8-bit and 4-bit K and V, loaded_k and loaded_v lead from the loaders to dequantize, and k and v
                from there to mma.
        work    load_q -> all others     released as soon as it has been read
        s       mma -> softmax           released when the first columns of P of both halves have replaced it
        p       softmax -> mma           full when all columns of P have been written
        factor  softmax -> correction    factors of the rows of O, step by step; the last one normalises. The first
                                         four softmax warps of a query tile post them
        o       mma -> correction        full when it is complete; released before every product, when O has been
                                         corrected or stored and may be added to

    Steady state: one step of both query tiles, 0 and 1. A product of one tile overlaps the softmax of the other. In the
    last step of a work tile, S is the first of the next work tile.

        tensor cores   |  O0 += P0 V(i+1)  |  S0 = Q0 K(i)^T  |  O1 += P1 V(i+1)  |  S1 = Q1 K(i)^T  |
        softmax 0      |      waits        |                  | maximum, 2^(S0 - reference), P0, sums |  waits ...
        softmax 1      | maximum, 2^(S1 - reference), P1, sums|      waits        |                  | maximum ...
        correction     |                                      | O0 *= factor, if any row's is not 1 | O1 ...
        load_k, load_v | fill the stages that the step before has released

    Pairs of CTAs (``config.is_pair``): each CTA has one of the query tiles, half of K's keys and half of V's columns.

        warps 0..7    softmax         of this CTA's query tile
        warps 8..11   correction
        warp 12       mma             the leader's issues the products of both CTAs; the other's relays
        warps 13..15  load_k, load_v, load_q

        relayed_q, relayed_k, relayed_v   mma of the other CTA -> mma of the leader; full when the stage there is full
        s, o            mma -> softmax, correction of both CTAs: the leader fills and awaits them in both
        p               softmax of both CTAs -> mma: the leader awaits both
        ticket          load_q of the leader -> load_q of the other CTA: the work tile that both take next. ``st.async``
                        stores the ticket and completes the barrier's transaction there

    S has two places, which steps take in turn. S of a step is issued before O += P V of the step before it. A product
    with M 256 therefore overlaps the softmax:

        tensor cores   | S(i+1) = Q K(i+1)^T | O += P(i) V(i) | S(i+2) = Q K(i+2)^T | O += P(i+1) V(i+1) |
        softmax        | P(i): late columns  | maximum, 2^(S(i+1) - reference), P(i+1), sums             |
        correction     | O *= factor of i    | waits for P(i) V(i)  | O *= factor of i+1                 |
    """

    q_rows = Q_TILE_ROWS
    storing_warps = WARPGROUP // LANES
    # With one stage ptxas keeps the tile values that correction has read in registers, and spills 8 of 64 at head dim
    # 64.
    work_stages = 2
    # The softmax threads' exchanges, the address of tensor memory, and the query tiles' flags of P.
    more_bytes = EXCHANGED_BYTES + copy.VECTOR_BYTES
    reader = Reader.TENSOR_CORES  # of K and V

    @property
    def roles(self) -> dict[str, int]:
        warps = {name: role.warps for name, role in self.config.roles.roles.items()}
        softmax, others = warps["softmax"] // self.config.q_tiles, sum(warps.values()) - 1
        both = {"softmax of both": CTAS * softmax, "correction of both": CTAS * warps["correction"]}
        one = {"first half": softmax // HALVES, "relay": 1, "all others": others}
        return warps | {"softmax": softmax} | both | one

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        c, t, every_lane = self.config, self.tile, dict(producer_lanes=LANES, consumer_lanes=LANES)
        if c.dequantizes_in_place:
            kv = kv_edges_in_place(self, roles, "dequantize", "mma")
        else:
            kv = self._kv_edges(roles, *[("mma", self.reader)] * 2)
        q = roles.edge("q", "load_q", "mma", t.q_stages, self.q_rows * c.layout.q_columns * HALFWORD_BYTES)
        more, of_both = (), ""
        if c.is_pair:
            relayed = tuple(roles.edge(f"relayed_{edge.name}", "relay", "mma", edge.stages) for edge in (q, *kv))
            more, of_both = (*relayed, roles.edge("ticket", "load_q", "load_q", 1)), " of both"
        return (
            q,
            *kv,
            self._work_edge(roles, "load_q"),
            roles.edge("s", "mma", "softmax" + of_both, S_STAGES),
            roles.edge("p", "softmax" + of_both, "mma", S_STAGES),
            roles.edge("factor", "first half", "correction", 2 * c.q_tiles, FACTOR_BYTES, **every_lane),
            roles.edge("o", "mma", "correction" + of_both, c.q_tiles),
            *more,
        )

    @property
    def kv_rows(self) -> tuple[int, int]:
        """Keys of a stage. A CTA of a pair has half of K's, and half of the columns of V."""
        return self.tile.n // self.config.cluster_ctas, self.tile.n

    def first_row(self, index):
        """Return the first row of a query tile of this CTA, within the work tile."""
        return cluster.rank() * Q_TILE_ROWS if self.config.is_pair else index * Q_TILE_ROWS

    def _load(self, part: int, atom, tile, rings, zeroing_barrier, work_queue, operand) -> None:
        """Load K (``part`` 0) or V (1) of all work tiles."""
        if self.config.is_pair:
            operand = self.half(part, operand)
        shared, ring = shared_address(tile.iterator), loading_ring(self, rings, part)
        self.load_kv(atom, shared, ring, zeroing_barrier, work_queue, operand)

    def half(self, part: int, operand: KvOperand) -> KvOperand:
        """Return this CTA's half of K, of the keys, or of V, of the columns."""
        rank = cluster.rank()
        if part == 0:
            return replace(operand, half=OperandHalf(self.tile.n, rank * self.kv_rows[0], 0))
        columns = operand.head_dim // CTAS
        first, depth = rank * columns, min(operand.depth, operand.columns)
        # Loads by rows begin at the address, and TMA boxes at the column.
        address = operand.address + HALFWORD_BYTES * first
        half = OperandHalf(self.tile.n, 0, first)
        return replace(operand, address=address, head_dim=columns, depth=depth, half=half)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        k_atom: cute.CopyAtom | None,
        v_atom: cute.CopyAtom | None,
        addresses,  # Addresses or ScaledAddresses
        geometry,  # a Geometry or a ScaledGeometry
        softmax_scale: Float32,
        output_scale: Float32,
        soft_cap: Float32,
        skip_softmax: Float32,
    ):
        smem = cutlass.memory.SmemAllocator()
        tiles, rings, work_queue, zeroing_barriers = self._allocate(smem)
        factors = shared_address(smem.allocate(2 * self.config.q_tiles * FACTOR_BYTES, copy.VECTOR_BYTES))
        exchanged = shared_address(smem.allocate(EXCHANGED_BYTES, copy.VECTOR_BYTES))
        words = shared_address(smem.allocate(copy.VECTOR_BYTES, copy.VECTOR_BYTES))
        slot, pending = words, words + 4
        mask = create_mask(self.config.mask, geometry.mask_size)
        warp, table, first = cute.arch.make_warp_uniform(cute.arch.warp_idx()), self.config.roles.roles, self.first_warp
        is_pair = self.config.is_pair
        if const_expr(not is_pair):
            if warp == first("mma"):
                tmem.allocate(slot)
        atoms = dict(load_k=k_atom, load_v=v_atom, load_q=q_atom)
        self.begin(warp, [(first(role), atom) for role, atom in atoms.items()], zeroing_barriers)
        if const_expr(is_pair):
            self.begin_pair(warp, slot)
        fill_padding(addresses, geometry)
        tmem.after_signal()
        tensor_memory = shared_array(Int32, slot)[0]
        s_ring, p_ring, o_ring = (LeaderRing.of(r) if is_pair else r for r in (rings.s, rings.p, rings.o))

        if warp < first("correction"):
            self.set_registers(table["softmax"].registers)
            parts = dict(
                kernel=self,
                s_ring=s_ring,
                p_ring=p_ring,
                factor_ring=rings.factor,
                factors=factors,
                exchanged=exchanged,
                work_queue=work_queue,
                mask=mask,
                tensor_memory=tensor_memory,
            )
            numbers = (softmax_scale, output_scale, soft_cap, skip_softmax)
            self.run_softmax(parts, pending, addresses, geometry, *numbers)
        elif warp < first("mma"):
            self.set_registers(table["correction"].registers)
            Correction(self, rings.factor, o_ring, factors, work_queue, tensor_memory).run(addresses, geometry)
        elif warp < self.config.roles.end("load_q"):
            self.set_registers(table["mma"].registers)
            if warp == first("mma"):
                self.run_mma(tiles, rings, work_queue, (s_ring, p_ring, o_ring), tensor_memory, pending)
            if warp == first("load_k"):
                key = KvOperand.key(addresses, geometry, self.config)
                self._load(0, k_atom, tiles.k, rings, zeroing_barriers, work_queue, key)
            if warp == first("load_v"):
                value = KvOperand.value(addresses, geometry, self.config)
                self._load(1, v_atom, tiles.v, rings, zeroing_barriers + 1, work_queue, value)
            if warp == first("load_q"):
                parts = (geometry, addresses, mask, self.tile.n, TileShape.of(1, self.tile.m))
                parts += (self, copy.tma_descriptor(q_atom), tiles.q, rings.q)
                self.schedule(parts, rings, words + 8).publish(work_queue)
            cute.arch.griddepcontrol_launch_dependents()
        else:
            if const_expr(self.config.dequantizes_in_place):
                self.set_registers(table["dequantize"].registers)
                Conversion.create(self, tiles, rings, work_queue, addresses, geometry).run()
        tmem.before_signal()
        if const_expr(is_pair):
            cluster.meet()  # nothing arrives at the barriers of either CTA any more
        else:
            cute.arch.sync_threads()
        if warp == first("mma"):
            tmem.after_signal()
            tmem.free(tensor_memory, self.config.cluster_ctas)

    def first_warp(self, role: str) -> int:
        return self.config.roles.first(role)

    @cute.jit
    def begin_pair(self, warp, slot) -> None:
        """Allocate tensor memory once the other CTA runs, and its barriers are initialised."""
        cluster.meet()
        if warp == self.first_warp("mma"):
            tmem.allocate(slot, CTAS)
        cute.arch.sync_threads()

    def schedule(self, parts: tuple, rings, ticket) -> LoadingSchedule:
        """Return the schedule with the fields ``parts``. ``ticket`` is shared memory that pairs use."""
        if not self.config.is_pair:
            return LoadingSchedule(*parts)
        return PairSchedule(*parts, cluster.rank(), LeaderRing.of(rings.ticket), ticket)

    @cute.jit
    def run_mma(self, tiles, rings, work_queue, leader_rings, tensor_memory, pending) -> None:
        """Run the mma warp."""
        if const_expr(not self.config.is_pair):
            Products(self, rings, *operands(self, tiles), tensor_memory, pending).run(work_queue)
        else:
            if cluster.rank() == pair.LEADER:
                order = (self, work_queue, *PairRing.of_tiles(rings), *leader_rings)
                PairProducts(*order, *operands(self, tiles), tensor_memory).run()
            else:
                Relay(self, work_queue, *RelayRing.of_tiles(rings)).run()

    def run_softmax(
        self, parts, pending, addresses, geometry, softmax_scale, output_scale, soft_cap, skip_softmax
    ) -> None:
        """Run the softmax warpgroups, which have the fields ``parts``."""
        scale = head_scales.softmax_scale(self.config, addresses, softmax_scale)
        score = ScoreMap(self.config.score, scale, soft_cap, Int32(geometry.heads))
        softmax = Fp8PackedSoftmax if self.config.uses_fp8_mma else PackedSoftmax
        state = softmax.of(score.softmax_scale, self.config.polynomial_eighths)
        scale = head_scales.output_scale(self.config, addresses, output_scale)
        parts |= dict(score=score, state=state, output_scale=scale)
        if not self.config.skip_softmax:
            Softmax(**parts).run(addresses, geometry)
            return
        skip = SkipRule.create(skip_softmax)
        SkippingSoftmax(**parts, skip=skip, pending=pending).run(addresses, geometry)
        skip.report(addresses.skipped, cute.arch.thread_idx()[0] % (HALVES * Q_TILE_ROWS) == 0)


def build(config: Sm100PrefillConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return PrefillSm100(config).with_arguments()
