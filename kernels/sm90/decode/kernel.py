"""Hopper split-KV decode: the packed rows of a KV head against chunks of a paged cache, and the combine, in one launch.

This kernel serves many rows and large head dims. ``swap_ab.py`` and ``dequant_swap_ab.py`` serve few rows.
"""

from typing import Any

from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.partials import Combine, Slots
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import example_arguments
from hopwell.kernels.parts.core.pipeline import Edge, NamedBarrier, Reader, Roles
from hopwell.kernels.parts.partition.split_kv import ScheduleHooks, SplitSchedule, SplitTile
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax
from hopwell.kernels.problem import ScoreKind
from hopwell.kernels.sm90.common.attend import Attend, MainLoop
from hopwell.kernels.sm90.common.kernel import kv_edges_in_place
from hopwell.kernels.sm90.common.operands import Operands
from hopwell.kernels.sm90.decode.base import DecodeKernel, KvLoads, argument_types
from hopwell.kernels.sm90.decode.dequant_warps import DequantCombine, DequantWarps, Exchange
from hopwell.kernels.sm90.decode.rows import HeadScores, SplitKvRows


class DecodeSm90(DecodeKernel):
    """Attention of up to ``tile.m`` packed rows of a KV head, in steps of ``tile.n`` keys from right to left.

    Warp roles
        warp 0 load_k      K tiles, through the KV source
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    work tiles: the rows, the request and the chunk of its keys
        warps 4.. attend   one consumer warpgroup, or two that share V's columns: from Q K^T to the output or to a
                           partial; if they dequantize in registers, eight independent warps, see dequant_warps.py
        next four convert  8-bit caches with many rows or large head dims: dequantize K and V in place
        last four combine  assign slots to work tiles and combine partials, so that their atomics and reads do not delay
                           attend; if two warpgroups share V's columns, attend does this itself

    Edges
        q       load_q -> attend      released when the last S of the work tile has been computed; over 8-bit caches
                                      when Q is in registers
        k       load_k -> attend      released when S has been computed; over 8-bit caches together with V
        v       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read
        partial   attend -> combine   released once for each work tile when its slot may be written, over 8-bit caches
                                      when the exchange may be; full when it has been written
        With dequantization in place, k and v have two edges each:
        loaded_k, loaded_v  load_k, load_v -> convert      bytes from memory; released on k and v
        k, v                convert -> attend              released as above

    Steady state: memory is the limit. The work of attend in a step must take less time than the step's loads. Between
    work tiles, loads run ahead by the number of stages.

        memory         |  K(i-2)  |  V(i-2)  |  K(i-3)  |  V(i-3)  |  K(i-4)  |  V(i-4)  | ...
        attend         |  S(i), O += P(i+1) V(i+1) | softmax of S(i) | waits | S(i-1), O += P(i) V(i) | softmax ...
    """

    work_tile = SplitTile

    def __init__(self, config: DecodeConfig):
        self.loads = KvLoads(self)
        self.reader = Reader.SYNCED_LANES if config.dequantizes_in_registers else Reader.TENSOR_CORES
        super().__init__(config)

    @property
    def roles(self) -> dict[str, int]:
        c = self.config
        combine = {"combine": WARPS} if c.has_combine_role else {}
        convert = {"convert": WARPS} if c.converts else {}
        attend = {"attend": WARPS * c.consumer_warpgroups}
        return {**self.loads.roles, **attend, **combine, **convert, "all others": WARPS * len(c.registers) - 1}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        in_place = self.config.dequantizes_in_place
        kv = kv_edges_in_place(self, roles) if in_place else self.loads.edges(roles, self.reader)
        partials = [roles.edge("partial", "attend", "combine", 1)] if self.config.has_combine_role else []
        return self.q_edge(roles), *kv, self._work_edge(roles), *partials

    @property
    def staging_bytes(self) -> int:
        return Exchange.warp_bytes(self.layout.tile_dims) if self.config.dequantizes_in_registers else 0

    def schedule(self, addresses: Addresses, geometry: DecodeGeometry, mask, q_atom, tiles, rings) -> SplitSchedule:
        sizes = (self.tile.m, self.tile.n, self.config.chunk_tokens)
        return SplitSchedule(geometry, addresses, mask, *sizes, True, False, ScheduleHooks())

    def softmax(self, scale) -> OnlineSoftmax:
        return OnlineSoftmax.create(scale, RowFragment.rows)

    def run_attend(self, parts: dict[str, Any], softmax_scale, output_scale, addresses, geometry) -> None:
        combine = self._combine(addresses, geometry, parts["tiles"])
        logits = self.loads.logits(parts["mask"], addresses, geometry)
        if const_expr(self.config.dequantizes_in_registers):
            DequantWarps(**parts, logits=logits).run(geometry)
            return
        rows = SplitKvRows(self, parts["rings"], parts["softmax"], output_scale, combine, logits)
        score = ScoreMap(ScoreKind.SCALED, softmax_scale, Float32(0.0), Int32(1))
        if const_expr(self.config.k_head_scales):
            score = HeadScores()
        turns = self.config.consumer_warpgroups
        attend = Attend(
            **parts, score=score, rows=rows, main_loop=MainLoop(), operands=Operands, ping_pong_warpgroups=turns
        )
        attend.run(addresses, geometry)
        if const_expr(not self.config.has_combine_role):
            combine.hand_back(Int32(geometry.grid))

    def run_combine(self, tiles, rings, work_queue, addresses, geometry, output_scale) -> None:
        combine = self._combine(addresses, geometry, tiles)
        combine.run(work_queue, rings.partial, addresses, geometry, output_scale, self.out_dtype)

    def _combine(self, addresses: Addresses, geometry: DecodeGeometry, tiles) -> Combine:
        """Return the combine. The last warpgroup runs it, or all attend warpgroups if there is no combine role."""
        c = self.config
        first, warpgroups = (len(c.registers) - 1, 1) if c.has_combine_role else (1, c.consumer_warpgroups)
        threads = (first * WARPGROUP, warpgroups * WARPGROUP, NamedBarrier.COMBINE)
        slots = Slots.create(addresses, geometry, c.head_dim_v)
        if c.dequantizes_in_registers:
            return DequantCombine(slots, *threads, Exchange.create(self, tiles), self)
        return Combine(slots, *threads)


def build(config: DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return DecodeSm90(config), example_arguments(argument_types(config), floats=3)
