"""Common parts of the MLA kernels. A key is in shared memory once, in two halves: the left half of the value's columns,
and all columns to the right of them."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import KvType
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.pipeline import Edge
from hopwell.kernels.parts.dequant.latent_rows import DEQUANTIZED, DequantizedOperand, LatentRowFormat
from hopwell.kernels.parts.load.kv_rows import PageRows
from hopwell.kernels.parts.load.kv_source import KvOperand, KvSource
from hopwell.kernels.parts.load.page_size import page_size
from hopwell.kernels.parts.rows.mask import (
    TOPK_KEYS,
    IntervalMask,
    LogitRow,
    TokenPositions,
    TopkMask,
    TopkRow,
    mask_type,
)


class LatentKeys:
    """Mixin for decode kernels that load latent keys."""

    config: Any
    tile: Any
    dtype: Any
    source: Any
    step_tiles: int
    dequant_warps_of_8_bits: int  # warps that dequantize 8-bit keys
    _kv_atom: Any

    @property
    def half_orders(self) -> tuple[tuple[int, int], ...]:
        """Order in which the halves, left (0) and right (1), of a step's tiles are multiplied and loaded by TMA."""
        return ((0, 1),) * self.step_tiles

    @property
    def mask_type(self) -> type[IntervalMask]:
        return TopkMask if self.config.sparse else mask_type(self.config.mask)

    @property
    def dequantizes(self) -> bool:
        """Whether keys have 8 bits in memory and separate warps dequantize them in shared memory."""
        return self.config.kv_type is not KvType.WIDE

    @property
    def dequant_warps(self) -> int:
        """Warps that dequantize keys."""
        return self.dequant_warps_of_8_bits if self.dequantizes else 0

    def kv_source(self) -> type[KvSource]:
        source = super().kv_source()
        return DEQUANTIZED[source] if self.dequantizes else source

    def loads(self, addresses: Addresses, geometry: DecodeGeometry) -> tuple[KvOperand, KvOperand]:
        """Return the operands of both halves. Both are values as well, so rows that no query sees become zeros."""
        c, a, g = self.config, addresses, geometry
        pages = page_size(g.page_divisor, g.k_rows, c.uneven_pages)
        strides, table = c.kv_strides(g.k_page, g.k_head, g.k_row), (a.key_table, g.key_table_row, pages)
        dims, columns = c.kv_dims, c.columns
        places = a.key, a.key + c.kv_bytes * (c.head_dim_v // 2)
        kind = dict(is_value=True, read_once=c.reads_kv_once)
        kv_halves = [
            (place, *strides, *table, dim, width, dim) for place, dim, width in zip(places, dims, columns, strict=True)
        ]
        if self.dequantizes:
            forms = LatentRowFormat.of_halves(c.kv_type, self.dtype, dims, c.head_dim_v)
            left, right = (DequantizedOperand(*kv_halves[i], **kind, row_format=forms[i]) for i in range(2))
        else:
            left, right = (KvOperand(*kv_half, **kind) for kv_half in kv_halves)
        return left, right

    def _kv_atoms(self, a: Addresses, g: DecodeGeometry):
        left, right = self.config.kv_dims
        rest = (g.kv_heads, (g.k_pages, g.k_rows), self.config.kv_strides(g.k_page, g.k_head, g.k_row))
        return self._kv_atom(a.key, left, *rest), self._kv_atom(a.key + HALFWORD_BYTES * left, right, *rest)

    @property
    def loading_warps(self) -> int:
        """Warps that load keys: one for TMA, two if lanes copy rows of 16-bit elements."""
        return 2 if issubclass(self.source, PageRows) and not self.dequantizes else 1

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        if self.dequantizes:
            return dict(producer_lanes=LANES)
        # Lanes read 8-bit values on their way to a product that takes them from registers. Lanes also write zeros into
        # both halves.
        read_by_lanes = dict(producer_lanes=LANES, consumer_lanes=LANES) if self.config.uses_fp8_mma else {}
        return super().kv_arrivals(is_value) | read_by_lanes

    @property
    def q_arrivals(self) -> dict[str, int]:
        return dict(producer_lanes=LANES)

    def _kv_edges(self, consumer: str, warps: int) -> list[Edge]:
        edges = super()._kv_edges(consumer, warps)
        if not self.dequantizes:
            return [replace(edge, producer="load_keys", producer_warps=self.loading_warps) for edge in edges]
        warps = self.dequant_warps
        wide = [replace(edge, producer="dequantize", producer_warps=warps) for edge in edges]
        # Dequantization is in place. So a stage is released on the edges of the dequantized tiles.
        loaded = [
            Edge(f"loaded {edge.name}", "load_keys", "dequantize", edge.stages, 1, warps, 0, LANES) for edge in edges
        ]
        return [*wide, *loaded]

    @property
    def more_roles(self) -> dict[str, int]:
        dequant = {"dequantize": self.dequant_warps} if self.dequantizes else {}
        return {**super().more_roles, "load_keys": self.loading_warps, **dequant}

    @cute.jit
    def load_keys(self, warp, atoms, addresses, geometry, tiles, rings, partial_barriers, work_queue):
        """Run the warps that load keys, and the warps that dequantize them."""
        operands, kv_halves = self.loads(addresses, geometry), (rings.k, rings.v)
        shared = [shared_address(tile.iterator) for tile in (tiles.k, tiles.v)]
        if const_expr(self.dequantizes):
            loaded = rings.loaded_k, rings.loaded_v
            if warp < self.loading_warps:
                self._copy_both(warp, shared, kv_halves, loaded, work_queue, operands)
            else:
                self._dequantize_both(warp - self.loading_warps, shared, kv_halves, loaded, work_queue, operands)
        elif const_expr(self.loading_warps == 1):
            self._load_both(atoms, shared, kv_halves, partial_barriers, work_queue, operands)
        else:
            self._copy_both(warp, shared, kv_halves, kv_halves, work_queue, operands)

    @cute.jit
    def _dequantize_both(self, warp, shared, rings, loaded, work_queue, operands):
        """Dequantize an equal share of the rows of both halves of every tile."""
        step, work = Int32(0), Int32(0)
        tile = work_queue.read(work)
        while tile.exists:
            sources = [self.source.create(operands[i], tile, None, shared[i], self.tile.n, 0) for i in range(2)]
            sources = [source.share(warp, self.dequant_warps) for source in sources]
            tiles = (tile.keys.end - tile.keys.begin) * self.step_tiles
            for _ in cutlass.range(tiles, unroll=1):
                for i in cutlass.range_constexpr(2):
                    loaded[i].wait_full(step)
                    sources[i].dequantize(rings[i].stage(step))
                    # The tensor cores read these writes through another proxy.
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.mbarrier_arrive(rings[i].full_barrier(step))
                step += 1
            work += 1
            tile = work_queue.read(work)

    @cute.jit
    def _copy_both(self, warp, shared, rings, loaded, work_queue, operands):
        """Copy half of the rows of both halves of every tile with each warp. Halves are released one after the other,
        and two warps refill one sooner. With one half for each warp, 64 lists of 2048 and 128 heads took 83.0 instead
        of 77.3 us. 32 x 8192 tokens in pages of 1 took 180 instead of 164 us (H200, 2026-11-23)."""
        step, work = Int32(0), Int32(0)
        tile = work_queue.read(work)
        while tile.exists:
            sources = [self.source.create(operands[i], tile, None, shared[i], self.tile.n, 0) for i in range(2)]
            sources = [source.share(warp, self.loading_warps) for source in sources]
            first, end = tile.keys.begin * self.step_tiles, tile.keys.end * self.step_tiles
            # The table is read a tile ahead, as in PageRows.load.
            entries = sources[0].read_table(end - 1)
            for n in cutlass.range(end - 1, first - 1, -1, unroll=1):
                addresses = [source.locate(n, entries) for source in sources]
                entries = sources[0].read_table(n - 1)
                for i in cutlass.range_constexpr(2):
                    rings[i].wait_empty(step)
                    sources[i].copy_rows(addresses[i], rings[i].stage(step), loaded[i].full_barrier(step))
                step += 1
            work += 1
            tile = work_queue.read(work)

    @cute.jit
    def _load_both(self, atoms, shared, rings, partial_barriers, work_queue, operands):
        """Load both halves of every tile with one warp. The variables that differ between the halves are pairs."""
        operands = tuple(self.divided(operand) for operand in operands)
        descriptors = [copy.tma_descriptor(atom) for atom in atoms]
        step, work, partials = Int32(0), Int32(0), [Int32(0), Int32(0)]
        tile = work_queue.read(work)
        while tile.exists:
            rest = (self.tile.n, self.config.box_rows)
            sources = [self.source.create(operands[i], tile, descriptors[i], shared[i], *rest) for i in range(2)]
            for n in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
                for k in cutlass.range_constexpr(self.step_tiles):
                    place = n * self.step_tiles + (self.step_tiles - 1 - k)
                    locations = [source.locate(place) for source in sources]
                    for i in self.half_orders[k]:
                        rings[i].wait_empty(step)
                        barrier = partial_barriers + i
                        partials[i] = sources[i].fill(locations[i], place, rings[i], step, barrier, partials[i])
                    step += 1
            work += 1
            tile = work_queue.read(work)


class LatentRows:
    """Mixin for attend classes that gives the packed rows of MLA their view of the keys."""

    kernel: Any
    mask: IntervalMask
    addresses: Addresses
    geometry: DecodeGeometry

    def logit_row(self, tile, warp_row, fragment: Any = RowFragment) -> LogitRow:
        """Return the rows that a lane holds in a ``fragment`` of scores whose first row is ``warp_row``, each at its
        token's position."""
        request, group = tile.request, Int32(self.geometry.group)
        if const_expr(self.kernel.config.sparse):
            assert self.kernel.tile.n == TOPK_KEYS
            positions = (request.first_position,) * fragment.rows
            return TopkRow.create(request, positions, self.addresses, self.geometry)
        first = tile.first_row + warp_row + fragment.first_row()
        tokens = [(first + fragment.row_offset(r)) // group for r in range(fragment.rows)]
        positions = TokenPositions.of_request(self.mask.kind, request, self.addresses, self.geometry)
        places = tuple(positions.of(cutlass.min(token, request.q_len - 1)) for token in tokens)
        return LogitRow(places, request.kv_len, Float32(0.0))
