"""Common parts of the MLA kernels. A key is in shared memory once, in two halves: the left half of the value's columns,
and all columns to the right of them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from hopwell.kernels.config.base import KvType
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_address
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import AttentionKernel
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles
from hopwell.kernels.parts.dequant.latent_rows import DequantizedOperand, DequantizedPageRows, LatentRowFormat
from hopwell.kernels.parts.load.kv_source import KvOperand, KvSource
from hopwell.kernels.parts.load.page_size import page_size
from hopwell.kernels.parts.partition.split_kv import KeySchedule, SplitTile
from hopwell.kernels.parts.rows.mask import (
    TOPK_KEYS,
    IntervalMask,
    LogitRow,
    TokenPositions,
    TopkMask,
    TopkRow,
    mask_type,
)


class LatentLoads:
    """Loads of both halves of the keys, by one warp or two, and the warps that dequantize 8-bit keys in place."""

    def __init__(self, kernel: Any, dequant_warps: int):
        self.kernel = kernel
        self._dequant_warps = dequant_warps  # of 8-bit keys

    @property
    def dequantizes(self) -> bool:
        """Whether keys have 8 bits in memory and separate warps dequantize them in shared memory."""
        return self.kernel.config.kv_type is not KvType.WIDE

    @property
    def dequant_warps(self) -> int:
        """Warps that dequantize keys."""
        return self._dequant_warps if self.dequantizes else 0

    @property
    def loading_warps(self) -> int:
        """Warps that load keys: one for TMA, two if lanes copy rows of 16-bit elements."""
        return 2 if self.kernel.copies_rows and not self.dequantizes else 1

    @property
    def warps(self) -> int:
        """Warps that load or dequantize keys."""
        return self.loading_warps + self.dequant_warps

    @property
    def roles(self) -> dict[str, int]:
        dequant = {"dequantize": self.dequant_warps} if self.dequantizes else {}
        return {"load_keys": self.loading_warps, "schedule": 1, **dequant}

    def edges(self, roles: Roles, reader: Reader, consumer: str = "attend") -> list[Edge]:
        """Return the edges of both halves. Both are values, so lanes may write zeros into both."""
        producer = "dequantize" if self.dequantizes else "load_keys"
        if self.dequantizes:
            # Dequantization is in place. So a stage is released on the edges of the dequantized tiles.
            arrivals = dict(producer_lanes=LANES, consumer_lanes=LANES if reader is Reader.LANES else 1)
        else:
            arrivals = reader.arrivals(copies_rows=self.kernel.copies_rows, writes_zeros=True)
        stages, sizes = self.kernel.tile.loaded_stages, self.kernel.stage_bytes
        names = list(enumerate(("k", "v")))
        kv = [roles.edge(name, producer, consumer, stages[i], sizes[i], **arrivals) for i, name in names]
        if not self.dequantizes:
            return kv
        lanes = dict(producer_lanes=LANES)
        return kv + [roles.edge(f"loaded_{name}", "load_keys", "dequantize", stages[i], **lanes) for i, name in names]

    def kv_source(self) -> type[KvSource]:
        source = AttentionKernel.kv_source(self.kernel)
        return DequantizedPageRows if self.dequantizes else source

    def logits(self, mask: IntervalMask, addresses: Addresses, geometry: DecodeGeometry) -> "LatentLogits":
        """Return the rows' view of the keys."""
        return LatentLogits(self.kernel, mask, addresses, geometry)

    def operands(self, addresses: Addresses, geometry: DecodeGeometry) -> tuple[KvOperand, KvOperand]:
        """Return the operands of both halves. Both are values as well, so rows that no query sees become zeros."""
        c, a, g = self.kernel.config, addresses, geometry
        pages = page_size(g.page_divisor, g.k_rows, c.uneven_pages)
        strides, table = c.layout.kv_strides(g.k_page, g.k_head, g.k_row), (a.key_table, g.key_table_row, pages)
        dims, columns = c.layout.kv_dims, c.layout.columns
        places = a.key, a.key + c.kv_bytes * (c.head_dim_v // 2)
        kind = dict(is_value=True, read_once=c.reads_kv_once, topk=c.sparse)
        kv_halves = [
            (place, *strides, *table, dim, width, dim) for place, dim, width in zip(places, dims, columns, strict=True)
        ]
        if self.dequantizes:
            forms = LatentRowFormat.of_halves(c.kv_type, self.kernel.dtype, dims, c.head_dim_v)
            left, right = (DequantizedOperand(*kv_halves[i], **kind, row_format=forms[i]) for i in range(2))
        else:
            left, right = (KvOperand(*kv_half, **kind) for kv_half in kv_halves)
        return left, right

    def kv_atoms(self, a: Addresses, g: DecodeGeometry):
        left, right = self.kernel.layout.kv_dims
        strides = self.kernel.layout.kv_strides(g.k_page, g.k_head, g.k_row)
        rest = (g.kv_heads, (g.k_pages, g.k_rows), strides, self.kernel.tile.n)
        return self.kernel._kv_atom(a.key, left, *rest), self.kernel._kv_atom(
            a.key + HALFWORD_BYTES * left, right, *rest
        )

    @cute.jit
    def run(self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry):
        """Run the warps that load keys, and the warps that dequantize them."""
        operands, kv_halves = self.operands(addresses, geometry), (rings.k, rings.v)
        shared = [shared_address(tile.iterator) for tile in (tiles.k, tiles.v)]
        if const_expr(self.dequantizes):
            loaded = rings.loaded_k, rings.loaded_v
            if warp < self.loading_warps:
                self._copy_both(warp, shared, kv_halves, loaded, work_queue, operands)
            else:
                self._dequantize_both(warp - self.loading_warps, shared, kv_halves, loaded, work_queue, operands)
        elif const_expr(self.loading_warps == 1):
            self._load_both(atoms, shared, kv_halves, zeroing_barriers, work_queue, operands)
        else:
            self._copy_both(warp, shared, kv_halves, kv_halves, work_queue, operands)

    def _shares(self, operands, tile, shared, warp, warps: int) -> list:
        """Return the sources of a warp's equal share of the rows of both halves of a tile."""
        kernel, create = self.kernel, self.kernel.source.create
        sources = [create(operands[i], tile, None, shared[i], kernel.tile.n, 0) for i in range(2)]
        return [source.share(warp, warps) for source in sources]

    @cute.jit
    def _dequantize_both(self, warp, shared, rings, loaded, work_queue, operands):
        """Dequantize an equal share of the rows of both halves of every tile."""
        step, work = Int32(0), Int32(0)
        tile = work_queue.read(work)
        while tile.exists:
            sources = self._shares(operands, tile, shared, warp, self.dequant_warps)
            tiles = (tile.keys.end - tile.keys.begin) * self.kernel.step_tiles
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
            sources = self._shares(operands, tile, shared, warp, self.loading_warps)
            first, end = tile.keys.begin * self.kernel.step_tiles, tile.keys.end * self.kernel.step_tiles
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
    def _load_both(self, atoms, shared, rings, zeroing_barriers, work_queue, operands):
        """Load both halves of every tile with one warp. The variables that differ between the halves are pairs."""
        operands = tuple(self.kernel.divided(operand) for operand in operands)
        descriptors = [copy.tma_descriptor(atom) for atom in atoms]
        step, work, zeroed = Int32(0), Int32(0), [Int32(0), Int32(0)]
        tile = work_queue.read(work)
        while tile.exists:
            rest = (self.kernel.tile.n, self.kernel.config.box_rows)
            sources = [self.kernel.source.create(operands[i], tile, descriptors[i], shared[i], *rest) for i in range(2)]
            for n in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
                for k in cutlass.range_constexpr(self.kernel.step_tiles):
                    place = n * self.kernel.step_tiles + (self.kernel.step_tiles - 1 - k)
                    locations = [source.locate(place) for source in sources]
                    for i in self.kernel.half_orders[k]:
                        rings[i].wait_empty(step)
                        barrier = zeroing_barriers + i
                        zeroed[i] = sources[i].fill(locations[i], place, rings[i], step, barrier, zeroed[i])
                    step += 1
            work += 1
            tile = work_queue.read(work)


@device_struct
class LatentLogits:
    """The view of the packed rows of MLA on the keys."""

    kernel: Any  # configuration only
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


class LatentKeys:
    """Mixin of all kernels over latent keys: the mask, and both halves of the keys through ``loads``."""

    @property
    def mask_type(self) -> type[IntervalMask]:
        return TopkMask if self.config.sparse else mask_type(self.config.mask)

    def kv_source(self) -> type[KvSource]:
        return self.loads.kv_source()

    def _kv_atoms(self, a: Addresses, g: DecodeGeometry):
        return self.loads.kv_atoms(a, g)


class LatentKernel(LatentKeys):
    """Mixin of kernels of many rows: work tiles of packed rows, and the loads of their queries."""

    step_tiles = 2
    q_role = "schedule"
    work_tile = SplitTile

    def q_atom(self, a: Addresses, g: DecodeGeometry):
        # The heads of an expanded query share one address. TMA does not load such a query, but its descriptor needs a
        # nonzero stride.
        (stride,) = self.layout.q_strides(g.q_head)
        rows, distance = Int64(g.tokens) * g.group, cutlass.max(Int64(stride), copy.VECTOR_BYTES // HALFWORD_BYTES)
        return self._row_boxes(a.query, (rows, self.layout.q_dim, 1), (distance, distance), self.q_rows)

    def schedule(self, addresses: Addresses, geometry: DecodeGeometry, mask, q_atom, tiles, rings) -> KeySchedule:
        sizes = (self.tile.m, self.tile.n * self.step_tiles)
        hooks = self.partition.hooks(self, copy.tma_descriptor(q_atom), tiles, rings, addresses, geometry)
        return self.partition.schedule(geometry, addresses, mask, *sizes, hooks=hooks)

    @cute.jit
    def fetch_rows(self, descriptor, addresses, geometry, tile, tiles, ring, step):
        """Load rows of Q, by TMA if they have a constant stride. TMA may also read rows of the next request; their
        results are not stored."""
        if geometry.q_token == geometry.q_head * geometry.group:
            row = tile.request.q_start * Int32(geometry.group) + tile.first_row
            self.fetch_q(descriptor, tiles, ring, step, row, Int32(0))
        else:
            self.load_q(addresses, geometry, tile, tiles, ring, step)
