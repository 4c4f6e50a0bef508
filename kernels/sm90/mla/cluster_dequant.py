"""Dequantization of latent keys by clusters of two CTAs: each CTA dequantizes half of the keys of a tile, for both.

The CTAs of a cluster have neighbouring row tiles of the same keys, so both need the same tiles. FlashMLA calls this
"crossover". A warp loads its bytes of a half into registers while the stage is in use. When the stage is free in both
CTAs, the warp dequantizes them, stores them here, and copies them to the other CTA.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS, CTAS
from hopwell.kernels.elements import HALFWORD_BYTES, SCALE_COLUMNS
from hopwell.kernels.hardware import CACHE_LINE_BYTES, LANES
from hopwell.kernels.hardware import WARPS as WARPGROUP_WARPS
from hopwell.kernels.parts.core import cluster, copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles
from hopwell.kernels.parts.dequant.latent_rows import LANES_PER_ROW, DequantizedPageRows, LatentRowFormat
from hopwell.kernels.sm90.common.kernel import SCHEDULE_WARP
from hopwell.kernels.sm90.mla.key_halves import LatentLoads

WARPS = SCHEDULE_WARP  # that dequantize
ROWS = LANES  # keys of a tile that a CTA dequantizes; each lane finds the address of one
GROUPS = ROWS // ATOM_ROWS  # groups of eight keys
BLOCKS_LOG = 2
BLOCKS = 1 << BLOCKS_LOG  # column blocks of 8-bit elements in a half
# Accesses to the right half that a warp loads before its stores of the left half. The stores hide their latency, which
# gives 327 instead of 304 TFLOP/s over 64 lists of 2048 keys (H100, 2026-11-27). With a fourth, registers spill.
EARLY = 3


@dataclass(frozen=True)
class HalfKeys:
    """One half of this CTA's keys of every tile of a work tile, as a warp dequantizes it.

    In one access each lane of the warp takes 16 bytes, and the warp 64 bytes of each of eight keys. In shared memory
    they become a swizzle atom: 128 bytes of eight keys. The warps take the accesses of a half in turn. So the last
    warps may have one less.
    """

    source: DequantizedPageRows
    offset: int  # bytes from the beginning of a key to its half
    warp: Any
    to_peer: Any  # distance from an address in shared memory to the same address in the other CTA

    @property
    def form(self) -> LatentRowFormat:
        return self.source.row_format

    @property
    def tile_bytes(self) -> int:
        """Bytes of the dequantized half of this CTA's keys of a tile."""
        columns = BLOCK_COLUMNS * (self.form.eight_bit_blocks + self.form.wide_blocks)
        return ROWS * columns * HALFWORD_BYTES

    @property
    def end(self) -> int:
        """Bytes from the beginning of a key to the end of the 16-bit elements of its half."""
        return self.offset + self.form.to_wide + self.form.wide_blocks * copy.SWIZZLE_ROW_BYTES

    def _accesses(self, count: int) -> int:
        """Return the accesses of this warp, if the half has ``count``."""
        return -(-count // WARPS)

    def _is_last(self, i: int, count: int) -> bool:
        """Return whether only the first of the warps have access ``i``."""
        return (i + 1) * WARPS > count

    def _row(self, rows, group):
        """Return the address of this lane's key in a group of eight. ``rows`` has the address of a key in each lane."""
        key = (group * ATOM_ROWS & (LANES - 1)) + cute.arch.lane_idx() // LANES_PER_ROW
        return cute.arch.shuffle_sync(rows, key)

    def prefetch_keys(self, rows) -> None:
        """Prefetch this warp's share of the cache lines of whole keys, which end with this half."""
        for i in range(self._accesses(-(-self.end // CACHE_LINE_BYTES))):
            copy.prefetch_line(rows + (self.warp + i * WARPS) * CACHE_LINE_BYTES, rows != 0)

    def load(self, rows, first: int = 0, end: int | None = None) -> list:
        """Load the 8-bit elements of the accesses from ``first`` to ``end``, each with its scale."""
        loaded, count, vector = [], GROUPS * BLOCKS, cute.arch.lane_idx() % LANES_PER_ROW
        for i in range(first, self._accesses(count) if end is None else end):
            access = self.warp + i * WARPS
            row, block = self._row(rows, access >> BLOCKS_LOG), access & (BLOCKS - 1)
            wanted = (row != 0) & (access < count) if self._is_last(i, count) else row != 0
            row += self.offset
            words = copy.load_global_or_zero(row + (block * BLOCK_COLUMNS + vector * copy.VECTOR_BYTES), 4, wanted)
            scale = self.form.first_scale + block // (SCALE_COLUMNS // BLOCK_COLUMNS)
            loaded.append(
                (words, copy.load_global_or_zero(row + (self.form.to_scales + 4 * scale), 1, wanted, Float32))
            )
        return loaded

    def load_wide(self, rows) -> list:
        """Load the 16-bit elements. The accesses begin with the last warp, which has fewer of the others."""
        loaded, count, vector = [], 2 * GROUPS * self.form.wide_blocks, cute.arch.lane_idx() % LANES_PER_ROW
        for i in range(self._accesses(count)):
            access = self._wide_access(i)
            row = self._row(rows, access >> 1)
            wanted = (row != 0) & (access < count) if self._is_last(i, count) else row != 0
            place = row + (self.offset + self.form.to_wide) + (2 * vector + (access & 1)) * copy.VECTOR_BYTES
            loaded.append(copy.load_global_or_zero(place, 4, wanted))
        return loaded

    def _wide_access(self, i: int):
        return WARPS - 1 - self.warp + i * WARPS

    def _target(self, ring, step):
        """Return the address of this lane's first vector in the first atom."""
        row, vector = cute.arch.lane_idx() // LANES_PER_ROW, cute.arch.lane_idx() % LANES_PER_ROW
        return self.source._target(ring.stage(step), self.source.first_row + row, vector)

    @cute.jit
    def store(self, loaded, wide, ring, step) -> None:
        """Dequantize the half of a tile and store it in both CTAs. It is full when the bytes of both have arrived."""
        peer_barrier = shared_address(ring.full_barrier(step)) + self.to_peer
        self._store_dequantized(loaded, ring, step, peer_barrier)
        self._store_wide(wide, ring, step, peer_barrier)
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_expect_tx(ring.full_barrier(step), self.tile_bytes)
        cute.arch.mbarrier_arrive(ring.full_barrier(step))

    @cute.jit
    def _store_dequantized(self, loaded, ring, step, peer_barrier) -> None:
        target, count = self._target(ring, step), GROUPS * BLOCKS
        for i in cutlass.range_constexpr(len(loaded)):
            access = self.warp + i * WARPS
            place = target + self.source.vector_place(0, (access >> BLOCKS_LOG) * ATOM_ROWS, access & (BLOCKS - 1), 0)
            words, scale = loaded[i]
            if const_expr(self._is_last(i, count)):
                if access < count:
                    self.form.store(place, words, scale[0])
            else:
                self.form.store(place, words, scale[0])
        # The copies read these writes through another proxy. Copies of whole atoms are faster than st.async of each
        # lane: 315 instead of 299 TFLOP/s over 64 lists of 2048 keys with 128 heads (H200, 2026-11-27).
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        access = self.warp + cute.arch.lane_idx() * WARPS
        if access < count:
            row, block = self.source.first_row + (access >> BLOCKS_LOG) * ATOM_ROWS, access & (BLOCKS - 1)
            atom = self.source.vector_address(ring.stage(step), row, block, 0)
            cluster.copy_async(atom + self.to_peer, atom, copy.SWIZZLE_ATOM_BYTES, peer_barrier)

    @cute.jit
    def _store_wide(self, loaded, ring, step, peer_barrier) -> None:
        target, count = self._target(ring, step), 2 * GROUPS * self.form.wide_blocks
        for i in cutlass.range_constexpr(len(loaded)):
            access = self._wide_access(i)
            place = target + self.source.vector_place(0, (access >> 1) * ATOM_ROWS, BLOCKS, 0)
            place = place ^ ((access & 1) * copy.VECTOR_BYTES)
            if const_expr(self._is_last(i, count)):
                if access < count:
                    self._store_to_both(place, loaded[i], peer_barrier)
            else:
                self._store_to_both(place, loaded[i], peer_barrier)

    def _store_to_both(self, place, words, peer_barrier) -> None:
        copy.store_shared(place, words)
        cluster.store_async(place + self.to_peer, words, peer_barrier)


class ClusterLoads(LatentLoads):
    """Loads of both halves of the keys by the warps that dequantize them, for both CTAs of the cluster."""

    def __init__(self, kernel: Any):
        super().__init__(kernel, WARPS)

    @property
    def warps(self) -> int:
        return WARPS

    @property
    def roles(self) -> dict[str, int]:
        consumers = CTAS * WARPGROUP_WARPS * self.kernel.config.consumer_warpgroups
        return {"dequantize": WARPS, "schedule": 1, "attend of both": consumers}

    def edges(self, roles: Roles, reader: Reader, consumer: str = "attend") -> list[Edge]:
        """Return the edges of both halves. A stage is released in both CTAs, by the consumers of both."""
        stages, sizes = self.kernel.tile.loaded_stages, self.kernel.stage_bytes
        lanes = dict(producer_lanes=LANES, consumer_fences=True)
        names = enumerate(("k", "v"))
        return [
            roles.edge(name, "dequantize", f"{consumer} of both", stages[i], sizes[i], **lanes) for i, name in names
        ]

    def _halves(self, operands, tile, shared, warp) -> list[HalfKeys]:
        """Return both halves of this CTA's share of the keys of a work tile."""
        to_peer = cluster.address_in(cluster.rank() ^ 1, shared[0]) - shared[0]
        sources = self._shares(operands, tile, shared, cluster.rank(), CTAS)
        begin = sources[0].row_format.to_scales
        assert all(source.row_format.eight_bit_blocks == BLOCKS for source in sources)
        return [HalfKeys(source, begin - source.row_format.to_scales, warp, to_peer) for source in sources]

    @cute.jit
    def run(self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry):
        """Load and dequantize this warp's part of this CTA's half of every tile."""
        operands = self.operands(addresses, geometry)
        shared = [shared_address(tile.iterator) for tile in (tiles.k, tiles.v)]
        step, work = Int32(0), Int32(0)
        tile = work_queue.read(work)
        while tile.exists:
            left, right = self._halves(operands, tile, shared, warp)
            first, end = tile.keys.begin * self.kernel.step_tiles, tile.keys.end * self.kernel.step_tiles
            source = left.source
            rows, entries = source.locate(end - 1, source.read_table(end - 1))[0], source.read_table(end - 2)
            for n in cutlass.range(end - 1, first - 1, -1, unroll=1):
                next_rows = source.locate(n - 1, entries)[0]
                if n == first:
                    next_rows = next_rows * 0
                entries = source.read_table(n - 2)
                loaded, wide = left.load(rows), left.load_wide(rows)
                early = right.load(rows, 0, EARLY)
                rings.k.wait_empty(step)
                left.store(loaded, wide, rings.k, step)
                # Keys of the next tile are on their way to L2, whose latency their loads do not hide. Prefetch before
                # the loads of this tile delays these: 327 instead of 335 TFLOP/s (H100, 2026-11-27).
                right.prefetch_keys(next_rows)
                loaded, wide = right.load(rows, EARLY), right.load_wide(rows)
                rings.v.wait_empty(step)
                right.store([*early, *loaded], wide, rings.v, step)
                rows = next_rows
                step += 1
            work += 1
            tile = work_queue.read(work)
