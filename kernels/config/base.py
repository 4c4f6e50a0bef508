"""What the configs of all kernels have in common: pure Python, no GPU, no DSL.

A config holds everything that changes generated code and nothing else, so its name is the key of the compiled kernel.
``families.resolve`` derives it from a problem; shapes, lengths and strides stay run-time arguments, but for how many
queries there are and how large a window is, by which the fastest kernel differs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from hopwell.kernels import support
from hopwell.kernels.elements import ELEMENTS, HALFWORD_BYTES, Element
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, WARPGROUP
from hopwell.kernels.masks import MaskKinds
from hopwell.kernels.problem import AttentionProblem, Family

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
E4M3_DTYPES = {torch.float8_e4m3fn: "e4m3"}
QUERY_DTYPES = DTYPES | E4M3_DTYPES
OUT_DTYPES = QUERY_DTYPES | {torch.uint8: "nvfp4"}  # of the tensor that has the elements

BLOCK_COLUMNS = 64  # 16-bit elements in a row of the 128-byte swizzle
REGISTERS_BESIDE_SUMS = 30  # that ptxas wants besides the sums of a matrix instruction: 158 for 64 rows x 256 columns
MMA_DEPTH = 16  # 16-bit elements that a matrix instruction multiplies at a time; a warp stores as many columns at least


def rounded_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than ``size``."""
    return -(-size // multiple) * multiple


def power_of_two_in(size: int) -> int:
    """Return the largest power of two that is not above ``size``."""
    return 1 << (size.bit_length() - 1)


def _in_halfwords(element_bytes: int, strides: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert strides in elements to strides in halfwords."""
    if element_bytes == HALFWORD_BYTES:
        return strides
    return tuple(stride * element_bytes // HALFWORD_BYTES for stride in strides)


class KvFetch(enum.Enum):
    """How K and V reach shared memory, see ``parts/load/kv_source.py``."""

    CONTIGUOUS = "contiguous"
    PAGE_BOXES = "pages"
    PAGE_ROWS = "rows"
    TOPK_ROWS = "listed"


class KvType(enum.Enum):
    """Elements of K and V in memory."""

    WIDE = "wide"  # those of the queries
    E4M3 = "e4m3"
    INT8 = "int8"
    NVFP4 = "nvfp4"
    FP8_DS_MLA = "fp8_ds_mla"  # of latent keys: 512 e4m3, the float32 scales of each 128 of them, and 64 bfloat16

    def element(self, dtype: str) -> Element:
        """Return the element type of K and V beside queries of ``dtype``."""
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
    splits_v: bool = False  # two consumer warpgroups, or two pairs of warps, share rows, each for half of V's columns
    combine_registers: int = 88  # where a warpgroup of decode combines
    source_stages: tuple[int, int] | None = None  # of K and of V as they are loaded, where they are converted
    converting_registers: int = 0  # of the warpgroups that convert them
    converting_warpgroups: int = 1  # one for both, or one for K and one for V

    @property
    def loaded_stages(self) -> tuple[int, int]:
        """Say how many stages the loaders of K and of V fill."""
        return self.source_stages or (self.kv_stages, self.kv_stages)


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
    mask: MaskKinds
    kv_fetch: KvFetch
    box_rows: int
    uneven_pages: bool = field(default=False, kw_only=True)  # of a size that is not a power of two
    compiled_for: str = field(default="", kw_only=True)

    @property
    def target(self) -> str:
        """Return the architecture that the kernel is compiled for."""
        return self.compiled_for or support.build_of(self.arch)

    family: ClassVar[Family]

    @property
    def tile(self) -> Tile:
        """Return sizes and resources."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Return the key of the compiled kernel: canonical and unique, a valid C identifier and file name."""
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
        """Say how many bytes an element of the queries takes as it is multiplied."""
        return ELEMENTS[self.dtype].bytes_of(1)

    @property
    def dequantizes_q(self) -> bool:
        """Tell whether queries are e4m3 in memory and are dequantized where they have been loaded."""
        return False

    @property
    def kv_element(self) -> Element:
        """Return the type of the elements of K and V in memory."""
        return self.kv_type.element(self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Return the size in bytes of what K and V are addressed by: an element, or two of 4 bits."""
        return self.kv_element.storage_bytes

    @property
    def uses_fp8_mma(self) -> bool:
        """Tell whether the matrix products take operands of 8 bits."""
        return self.q_bytes == 1

    @property
    def matrix_instruction(self) -> str:
        """Return the matrix instruction of both products, with " e4m3" where its operands have 8 bits."""
        return ARCHITECTURES[self.arch].matrix_instruction + " e4m3" * self.uses_fp8_mma

    @property
    def mma_depth(self) -> int:
        """Say how many elements a matrix instruction multiplies at a time: 32 bytes of them."""
        return HALFWORD_BYTES * MMA_DEPTH // self.q_bytes

    @property
    def reads_kv_once(self) -> bool:
        """Tell whether keys are read at one time only, so that work tiles say how soon they leave the L2 cache."""
        return False

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Return the widths of the rows of K and of V that the two loading warps fetch, in halfwords."""
        per_word = 16 // self.kv_element.bits
        return self.head_dim_qk // per_word, self.head_dim_v // per_word

    def kv_strides(self, *strides: Any) -> tuple[Any, ...]:
        """Convert strides of K or V, which count ``kv_bytes`` each, to strides in halfwords."""
        return _in_halfwords(self.kv_bytes, strides)

    def q_strides(self, *strides: Any) -> tuple[Any, ...]:
        """Convert strides of Q, given in elements, to strides in halfwords."""
        return _in_halfwords(self._loaded_q_bytes, strides)

    @property
    def columns(self) -> tuple[int, int]:
        """Count the columns of the tiles that the two loading warps fill: whole column blocks of the swizzle."""
        first, second = self.kv_dims
        return rounded_up(first, BLOCK_COLUMNS), rounded_up(second, BLOCK_COLUMNS)

    @property
    def copies_scales(self) -> bool:
        """Tell whether the loading warps copy scales of blocks into shared memory, beside the tiles."""
        return False

    @property
    def dequantizes(self) -> bool:
        """Tell whether a warpgroup dequantizes K and V between those that load and those that multiply."""
        return False

    @property
    def transposes_v(self) -> bool:
        """Tell whether a warpgroup transposes V: products of 8-bit operands take both with their depth along the
        rows."""
        return False

    @property
    def dequantizes_in_place(self) -> bool:
        """Tell whether a warpgroup dequantizes K and V where they have been loaded, so that no other memory is
        needed."""
        return False

    @property
    def converts(self) -> bool:
        """Tell whether a warpgroup stands between those that load K and V and those that multiply."""
        return self.dequantizes or self.dequantizes_in_place or self.transposes_v

    @property
    def operand_columns(self) -> tuple[int, int]:
        """Count the columns of the tiles of K and V that are multiplied, in halfwords."""
        return self.columns

    @property
    def stage_columns(self) -> tuple[int, int]:
        """Count the columns of the stages that the two loading warps fill: those of what they load, or of what becomes
        of it."""
        return self.operand_columns if self.dequantizes_in_place else self.columns

    @property
    def loaded_depth(self) -> tuple[int, int]:
        """Count the columns of the loaded tiles of K and V that somebody reads."""
        return self.depth[0], self.depth[1] * self.v_splits

    @property
    def q_dim(self) -> int:
        """Return the width of a row of Q in memory, in halfwords."""
        return self.head_dim_qk * self._loaded_q_bytes // HALFWORD_BYTES

    @property
    def _loaded_q_bytes(self) -> int:
        return 1 if self.dequantizes_q else self.q_bytes

    @property
    def q_columns(self) -> int:
        """Count the columns of the Q tile in shared memory, in halfwords."""
        return rounded_up(self.head_dim_qk * self.q_bytes // HALFWORD_BYTES, BLOCK_COLUMNS)

    @property
    def loaded_q_columns(self) -> int:
        """Count those of them that are loaded, which are the last ones."""
        return rounded_up(self.q_dim, BLOCK_COLUMNS)

    @property
    def first_loaded_q_block(self) -> int:
        return (self.q_columns - self.loaded_q_columns) // BLOCK_COLUMNS

    @property
    def depth(self) -> tuple[int, int]:
        """Say how many columns of Q and K, and of V, a warpgroup multiplies: what the matrix instructions can take. A
        product with V is one instruction over all columns, which takes whole column blocks where there are several."""
        columns = self.operand_columns[1]
        whole_blocks = columns > BLOCK_COLUMNS and not self.uses_fp8_mma
        value = columns if whole_blocks else rounded_up(self.head_dim_v, MMA_DEPTH)
        return rounded_up(self.head_dim_qk, self.mma_depth), value // self.v_splits

    @property
    def product_columns(self) -> int:
        """Say how many columns of V a matrix instruction multiplies at a time: all that a warpgroup has, but where
        there are so few registers at launch that ptxas refuses an instruction with all of their sums."""
        columns = self.depth[1]
        fits = columns * 64 // WARPGROUP + REGISTERS_BESIDE_SUMS <= self.launch_registers
        return columns if fits else columns // 2

    @property
    def ctas_per_sm(self) -> int:
        """Say how many CTAs share a multiprocessor, its registers and its shared memory."""
        return 1

    @property
    def launch_registers(self) -> int:
        """Say how many registers a thread has before its warpgroup asks for others."""
        return REGISTERS // (WARPGROUP * len(self.registers) * self.ctas_per_sm) // 8 * 8

    @property
    def most_shared_bytes(self) -> int:
        """Say how many bytes of shared memory a CTA can have."""
        return ARCHITECTURES[self.arch].shared_bytes_of(self.ctas_per_sm)

    @property
    def registers(self) -> tuple[int, ...]:
        """Say how many registers a thread of each warpgroup has."""
        converting = [self.tile.converting_registers] * self.converting_warpgroups
        return (self.tile.producer_registers, *[self.tile.consumer_registers] * self.consumer_warpgroups, *converting)

    @property
    def converting_warpgroups(self) -> int:
        """Say how many warpgroups convert K and V."""
        return self.tile.converting_warpgroups if self.converts else 0

    @property
    def consumer_warpgroups(self) -> int:
        return self.tile.m * self.v_splits // 64

    @property
    def v_splits(self) -> int:
        """Say how many consumer warpgroups share query rows."""
        return 2 if self.tile.splits_v else 1

    @property
    def has_block_scales(self) -> bool:
        """Tell whether K and V, or the output, have scales of blocks in tensors of their own."""
        return bool(self.kv_element.block) or self.out_dtype == "nvfp4"

    def __post_init__(self) -> None:
        tile = self.tile
        launched = self.launch_registers * WARPGROUP * len(self.registers)
        asked = WARPGROUP * sum(self.registers)
        if asked > launched:
            raise ValueError(f"{self.name}: {asked} registers asked for, {launched} at launch: the kernel would hang")
        if (self.kv_fetch is KvFetch.PAGE_BOXES) != bool(self.box_rows) or (self.box_rows and tile.n % self.box_rows):
            raise ValueError(f"{self.name}: box_rows={self.box_rows} does not go with {tile.n} keys a step")


class TileShape(NamedTuple):
    """How many heads, and how many tokens of each, share the rows of a query tile."""

    heads: Any  # an int, or an Int32 in a kernel that takes any number of them
    tokens: Any  # of each of them

    @staticmethod
    def of(heads: Any, tile_m: int) -> TileShape:
        """Give whole swizzle atoms of rows for each head; some of the tile's rows may be left over."""
        return TileShape(heads, tile_m // heads // MIN_BOX_ROWS * MIN_BOX_ROWS)


def kv_fetch(problem: AttentionProblem, tile_n: int) -> tuple[KvFetch, int]:
    """Return the way to fetch K and V, and the tokens of a box."""
    if problem.page_table is None:
        return KvFetch.CONTIGUOUS, 0
    rows = math.gcd(problem.key.shape[2], tile_n)
    box_rows = min(rows & -rows, MAX_BOX_ROWS)
    if box_rows < MIN_BOX_ROWS or not all(_has_slots(view) for view in (problem.key, problem.value)):
        return KvFetch.PAGE_ROWS, 0
    return KvFetch.PAGE_BOXES, box_rows


def has_uneven_pages(problem: AttentionProblem) -> bool:
    """Tell whether pages have a size that is not a power of two."""
    size = problem.key.shape[2]
    return (problem.page_table is not None or problem.token_table is not None) and size & (size - 1) != 0


def _has_slots(view: torch.Tensor) -> bool:
    """Tell whether pages start a whole number of head strides apart, as TMA boxes over all columns need (5
    dimensions)."""
    page, head = page_and_head_stride(view)
    return 0 < head <= page and page % head == 0


def page_and_head_stride(view: torch.Tensor) -> tuple[int, int]:
    """Return the page and head strides of a [pages, heads, rows, dim] view in elements. The stride of a dimension of
    size 1 is chosen to fit."""
    pages, heads, rows, _ = view.shape
    page, head, row, _ = view.stride()
    if heads == 1:
        head = page if pages > 1 else rows * row
    if pages == 1:
        page = heads * head
    return page, head


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
                f"{what} dtype {dtype} has no kernel on {arch}; supported: {dtype_names(supported)}"
            )
    for what, operand in (("key", problem.key), ("value", problem.value)):
        if operand.dtype != problem.query.dtype and kv_type is KvType.WIDE:
            raise NotImplementedError(
                f"{what} dtype {operand.dtype} has no kernel on {arch} with query dtype {problem.query.dtype}; "
                f"supported: {problem.query.dtype}"
            )


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Return the dtypes as messages name them."""
    return ", ".join(map(str, dtypes))


def require_page_size(problem: AttentionProblem, arch: str) -> None:
    """Refuse page sizes without a kernel."""
    page_size = problem.key.shape[2]
    paged = problem.page_table is not None or problem.token_table is not None
    if paged and page_size > support.MAX_PAGE_SIZE:
        raise NotImplementedError(
            f"page size {page_size} has no kernel on {arch}; supported: 1 to {support.MAX_PAGE_SIZE}"
        )


def paged_fetches(tile_n: int) -> list[tuple[KvFetch, int]]:
    """Return every way to fetch pages in steps of ``tile_n`` keys, with the tokens of a box."""
    boxes = [rows for rows in (8, 16, 32, 64) if tile_n % rows == 0]
    return [(KvFetch.PAGE_ROWS, 0), *((KvFetch.PAGE_BOXES, rows) for rows in boxes)]
