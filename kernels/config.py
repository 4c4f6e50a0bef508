"""Which kernel serves a problem: pure Python, no GPU, no DSL.

A :class:`PrefillConfig` holds everything that changes generated code and nothing else, so its name is the key of the
compiled kernel. ``families.resolve`` derives it from a problem; shapes, lengths and strides stay run-time arguments,
but for how many queries there are and how large a window is, by which the fastest kernel differs.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch

from hopwell.kernels import support
from hopwell.kernels.elements import ELEMENTS, Element
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, WARPGROUP
from hopwell.kernels.problem import AttentionProblem, Family, MaskKind, ScoreKind
from hopwell.kernels.support import HOPPER, OTHER_HOPPER_HEAD_DIMS

MASKS = (MaskKind.FULL, MaskKind.CAUSAL, MaskKind.SLIDING_WINDOW, MaskKind.CHUNKED)  # of prefill
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
QUERY_DTYPES = DTYPES | {torch.float8_e4m3fn: "e4m3"}
OUT_DTYPES = QUERY_DTYPES | {torch.uint8: "nvfp4"}  # of the tensor that has the elements

BLOCK_COLUMNS = 64  # 16-bit elements in a row of the 128-byte swizzle
MMA_DEPTH = 16  # 16-bit elements that a matrix instruction multiplies at a time; a warp stores as many columns at least


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _in_words(element_bytes: int, strides: tuple[Any, ...]) -> tuple[Any, ...]:
    """Strides in elements as strides in units of 16 bits."""
    return tuple(stride * element_bytes // 2 for stride in strides) if element_bytes < 2 else strides


class KvFetch(enum.Enum):
    """How K and V reach shared memory, see ``parts/kv_source.py``."""

    CONTIGUOUS = "contiguous"
    PAGE_BOXES = "pages"
    PAGE_ROWS = "rows"
    LISTED_ROWS = "listed"


class KvType(enum.Enum):
    """Elements of K and V in memory."""

    WIDE = "wide"  # those of the queries
    E4M3 = "e4m3"
    INT8 = "int8"
    NVFP4 = "nvfp4"

    def element(self, dtype: str) -> Element:
        """The element type of K and V beside queries of ``dtype``."""
        return ELEMENTS[dtype if self is KvType.WIDE else self.value]


@dataclass(frozen=True)
class Tile:
    """Tile sizes and the resources that go with them."""

    m: int  # query rows of a CTA, 64 for each consumer warpgroup or pair of them; fewer in kernels for few rows
    n: int  # keys of a step
    q_stages: int
    kv_stages: int
    producer_registers: int
    consumer_registers: int
    splits_v: bool = False  # two consumer warpgroups share 64 rows, each for half of V's columns
    merge_registers: int = 88  # where a warpgroup of decode merges
    source_stages: tuple[int, int] | None = None  # of K and of V as they are loaded, where they are converted
    converting_registers: int = 0  # of the warpgroup that converts them

    @property
    def loaded_stages(self) -> tuple[int, int]:
        """Stages that the loaders of K and of V fill."""
        return self.source_stages or (self.kv_stages, self.kv_stages)


# Registers: ptxas gives every thread 65536 / threads (rounded down to 8) at launch, and setmaxnreg can only hand out
# what that adds up to: 168 * 384 for two consumer warpgroups, 128 * 512 for three. Ask for more and the kernel hangs.
# 40 for producers, or 32 beside three warpgroups, is what they need without spills.
#
# Three consumer warpgroups: with so few columns of O, more rows pay for K and V. 128 keys: 488 TFLOP/s at 2 x 8192
# tokens, 478 with 96, 403 with two warpgroups and four stages (H200, 2026-11-21).
_NARROW = Tile(m=192, n=128, q_stages=2, kv_stages=2, producer_registers=32, consumer_registers=160)
# Two Q stages let the next tile's Q load early: 450 instead of 410 TFLOP/s at 16 x 1024 tokens (H200, 2026-11-21). A
# third K/V stage in their place brought nothing at 8192 and 16384 tokens, nor did steps of 96 to 176 keys.
_MIDDLE = Tile(m=128, n=128, q_stages=2, kv_stages=2, producer_registers=40, consumer_registers=232)
_WIDE = Tile(m=128, n=96, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232)
TILES = {
    (32, 32): _NARROW,
    (40, 40): _NARROW,
    (48, 48): _NARROW,
    (64, 64): _NARROW,
    (80, 80): _MIDDLE,
    (96, 96): _MIDDLE,
    (104, 104): _MIDDLE,
    (128, 128): _MIDDLE,
    (160, 160): _WIDE,
    (192, 192): _WIDE,
    # Shared memory is full with one Q stage; 80 keys and two Q stages give 460 instead of 490 TFLOP/s.
    (192, 128): Tile(m=128, n=128, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232),
    (256, 256): Tile(m=128, n=64, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232),
    # 64 x 512 of O are more registers than a warpgroup has. Both of a pair compute the same S: half as much work again,
    # but nothing to exchange.
    (512, 512): Tile(64, 32, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232, splits_v=True),
}

# Head dims that fill as many column blocks differ by nothing but what TMA fills with zeros and the depth of products.
OTHER_TILES = {
    (d, d): next(tile for (qk, v), tile in TILES.items() if qk == v and qk >= d) for d, _ in OTHER_HOPPER_HEAD_DIMS
}


# Windows of up to so many keys have steps of 64 where head dims have 128: with a window of 128 the 64 rows of a
# warpgroup then see 3 steps of 64 keys, not 2 of 128. 8 x 512 queries of 8192 keys take 21, 16, 12, 9, 4 and 1 % less
# time with windows of 128, 256, 384, 512, 768 and 1024 at head dim 64, and 8, 5, 4, 0, -1 and -2 % less at 128; without
# a window head dim 64 takes 14 % more (H200, 2026-11-24).
SHORT_WINDOW, SHORT_STEP = 512, 64
# Where K and V are converted there is one more warpgroup, for which the others leave registers, and there are stages of
# what was loaded beside those of what is multiplied. Widened and beyond head dim 128, shared memory has one of either.
_CONVERTING: dict[str, Any] = dict(q_stages=1, producer_registers=40, consumer_registers=208, converting_registers=56)
WIDENED_PAIRS_TO = 128
MOST_COLUMNS_OF_512_THREADS = 192  # of V: ptxas refuses a product of 256 columns in a kernel of 128 registers at launch
# The share of a packed tile's rows that a request's queries may fill for heads to be packed, so that those of a KV head
# share its keys and steps. 32 x 16 queries of 8192 keys take 252 instead of 586 us, 16 x 64 230 instead of 299. Where
# tiles are full anyway, packing costs: 8 x 512 queries of 16384 keys take 12 % more time, 64 x 256 9 %, 64 x 128 18 %
# (H200, 2026-11-24).
PACKED_SHARE = 0.5
MAX_BOX_ROWS = 64  # taller boxes are no faster (H200, 2026-11-21), and fewer sizes mean fewer kernels
MIN_BOX_ROWS = 8  # a swizzle atom: a box of all columns needs whole atoms
# Tiles or units that a CTA has in hand beyond the current one, and that another CTA could begin with. With three, the
# mean SM was busy for 82 % of P8 (2 x 4096 tokens, head dim 256), which took 18 % longer (H200, 2026-11-22).
WORK_STAGES = 1


@dataclass(frozen=True)
class KernelConfig:
    """What any kernel needs to know of its operands. ``box_rows`` counts the tokens of a TMA box of pages, 0 for other
    ways to fetch. ``compiled_for`` names the architecture to compile for where it is not the usual one of ``arch``."""

    arch: str
    dtype: str
    out_dtype: str
    head_dim_qk: int
    head_dim_v: int
    mask: MaskKind
    kv_fetch: KvFetch
    box_rows: int
    uneven_pages: bool = field(default=False, kw_only=True)  # of a size that is not a power of two
    compiled_for: str = field(default="", kw_only=True)

    @property
    def target(self) -> str:
        """The architecture that the kernel is compiled for."""
        return self.compiled_for or support.build_of(self.arch)

    family: ClassVar[Family]

    @property
    def tile(self) -> Tile:
        """Sizes and resources."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Canonical and unique: the key of the compiled kernel, a valid C identifier and file name."""
        raise NotImplementedError

    def _named(self, details: Sequence[str]) -> str:
        return "_".join(
            [
                self.family.value,
                self.arch + (f"_on_{self.compiled_for}" if self.compiled_for else ""),
                self.dtype,
                *([f"to_{self.out_dtype}"] if self.out_dtype != self.dtype else []),
                f"d{self.head_dim_qk}" + (f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim_qk else ""),
                self.mask.value,
                *details,
                self.kv_fetch.value + (str(self.box_rows) if self.box_rows else ""),
                *["uneven"] * self.uneven_pages,
            ]
        )

    @property
    def kv_type(self) -> KvType:
        return KvType.WIDE

    @property
    def q_bytes(self) -> int:
        """Bytes of an element of the queries."""
        return ELEMENTS[self.dtype].bytes_of(1)

    @property
    def kv_element(self) -> Element:
        """Elements of K and V in memory."""
        return self.kv_type.element(self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of what K and V are addressed by: an element, or two of 4 bits."""
        return max(self.kv_element.bits // 8, 1)

    @property
    def multiplies_bytes(self) -> bool:
        """Whether the matrix products take operands of 8 bits."""
        return self.q_bytes == 1

    @property
    def mma_depth(self) -> int:
        """Elements that a matrix instruction multiplies at a time: 32 bytes of them."""
        return 2 * MMA_DEPTH // self.q_bytes

    @property
    def reads_kv_once(self) -> bool:
        """Whether keys are read at one time only, so that work tiles say how soon they leave the L2 cache."""
        return False

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Of a row of what the two loading warps fetch, of K and of V, in units of 16 bits."""
        per_word = 16 // self.kv_element.bits
        return self.head_dim_qk // per_word, self.head_dim_v // per_word

    def kv_strides(self, *strides: Any) -> tuple[Any, ...]:
        """Strides of K or V, given in units of ``kv_bytes``, in units of 16 bits."""
        return _in_words(self.kv_bytes, strides)

    def q_strides(self, *strides: Any) -> tuple[Any, ...]:
        """Strides of Q, given in elements, in units of 16 bits."""
        return _in_words(self.q_bytes, strides)

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of the tiles that the two loading warps fill: whole column blocks of the swizzle."""
        first, second = self.kv_dims
        return _up(first, BLOCK_COLUMNS), _up(second, BLOCK_COLUMNS)

    @property
    def widens(self) -> bool:
        """Whether a warpgroup widens K and V between those that load and those that multiply."""
        return False

    @property
    def transposes_v(self) -> bool:
        """Whether a warpgroup transposes V: products of 8-bit operands take both with their depth along the rows."""
        return False

    @property
    def converts(self) -> bool:
        """Whether a warpgroup stands between those that load K and V and those that multiply."""
        return self.widens or self.transposes_v

    @property
    def operand_columns(self) -> tuple[int, int]:
        """Columns of the tiles of K and V that are multiplied, in units of 16 bits."""
        return self.columns

    @property
    def loaded_depth(self) -> tuple[int, int]:
        """Columns of the loaded tiles of K and V that somebody reads."""
        return self.depth[0], self.depth[1] * self.v_parts

    @property
    def q_dim(self) -> int:
        """Width of a row of Q in units of 16 bits."""
        return self.head_dim_qk * self.q_bytes // 2

    @property
    def q_columns(self) -> int:
        """Columns of the Q tile in shared memory, in units of 16 bits."""
        return _up(self.q_dim, BLOCK_COLUMNS)

    @property
    def depth(self) -> tuple[int, int]:
        """Columns of Q and K that a warpgroup multiplies, and of V: what the matrix instructions can take. A product
        with V is one instruction over all columns, which takes whole column blocks where there are several."""
        columns = self.operand_columns[1]
        whole_blocks = columns > BLOCK_COLUMNS and not self.multiplies_bytes
        value = columns if whole_blocks else _up(self.head_dim_v, MMA_DEPTH)
        return _up(self.head_dim_qk, self.mma_depth), value // self.v_parts

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share a multiprocessor, its registers and its shared memory."""
        return 1

    @property
    def launch_registers(self) -> int:
        """Registers of a thread before its warpgroup asks for others."""
        return REGISTERS // (WARPGROUP * len(self.registers) * self.ctas_per_sm) // 8 * 8

    @property
    def most_shared_bytes(self) -> int:
        """Shared memory that a CTA can have."""
        return ARCHITECTURES[self.arch].shared_bytes_of(self.ctas_per_sm)

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a thread of each warpgroup."""
        converting = [self.tile.converting_registers] if self.converts else []
        return (self.tile.producer_registers, *[self.tile.consumer_registers] * self.consumer_warpgroups, *converting)

    @property
    def consumer_warpgroups(self) -> int:
        return self.tile.m // 64 * self.v_parts

    @property
    def v_parts(self) -> int:
        """Consumer warpgroups that share query rows."""
        return 2 if self.tile.splits_v else 1

    @property
    def has_block_scales(self) -> bool:
        """Whether K and V, or the output, have scales of blocks in tensors of their own."""
        return bool(self.kv_element.block) or self.out_dtype == "nvfp4"

    def __post_init__(self) -> None:
        tile = self.tile
        launched = self.launch_registers * WARPGROUP * len(self.registers)
        asked = WARPGROUP * sum(self.registers)
        if asked > launched:
            raise ValueError(f"{self.name}: {asked} registers asked for, {launched} at launch: the kernel would hang")
        if (self.kv_fetch is KvFetch.PAGE_BOXES) != bool(self.box_rows) or (self.box_rows and tile.n % self.box_rows):
            raise ValueError(f"{self.name}: box_rows={self.box_rows} does not go with {tile.n} keys a step")


@dataclass(frozen=True)
class PrefillConfig(KernelConfig):
    """A prefill kernel; of Hopper where no subclass says otherwise."""

    score: ScoreKind = ScoreKind.SCALED
    skip_softmax: bool = False
    short_steps: bool = False
    packs_heads: bool = False  # query heads of a KV head share query tiles
    kv_type: KvType = KvType.WIDE

    family: ClassVar[Family] = Family.PREFILL
    tiles: ClassVar[Mapping[tuple[int, int], Tile]] = TILES
    other_tiles: ClassVar[Mapping[tuple[int, int], Tile]] = OTHER_TILES  # of kernels that are compiled on demand only

    @classmethod
    def all_tiles(cls) -> Mapping[tuple[int, int], Tile]:
        """Those of all head dims (QK, V)."""
        return {**cls.tiles, **cls.other_tiles}

    @classmethod
    def tile_of(
        cls,
        dims: tuple[int, int],
        score: ScoreKind = ScoreKind.SCALED,
        skip_softmax: bool = False,
        short_steps: bool = False,
        packs_heads: bool = False,
        kv_type: KvType = KvType.WIDE,
        multiplies_bytes: bool = False,
    ) -> Tile:
        """The tile of head dims (QK, V). Neither packed heads nor the type of K and V change the keys of a step, so a
        cache of 8 bits gives the bits that its values give in 16."""
        tile = cls.all_tiles()[dims]
        if tile is _NARROW and (score.caps or skip_softmax):
            tile = replace(tile, n=96)  # with 128 keys they would spill in three warpgroups
        if short_steps:
            tile = replace(tile, n=SHORT_STEP, kv_stages=2 * tile.kv_stages)
        if packs_heads and tile.m > _MIDDLE.m:
            # Queries are few, and a row's head and token are more to keep than three warpgroups have registers for.
            registers = _MIDDLE.producer_registers, _MIDDLE.consumer_registers
            tile = replace(tile, m=_MIDDLE.m, producer_registers=registers[0], consumer_registers=registers[1])
        if multiplies_bytes:
            tile = replace(
                tile, m=_MIDDLE.m, n=min(tile.n, _MIDDLE.n), kv_stages=2, source_stages=(2, 1), **_CONVERTING
            )
        elif kv_type is not KvType.WIDE:
            has_pairs = max(dims) <= WIDENED_PAIRS_TO
            tile = replace(
                tile,
                m=_MIDDLE.m if dims[1] <= MOST_COLUMNS_OF_512_THREADS else _MIDDLE.m // 2,
                kv_stages=tile.kv_stages if has_pairs else tile.kv_stages // 2,
                source_stages=(2, 1) if has_pairs else (1, 1),
                **_CONVERTING,
            )
        return tile

    @classmethod
    def has_short_steps(cls, dims: tuple[int, int], mask: MaskKind) -> bool:
        """Whether there are kernels with short steps besides those without."""
        return mask is MaskKind.SLIDING_WINDOW and cls.all_tiles()[dims].n == 2 * SHORT_STEP

    @classmethod
    def choices(cls, problem: AttentionProblem, dims: tuple[int, int]) -> dict[str, Any]:
        """What a kernel for the problem has beyond what was asked for, for speed alone."""
        if problem.skip_softmax > 0:  # which leaves out tiles of keys, each for 64 queries
            return {}
        short_steps = cls.has_short_steps(dims, problem.mask.kind) and problem.mask.window_left < SHORT_WINDOW
        tile = cls.tile_of(dims, problem.score.kind, short_steps=short_steps, packs_heads=True)
        few_queries = problem.mean_q_len <= PACKED_SHARE * tile.m
        has_slopes = problem.score.kind.has_slopes  # one for all rows of a tile
        packs_heads = few_queries and not has_slopes and packed_shape(problem, tile.m).heads > 1
        return dict(short_steps=short_steps, packs_heads=packs_heads)

    @classmethod
    def all_choices(cls, dims: tuple[int, int], mask: MaskKind) -> list[dict[str, Any]]:
        """Those that there are for plain scores."""
        steps = (False, True) if cls.has_short_steps(dims, mask) else (False,)
        return [dict(short_steps=short, packs_heads=packs) for short in steps for packs in (False, True)]

    @property
    def tile(self) -> Tile:
        dims = self.head_dim_qk, self.head_dim_v
        choices = self.score, self.skip_softmax, self.short_steps, self.packs_heads
        return self.tile_of(dims, *choices, self.kv_type, self.multiplies_bytes)

    @property
    def widens(self) -> bool:
        return self.kv_type is not KvType.WIDE

    @property
    def transposes_v(self) -> bool:
        return self.multiplies_bytes

    @property
    def operand_columns(self) -> tuple[int, int]:
        if self.multiplies_bytes:
            return self.columns
        return _up(self.head_dim_qk, BLOCK_COLUMNS), _up(self.head_dim_v, BLOCK_COLUMNS)

    @property
    def transposed_columns(self) -> int:
        """Elements in a row of a tile of V that has been transposed: its keys, in whole rows of the swizzle."""
        return _up(self.tile.n, 2 * BLOCK_COLUMNS)

    @property
    def converted_bytes(self) -> dict[str, int]:
        """Bytes of a tile of K and of V as they are multiplied, where they are converted."""
        if self.transposes_v:
            return {"V": self.depth[1] * self.transposed_columns}
        return {name: self.tile.n * columns * 2 for name, columns in zip("KV", self.operand_columns, strict=True)}

    @property
    def loaded_depth(self) -> tuple[int, int]:
        return self.kv_dims if self.converts else super().loaded_depth

    @property
    def name(self) -> str:
        details = [f"kv_{self.kv_type.value}"] if self.widens else []
        details += [self.score.value] if self.score is not ScoreKind.SCALED else []
        choices = ["short_steps"] * self.short_steps + ["packed"] * self.packs_heads
        return self._named(details + ["skip_softmax"] * self.skip_softmax + choices)


class TileShape(NamedTuple):
    """Of a query tile."""

    heads: Any  # an int, or an Int32 in a kernel that takes any number of them
    tokens: Any  # of each of them

    @staticmethod
    def of(heads: Any, tile_m: int) -> TileShape:
        """Whole swizzle atoms of rows for each head; some of the tile's rows may be left over."""
        return TileShape(heads, tile_m // heads // MIN_BOX_ROWS * MIN_BOX_ROWS)


def packed_shape(problem: AttentionProblem, tile_m: int) -> TileShape:
    """The shape of tiles of ``tile_m`` rows where query heads of a KV head share them: what takes a request of mean
    length in the fewest tiles."""
    group = problem.query.shape[1] // problem.key.shape[1]
    divisors = [heads for heads in range(1, group + 1) if group % heads == 0 and heads * MIN_BOX_ROWS <= tile_m]
    shapes = [TileShape.of(heads, tile_m) for heads in reversed(divisors)]
    return min(shapes, key=lambda shape: -(-problem.mean_q_len // shape.tokens) / shape.heads)


def kv_fetch(problem: AttentionProblem, tile_n: int) -> tuple[KvFetch, int]:
    """The way to fetch K and V, and the tokens of a box."""
    if problem.page_table is None:
        return KvFetch.CONTIGUOUS, 0
    rows = math.gcd(problem.key.shape[2], tile_n)
    box_rows = min(rows & -rows, MAX_BOX_ROWS)
    if box_rows < MIN_BOX_ROWS or not all(_has_slots(view) for view in (problem.key, problem.value)):
        return KvFetch.PAGE_ROWS, 0
    return KvFetch.PAGE_BOXES, box_rows


def has_uneven_pages(problem: AttentionProblem) -> bool:
    """Whether pages have a size that is not a power of two."""
    size = problem.key.shape[2]
    return (problem.page_table is not None or problem.token_table is not None) and size & (size - 1) != 0


def _has_slots(view: torch.Tensor) -> bool:
    """Whether pages start a whole number of head strides apart, as TMA boxes over all columns need (5 dimensions)."""
    page, head = page_and_head_stride(view)
    return 0 < head <= page and page % head == 0


def page_and_head_stride(view: torch.Tensor) -> tuple[int, int]:
    """Strides of a [pages, heads, rows, dim] view in elements. That of a dimension of size 1 is chosen to fit."""
    pages, heads, rows, _ = view.shape
    page, head, row, _ = view.stride()
    if heads == 1:
        head = page if pages > 1 else rows * row
    if pages == 1:
        page = heads * head
    return page, head


def resolve_prefill(problem: AttentionProblem, arch: str, kind: type[PrefillConfig]) -> PrefillConfig:
    """The prefill kernel for ``problem`` on ``arch``, whose configs are of ``kind``.

    Raises:
        NotImplementedError: there is none; the message says what is supported.
    """
    dims = (problem.query.shape[2], problem.v_dim)
    if dims not in kind.all_tiles():
        listed = ", ".join(f"{qk}/{v}" for qk, v in kind.all_tiles())
        raise NotImplementedError(f"head dims (QK/V) {dims[0]}/{dims[1]} have no kernel on {arch}; supported: {listed}")
    out_dtype = problem.query.dtype if problem.out is None else problem.out.dtype
    kv_type = prefill_kv_type(problem, dims, arch)
    queries = QUERY_DTYPES if arch in HOPPER else DTYPES
    # The context entry widens e4m3 queries over NVFP4 caches, and their outputs are those of e4m3 queries.
    narrow = problem.query.dtype == torch.float8_e4m3fn or kv_type is KvType.NVFP4
    outputs = OUT_DTYPES if narrow and arch in HOPPER else DTYPES
    require_dtypes(problem, out_dtype, arch, kv_type, queries=queries, outputs=outputs)
    require_page_size(problem, arch)
    features = kind.choices(problem, dims) | dict(score=problem.score.kind, skip_softmax=problem.skip_softmax > 0)
    if kv_type is not KvType.WIDE:
        features |= dict(kv_type=kv_type)
    multiplies_bytes = problem.query.dtype == torch.float8_e4m3fn
    fetch, box_rows = kv_fetch(problem, kind.tile_of(dims, multiplies_bytes=multiplies_bytes, **features).n)
    return kind(
        arch=arch,
        dtype=QUERY_DTYPES[problem.query.dtype],
        out_dtype=OUT_DTYPES[out_dtype],
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        mask=problem.mask.kind,
        kv_fetch=fetch,
        box_rows=box_rows,
        uneven_pages=has_uneven_pages(problem),
        **features,
    )


def prefill_kv_type(problem: AttentionProblem, dims: tuple[int, int], arch: str) -> KvType:
    """The type of K and V: WIDE where no kernel of ``arch`` converts them, whatever they are.

    Raises:
        NotImplementedError: operands have 8 or 4 bits, and there is no kernel for these head dims that takes them.
    """
    fp8 = torch.float8_e4m3fn
    types = (problem.query.dtype, problem.key.dtype, problem.value.dtype)
    packed = problem.kv_scales is not None
    if arch not in HOPPER or not (packed or fp8 in types):
        return KvType.WIDE
    served = support.NVFP4_HEAD_DIMS if packed else support.BYTE_HEAD_DIMS
    if dims not in served:
        listed = ", ".join(f"{qk}/{v}" for qk, v in served)
        raise NotImplementedError(
            f"head dims (QK/V) {dims[0]}/{dims[1]} have no prefill kernel on {arch} with "
            f"{'NVFP4 K and V' if packed else f'{fp8} operands'}; supported: {listed}"
        )
    if packed:
        return KvType.NVFP4
    return KvType.E4M3 if types[0] != fp8 and types[1:] == (fp8, fp8) else KvType.WIDE


def require_dtypes(
    problem: AttentionProblem,
    out_dtype: torch.dtype,
    arch: str,
    kv_type: KvType = KvType.WIDE,
    *,
    queries: Iterable[torch.dtype] = DTYPES,
    outputs: Iterable[torch.dtype] = DTYPES,
) -> None:
    """Refuse queries and outputs of other types than these, and K and V of others than the queries' or ``kv_type``."""
    for what, dtype, supported in (("query", problem.query.dtype, queries), ("output", out_dtype, outputs)):
        if dtype not in supported:
            raise NotImplementedError(
                f"{what} dtype {dtype} has no kernel on {arch}; supported: {', '.join(map(str, supported))}"
            )
    for what, operand in (("key", problem.key), ("value", problem.value)):
        if operand.dtype != problem.query.dtype and kv_type is KvType.WIDE:
            raise NotImplementedError(
                f"{what} dtype {operand.dtype} has no kernel on {arch} with query dtype {problem.query.dtype}; "
                f"supported: {problem.query.dtype}"
            )


def require_page_size(problem: AttentionProblem, arch: str) -> None:
    """Refuse page sizes without a kernel."""
    page_size = problem.key.shape[2]
    paged = problem.page_table is not None or problem.token_table is not None
    if paged and page_size > support.MAX_PAGE_SIZE:
        raise NotImplementedError(
            f"page size {page_size} has no kernel on {arch}; supported: 1 to {support.MAX_PAGE_SIZE}"
        )


def shipped_prefill_configs(arch: str, kind: type[PrefillConfig]) -> Iterator[PrefillConfig]:
    """The kernels that are compiled ahead: those of plain scores, with inputs and outputs of one dtype. Others are
    compiled when they are first called for."""
    for dtype, dims, mask in itertools.product(DTYPES.values(), kind.tiles, MASKS):
        for choices in kind.all_choices(dims, mask):
            for fetch, rows in [(KvFetch.CONTIGUOUS, 0), *paged_fetches(kind.tile_of(dims, **choices).n)]:
                yield kind(arch, dtype, dtype, *dims, mask, fetch, rows, **choices)


def paged_fetches(tile_n: int) -> list[tuple[KvFetch, int]]:
    """Every way to fetch pages in steps of ``tile_n`` keys, with the tokens of a box."""
    boxes = [rows for rows in (8, 16, 32, 64) if tile_n % rows == 0]
    return [(KvFetch.PAGE_ROWS, 0), *((KvFetch.PAGE_BOXES, rows) for rows in boxes)]
