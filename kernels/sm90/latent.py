"""What the MLA kernels have in common: a key is in shared memory once, in two sides, the left half of the value's
columns and all to the right of them."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config import KvType
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import shared_address
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.kv_rows import PageRows
from hopwell.kernels.parts.kv_source import KvOperand, KvSource
from hopwell.kernels.parts.mask import LIST_KEYS, IntervalMask, ListMask, ListRow, LogitRow, TokenPositions, mask_type
from hopwell.kernels.parts.page_size import page_size
from hopwell.kernels.parts.widened_rows import WIDENED, LatentBytes, WidenedOperand
from hopwell.kernels.pipeline import Edge


class LatentKeys:
    """How latent keys are loaded: a base class beside a kind of decode kernel."""

    config: Any
    tile: Any
    dtype: Any
    source: Any
    step_tiles: int
    byte_widening_warps: int  # how many warps widen keys of 8 bits
    _kv_atom: Any

    @property
    def side_orders(self) -> tuple[tuple[int, int], ...]:
        """Return the order in which sides, left (0) and right (1), of a step's tiles are multiplied, and fetched by
        TMA."""
        return ((0, 1),) * self.step_tiles

    @property
    def mask_type(self) -> type[IntervalMask]:
        return ListMask if self.config.sparse else mask_type(self.config.mask)

    @property
    def widens(self) -> bool:
        """Say whether keys have 8 bits in memory, and warps of their own widen them in shared memory."""
        return self.config.kv_type is not KvType.WIDE

    @property
    def widening_warps(self) -> int:
        """Say how many warps widen keys."""
        return self.byte_widening_warps if self.widens else 0

    def kv_source(self) -> type[KvSource]:
        source = super().kv_source()
        return WIDENED[source] if self.widens else source

    def loads(self, addresses: Addresses, geometry: DecodeGeometry) -> tuple[KvOperand, KvOperand]:
        """Both sides are values as well: rows that nobody sees become zeros."""
        c, a, g = self.config, addresses, geometry
        pages = page_size(g.page_divisor, g.k_rows, c.uneven_pages)
        strides, table = c.kv_strides(g.k_page, g.k_head, g.k_row), (a.key_table, g.key_table_row, pages)
        dims, columns = c.kv_dims, c.columns
        places = a.key, a.key + c.kv_bytes * (c.head_dim_v // 2)
        kind = dict(is_value=True, read_once=c.reads_kv_once)
        sides = [
            (place, *strides, *table, dim, width, dim) for place, dim, width in zip(places, dims, columns, strict=True)
        ]
        if self.widens:
            forms = LatentBytes.of_sides(c.kv_type, self.dtype, dims, c.head_dim_v)
            left, right = (WidenedOperand(*sides[i], **kind, row_format=forms[i]) for i in range(2))
        else:
            left, right = (KvOperand(*side, **kind) for side in sides)
        return left, right

    def _kv_atoms(self, a: Addresses, g: DecodeGeometry):
        left, right = self.config.kv_dims
        rest = (g.kv_heads, (g.k_pages, g.k_rows), self.config.kv_strides(g.k_page, g.k_head, g.k_row))
        return self._kv_atom(a.key, left, *rest), self._kv_atom(a.key + HALFWORD_BYTES * left, right, *rest)

    @property
    def loading_warps(self) -> int:
        """Say how many warps load keys: one where TMA does the work, two where lanes copy rows of 16 bits."""
        return 2 if issubclass(self.source, PageRows) and not self.widens else 1

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        if self.widens:
            return dict(producer_lanes=LANES)
        # Values of 8 bits are read by lanes, on their way to a product that takes them from registers, and lanes write
        # zeros into both parts.
        read_by_lanes = dict(producer_lanes=LANES, consumer_lanes=LANES) if self.config.multiplies_bytes else {}
        return super().kv_arrivals(is_value) | read_by_lanes

    @property
    def q_arrivals(self) -> dict[str, int]:
        return dict(producer_lanes=LANES)

    def _kv_edges(self, consumer: str, warps: int) -> list[Edge]:
        edges = super()._kv_edges(consumer, warps)
        if not self.widens:
            return [replace(edge, producer="load_keys", producer_warps=self.loading_warps) for edge in edges]
        warps = self.widening_warps
        wide = [replace(edge, producer="widen", producer_warps=warps) for edge in edges]
        # What is loaded becomes what is multiplied where it lies: stages are given back on the edges of that.
        loaded = [Edge(f"loaded {edge.name}", "load_keys", "widen", edge.stages, 1, warps, 0, LANES) for edge in edges]
        return [*wide, *loaded]

    @property
    def more_roles(self) -> dict[str, int]:
        widening = {"widen": self.widening_warps} if self.widens else {}
        return {**super().more_roles, "load_keys": self.loading_warps, **widening}

    @cute.jit
    def load_keys(self, warp, atoms, addresses, geometry, tiles, rings, partial_barriers, board):
        """Run the warps that load keys, and those that widen them."""
        operands, sides = self.loads(addresses, geometry), (rings.k, rings.v)
        shared = [shared_address(tile.iterator) for tile in (tiles.k, tiles.v)]
        if const_expr(self.widens):
            loaded = rings.loaded_k, rings.loaded_v
            if warp < self.loading_warps:
                self._copy_both(warp, shared, sides, loaded, board, operands)
            else:
                self._widen_both(warp - self.loading_warps, shared, sides, loaded, board, operands)
        elif const_expr(self.loading_warps == 1):
            self._load_both(atoms, shared, sides, partial_barriers, board, operands)
        else:
            self._copy_both(warp, shared, sides, sides, board, operands)

    @cute.jit
    def _widen_both(self, warp, shared, rings, loaded, board, operands):
        """Widen an equal share of the rows of both sides of every tile."""
        step, work = Int32(0), Int32(0)
        tile = board.read(work)
        while tile.exists:
            sources = [self.source.create(operands[i], tile, None, shared[i], self.tile.n, 0) for i in range(2)]
            sources = [source.share(warp, self.widening_warps) for source in sources]
            tiles = (tile.keys.end - tile.keys.begin) * self.step_tiles
            for _ in cutlass.range(tiles, unroll=1):
                for i in cutlass.range_constexpr(2):
                    loaded[i].wait_full(step)
                    sources[i].widen(rings[i].stage(step))
                    # The tensor cores read what was written here through another proxy.
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.mbarrier_arrive(rings[i].full_barrier(step))
                step += 1
            work += 1
            tile = board.read(work)

    @cute.jit
    def _copy_both(self, warp, shared, rings, loaded, board, operands):
        """Each warp copies half of the rows of both sides of every tile: sides are given back one after the other, and
        two warps are done with one sooner. With a side for each warp 64 lists of 2048 and 128 heads took 83.0 instead
        of 77.3 us, 32 x 8192 tokens in pages of 1 180 instead of 164 (H200, 2026-11-23)."""
        step, work = Int32(0), Int32(0)
        tile = board.read(work)
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
            tile = board.read(work)

    @cute.jit
    def _load_both(self, atoms, shared, rings, partial_barriers, board, operands):
        """Let one warp load both sides of every tile: what differs between the sides comes as a pair."""
        operands = tuple(self.divided(operand) for operand in operands)
        descriptors = [copy.tma_descriptor(atom) for atom in atoms]
        step, work, partials = Int32(0), Int32(0), [Int32(0), Int32(0)]
        tile = board.read(work)
        while tile.exists:
            rest = (self.tile.n, self.config.box_rows)
            sources = [self.source.create(operands[i], tile, descriptors[i], shared[i], *rest) for i in range(2)]
            for n in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
                for k in cutlass.range_constexpr(self.step_tiles):
                    place = n * self.step_tiles + (self.step_tiles - 1 - k)
                    locations = [source.locate(place) for source in sources]
                    for i in self.side_orders[k]:
                        rings[i].wait_empty(step)
                        barrier = partial_barriers + i
                        partials[i] = sources[i].fill(locations[i], place, rings[i], step, barrier, partials[i])
                    step += 1
            work += 1
            tile = board.read(work)


class LatentRows:
    """This says how packed rows of MLA see keys: it is a base class beside a kind of attend."""

    kernel: Any
    mask: IntervalMask
    addresses: Addresses
    geometry: DecodeGeometry

    def logit_row(self, tile, warp_row, fragment: Any = RowFragment) -> LogitRow:
        """Return the rows from ``warp_row`` on that a lane holds of a ``fragment`` of scores, each at its token's
        position."""
        request, group = tile.request, Int32(self.geometry.group)
        if const_expr(self.kernel.config.sparse):
            assert self.kernel.tile.n == LIST_KEYS
            positions = (request.first_position,) * fragment.rows
            return ListRow.create(request, positions, self.addresses, self.geometry)
        first = tile.first_row + warp_row + fragment.first_row()
        tokens = [(first + fragment.row_offset(r)) // group for r in range(fragment.rows)]
        positions = TokenPositions.of_request(self.mask.kind, request, self.addresses, self.geometry)
        places = tuple(positions.of(cutlass.min(token, request.q_len - 1)) for token in tokens)
        return LogitRow(places, request.kv_len, Float32(0.0))
