"""Blackwell prefill: TMA, warp specialisation and tcgen05, with scores and output in tensor memory; ragged and paged
KV."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import shared_address, shared_array
from hopwell.kernels.parts.core.kernel import AttentionKernel, PrefillLaunch
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles
from hopwell.kernels.parts.load.kv_source import KvOperand
from hopwell.kernels.parts.partition.tiles import QueryTile, TileSchedule
from hopwell.kernels.parts.rows import head_scales
from hopwell.kernels.parts.rows.mask import create_mask
from hopwell.kernels.parts.rows.padding import fill_padding
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.skip import SkipRule
from hopwell.kernels.sm90.common.dequant import Conversion
from hopwell.kernels.sm90.common.kernel import kv_edges_in_place, loading_ring
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.prefill.config import (
    DEQUANT_ROLES,
    HALVES,
    Q_TILE_ROWS,
    Q_TILES,
    ROLES,
    Sm100PrefillConfig,
)
from hopwell.kernels.sm100.prefill.correction import Correction
from hopwell.kernels.sm100.prefill.products import Products
from hopwell.kernels.sm100.prefill.skip import SkippingSoftmax
from hopwell.kernels.sm100.prefill.softmax import EXCHANGED_BYTES, Fp8PackedSoftmax, PackedSoftmax, Softmax

CORRECTION_WARP, MMA_WARP = ROLES.first("correction"), ROLES.first("mma")
K_WARP, V_WARP, Q_WARP = (ROLES.first(f"load_{name}") for name in "kvq")
DEQUANT_WARP = DEQUANT_ROLES.first("dequantize")
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
        warps 24..27      dequantize  only for narrow K and V: dequantizes their tiles in place

    Edges (``PrefillSm100(config).edges``); edges of query tiles have one stage per tile, factor has two
        q       load_q -> mma            released when the query tile's last S of the work tile has been computed
        k       load_k -> mma            released when both S have been computed
        v       load_v -> mma            released when both products have been added to O
                With narrow K and V, loaded_k and loaded_v lead from the loaders to dequantize, and k and v from there
                to mma.
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
        softmax, others = warps["softmax"] // Q_TILES, sum(warps.values()) - 1
        return warps | {"softmax": softmax, "first half": softmax // HALVES, "all others": others}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        c, t, every_lane = self.config, self.tile, dict(producer_lanes=LANES, consumer_lanes=LANES)
        if c.dequantizes_in_place:
            kv = kv_edges_in_place(self, roles, "dequantize", "mma")
        else:
            kv = self._kv_edges(roles, *[("mma", self.reader)] * 2)
        return (
            roles.edge("q", "load_q", "mma", t.q_stages, self.q_rows * c.layout.q_columns * HALFWORD_BYTES),
            *kv,
            self._work_edge(roles, "load_q"),
            roles.edge("s", "mma", "softmax", Q_TILES),
            roles.edge("p", "softmax", "mma", Q_TILES),
            roles.edge("factor", "first half", "correction", 2 * Q_TILES, FACTOR_BYTES, **every_lane),
            roles.edge("o", "mma", "correction", Q_TILES),
        )

    def _load(self, part: int, atom, tile, rings, zeroing_barrier, work_queue, operand) -> None:
        """Load K (``part`` 0) or V (1) of all work tiles."""
        shared, ring = shared_address(tile.iterator), loading_ring(self, rings, part)
        self.load_kv(atom, shared, ring, zeroing_barrier, work_queue, operand)

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
        factors = shared_address(smem.allocate(2 * Q_TILES * FACTOR_BYTES, copy.VECTOR_BYTES))
        exchanged = shared_address(smem.allocate(EXCHANGED_BYTES, copy.VECTOR_BYTES))
        words = shared_address(smem.allocate(copy.VECTOR_BYTES, copy.VECTOR_BYTES))
        slot, pending = words, words + 4
        mask = create_mask(self.config.mask, geometry.mask_size)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == MMA_WARP:
            tmem.allocate(slot)
        self.begin(warp, ((K_WARP, k_atom), (V_WARP, v_atom), (Q_WARP, q_atom)), zeroing_barriers)
        fill_padding(addresses, geometry)
        tmem.after_signal()
        tensor_memory, table = shared_array(Int32, slot)[0], self.config.roles.roles

        if warp < CORRECTION_WARP:
            self.set_registers(table["softmax"].registers)
            parts = dict(
                kernel=self,
                s_ring=rings.s,
                p_ring=rings.p,
                factor_ring=rings.factor,
                factors=factors,
                exchanged=exchanged,
                work_queue=work_queue,
                mask=mask,
                tensor_memory=tensor_memory,
            )
            numbers = (softmax_scale, output_scale, soft_cap, skip_softmax)
            self.run_softmax(parts, pending, addresses, geometry, *numbers)
        elif warp < MMA_WARP:
            self.set_registers(table["correction"].registers)
            Correction(self, rings.factor, rings.o, factors, work_queue, tensor_memory).run(addresses, geometry)
        elif warp < DEQUANT_WARP:
            self.set_registers(table["mma"].registers)
            if warp == MMA_WARP:
                Products.create(self, tiles, rings, tensor_memory, pending).run(work_queue)
            if warp == K_WARP:
                key = KvOperand.key(addresses, geometry, self.config)
                self._load(0, k_atom, tiles.k, rings, zeroing_barriers, work_queue, key)
            if warp == V_WARP:
                value = KvOperand.value(addresses, geometry, self.config)
                self._load(1, v_atom, tiles.v, rings, zeroing_barriers + 1, work_queue, value)
            if warp == Q_WARP:
                parts = (geometry, addresses, mask, self.tile.n, TileShape.of(1, self.tile.m))
                LoadingSchedule(*parts, self, copy.tma_descriptor(q_atom), tiles.q, rings.q).publish(work_queue)
            cute.arch.griddepcontrol_launch_dependents()
        else:
            if const_expr(self.config.dequantizes_in_place):
                self.set_registers(table["dequantize"].registers)
                Conversion.create(self, tiles, rings, work_queue, addresses, geometry).run()
        tmem.before_signal()
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            tmem.after_signal()
            tmem.free(tensor_memory)

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


@dataclass
class LoadingSchedule(TileSchedule):
    """Schedule of the warp that also loads the query tiles of each work tile it publishes: no other warp is left for
    that."""

    kernel: Any  # the PrefillSm100: configuration only
    descriptor: Any
    tiles: Any
    ring: Any

    def published(self, tile: QueryTile, step) -> None:
        row = tile.request.q_start + tile.first_row
        for index in range(Q_TILES):
            first = row + index * Q_TILE_ROWS
            self.kernel.fetch_q(self.descriptor, self.tiles, self.ring, Q_TILES * step + index, first, tile.head)


def build(config: Sm100PrefillConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return PrefillSm100(config).with_arguments()
