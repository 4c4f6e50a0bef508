"""Base of the configs of all kernels: pure Python, no GPU, no DSL.

A config holds everything that changes generated code and nothing else, so its name is the key of the compiled kernel.
``registry.resolve`` derives it from a problem. Shapes, lengths and strides stay run-time arguments. There are two
exceptions, because the fastest kernel depends on the number of queries and on the size of a window.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from hopwell.kernels import support
from hopwell.kernels.elements import ELEMENTS, HALFWORD_BYTES, Element
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, WARPGROUP
from hopwell.kernels.masks import MaskEnum
from hopwell.kernels.problem import AttentionProblem, Family

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
E4M3_DTYPES = {torch.float8_e4m3fn: "e4m3"}
QUERY_DTYPES = DTYPES | E4M3_DTYPES
OUT_DTYPES = QUERY_DTYPES | {torch.uint8: "nvfp4"}  # of the tensor that holds the elements

BLOCK_COLUMNS = 64  # 16-bit elements in a row of the 128-byte swizzle
REGISTERS_BESIDE_SUMS = 30  # that ptxas needs besides a matrix instruction's sums: 158 for 64 rows x 256 columns
MMA_DEPTH = 16  # 16-bit elements that a matrix instruction multiplies at a time; also the fewest columns a warp stores


def rounded_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def power_of_two_in(size: int) -> int:
    """Return the largest power of two that is at most ``size``."""
    return 1 << (size.bit_length() - 1)


class KvFetch(enum.Enum):
    """Ways to copy K and V to shared memory, see ``parts/load/kv_source.py``."""

    CONTIGUOUS = "contiguous"
    PAGE_BOXES = "pages"
    PAGE_ROWS = "rows"
    TOPK_ROWS = "topk"


class KvType(enum.Enum):
    """Elements of K and V in memory."""

    WIDE = "wide"  # the queries' element type
    E4M3 = "e4m3"
    INT8 = "int8"
    NVFP4 = "nvfp4"
    FP8_DS_MLA = "fp8_ds_mla"  # latent keys: 512 e4m3, a float32 scale for each 128 of them, and 64 bfloat16

    def element(self, dtype: str) -> Element:
        """Return the element type of K and V for queries of ``dtype``."""
        return ELEMENTS[dtype if self is KvType.WIDE else self.value]


@dataclass(frozen=True)
class Tile:
    """Tile sizes, stages and registers of a kernel."""

    m: int  # query rows of a CTA: 64 for each consumer warpgroup or pair; fewer in swap-AB kernels
    n: int  # keys of a step
    q_stages: int
    kv_stages: int
    producer_registers: int
    consumer_registers: int
    splits_v: bool = False  # two consumer warpgroups, or two pairs of warps, share rows, each for half of V's columns
    combine_registers: int = 88  # of the decode warpgroup that combines, if there is one
    source_stages: tuple[int, int] | None = None  # of K and of V as loaded, if they are converted
    converting_registers: int = 0  # of the warpgroups that convert K and V
    converting_warpgroups: int = 1  # one for both, or one for K and one for V

    @property
    def loaded_stages(self) -> tuple[int, int]:
        """Numbers of stages that the loaders of K and of V fill."""
        return self.source_stages or (self.kv_stages, self.kv_stages)


class Traits(NamedTuple):
    """The traits by which the implementations of a family divide its problems among them."""

    dims: tuple[int, int]  # head dims (QK, V)
    kv_type: KvType = KvType.WIDE
    rows: int = 1  # packed rows of a request


MOST = 256  # rows or keys of a tile: rows of a TMA box, and columns of a matrix instruction
MAX_BOX_ROWS = 64  # taller boxes are no faster (H200, 2026-11-21), and fewer sizes mean fewer kernels
MIN_BOX_ROWS = 8  # a swizzle atom: a box of all columns needs whole atoms
CTAS = 2  # of a cluster: pairs share matrix instructions, or dequantized keys
# Work tiles that a CTA holds beyond the current one, and that another CTA could start instead. With three stages, the
# mean SM was busy for 82 % of P8 (2 x 4096 tokens, head dim 256), which took 18 % longer (H200, 2026-11-22).
WORK_STAGES = 1


@dataclass(frozen=True)
class KernelConfig:
    """Common fields of all kernel configs.

    ``box_rows`` is the number of tokens in a TMA box of pages, 0 for other ways to fetch. ``compiled_for`` names the
    target architecture if it is not the default target of ``arch``.
    """

    arch: str
    dtype: str
    out_dtype: str
    head_dim_qk: int
    head_dim_v: int
    mask: MaskEnum
    kv_fetch: KvFetch
    box_rows: int
    uneven_pages: bool = field(default=False, kw_only=True)  # the page size is not a power of two
    compiled_for: str = field(default="", kw_only=True)

    @property
    def target(self) -> str:
        """Architecture that the kernel is compiled for."""
        return self.compiled_for or support.build_of(self.arch)

    family: ClassVar[Family]
    # Two types of configs of an architecture may have equal fields: all but one of them put an instruction in the name.
    instruction_in_name: ClassVar[str] = ""
    layout_type: ClassVar[Any]  # a class of config/layout.py

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        """Return why no kernel of this type serves problems with ``traits`` on ``arch``, or None if one does."""
        return None

    @classmethod
    def require(cls, traits: Traits, arch: str) -> None:
        """Raise NotImplementedError if no kernel of this type serves problems with ``traits``."""
        if (reason := cls.refusal(traits, arch)) is not None:
            raise NotImplementedError(reason)

    @classmethod
    def is_chosen(cls, traits: Traits, arch: str, preferred: Iterable[type[KernelConfig]]) -> bool:
        """Return whether kernels of this type serve problems with ``traits``, and no kernel of ``preferred`` types
        does."""
        others = (kind.refusal(traits, arch) for kind in preferred)
        return None not in others and cls.refusal(traits, arch) is None

    @classmethod
    def query_dtype(cls, query: torch.dtype, kv: torch.dtype) -> torch.dtype:
        """Return the dtype in which kernels of this type take queries of dtype ``query`` over K and V of dtype ``kv``.

        If it is another one, a call casts the queries before the launch.
        """
        return query

    @property
    def layout(self) -> Any:
        """Widths of the operands, see ``config/layout.py``."""
        return self.layout_type(self)

    @property
    def tile(self) -> Tile:
        """Tile sizes, stages and registers."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Key of the compiled kernel: canonical and unique, a valid C identifier and file name."""
        raise NotImplementedError

    def _named(self, details: Sequence[str]) -> str:
        return "_".join(
            [
                self.family.value,
                self.arch + (f"_on_{self.compiled_for}" if self.compiled_for else ""),
                *([self.instruction_in_name] if self.instruction_in_name else []),
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
        """Bytes of an element of the queries as it is multiplied."""
        return ELEMENTS[self.dtype].bytes_of(1)

    @property
    def dequantizes_q(self) -> bool:
        """Whether queries are e4m3 in memory and are dequantized in shared memory, in place."""
        return False

    @property
    def kv_element(self) -> Element:
        """Element type of K and V in memory."""
        return self.kv_type.element(self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the unit that addresses K and V: one element, or two 4-bit elements."""
        return self.kv_element.storage_bytes

    @property
    def uses_fp8_mma(self) -> bool:
        """Whether both matrix products are fp8 MMA (8-bit operands)."""
        return self.q_bytes == 1

    @property
    def matrix_instruction(self) -> str:
        """Matrix instruction of both products, with " e4m3" for 8-bit operands."""
        return ARCHITECTURES[self.arch].matrix_instruction + " e4m3" * self.uses_fp8_mma

    @property
    def mma_depth(self) -> int:
        """Elements that a matrix instruction multiplies at a time: 32 bytes of them."""
        return HALFWORD_BYTES * MMA_DEPTH // self.q_bytes

    @property
    def reads_kv_once(self) -> bool:
        """Whether each key is read at one time only. Work tiles then choose the L2 eviction policy."""
        return False

    @property
    def copies_scales(self) -> bool:
        """Whether the loading warps also copy block scales into shared memory."""
        return False

    @property
    def dequantizes(self) -> bool:
        """Whether a warpgroup between the loaders and the consumers dequantizes K and V."""
        return False

    @property
    def transposes_v(self) -> bool:
        """Whether a warpgroup transposes V: 8-bit matrix products need the depth of both operands along the rows."""
        return False

    @property
    def dequantizes_in_place(self) -> bool:
        """Whether a warpgroup dequantizes K and V in the stages that they were loaded to, without other memory."""
        return False

    @property
    def converts(self) -> bool:
        """Whether a warpgroup between the loaders and the consumers converts K and V."""
        return self.dequantizes or self.dequantizes_in_place or self.transposes_v

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share an SM, its registers and its shared memory."""
        return 1

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return 1

    @property
    def work_tile_ctas(self) -> int:
        """CTAs of a cluster that take each work tile together."""
        return self.cluster_ctas

    @property
    def launch_registers(self) -> int:
        """Registers of a thread before its warpgroup changes their number."""
        return REGISTERS // (WARPGROUP * len(self.registers) * self.ctas_per_sm) // 8 * 8

    @property
    def most_shared_bytes(self) -> int:
        """Most bytes of shared memory of a CTA."""
        return ARCHITECTURES[self.arch].shared_bytes_of(self.ctas_per_sm)

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a thread, for each warpgroup."""
        converting = [self.tile.converting_registers] * self.converting_warpgroups
        return (self.tile.producer_registers, *[self.tile.consumer_registers] * self.consumer_warpgroups, *converting)

    @property
    def converting_warpgroups(self) -> int:
        """Number of warpgroups that convert K and V."""
        return self.tile.converting_warpgroups if self.converts else 0

    @property
    def consumer_warpgroups(self) -> int:
        return self.tile.m * self.v_splits // 64

    @property
    def v_splits(self) -> int:
        """Number of consumer warpgroups that share query rows."""
        return 2 if self.tile.splits_v else 1

    @property
    def has_block_scales(self) -> bool:
        """Whether K and V, or the output, have block scales in tensors of their own."""
        return bool(self.kv_element.block) or self.out_dtype == "nvfp4"

    @property
    def row_unit(self) -> int:
        """Rows of which a tile has a multiple: 64 for each consumer warpgroup, or for each two that share rows."""
        return 64 // self.v_splits

    def constraints(self) -> Iterator[tuple[bool, str]]:
        """Yield the conditions on tile, registers and boxes: whether each is met, and the message if it is not."""
        tile, registers, unit, depth = self.tile, self.registers, self.row_unit, self.mma_depth
        stages = (tile.q_stages, tile.kv_stages, *tile.loaded_stages)
        is_rows, is_keys = (size % step == 0 and 0 < size <= MOST for size, step in ((tile.m, unit), (tile.n, depth)))
        yield is_rows, f"{tile.m} rows of a tile must be a multiple of {unit}, at most {MOST}"
        yield is_keys, f"{tile.n} keys of a step must be a multiple of {depth}, at most {MOST}"
        yield all(count.bit_count() == 1 for count in stages), f"numbers of stages {stages} must be powers of two"
        fit = all(count % 8 == 0 and 24 <= count <= 256 for count in registers)
        yield fit, f"registers of a thread {registers} must be multiples of 8 from 24 to 256 (setmaxnreg)"
        launched = self.launch_registers * WARPGROUP * len(registers)
        asked = WARPGROUP * sum(registers)
        yield asked <= launched, f"{asked} registers asked for, {launched} at launch: the kernel would hang"
        has_boxes = self.kv_fetch is KvFetch.PAGE_BOXES
        divides = has_boxes == bool(self.box_rows) and not (has_boxes and tile.n % self.box_rows)
        yield divides, f"box_rows={self.box_rows} does not go with {tile.n} keys a step"

    def __post_init__(self) -> None:
        for holds, message in self.constraints():
            if not holds:
                raise ValueError(f"{self.name}: {message}")


class TileShape(NamedTuple):
    """Numbers of heads, and of tokens of each head, that share the rows of a query tile."""

    heads: Any  # an int, or an Int32 in a kernel for any number of heads
    tokens: Any  # of each head

    @staticmethod
    def of(heads: Any, tile_m: int) -> TileShape:
        """Give whole swizzle atoms of rows to each head; some of the tile's rows may be unused."""
        return TileShape(heads, tile_m // heads // MIN_BOX_ROWS * MIN_BOX_ROWS)


def kv_fetch(problem: AttentionProblem, tile_n: int) -> tuple[KvFetch, int]:
    """Return the way to fetch K and V, and the tokens of a TMA box."""
    if problem.page_table is None:
        return KvFetch.CONTIGUOUS, 0
    rows = math.gcd(problem.key.shape[2], tile_n)
    box_rows = min(rows & -rows, MAX_BOX_ROWS)
    if box_rows < MIN_BOX_ROWS or not all(_has_slots(view) for view in (problem.key, problem.value)):
        return KvFetch.PAGE_ROWS, 0
    return KvFetch.PAGE_BOXES, box_rows


def has_uneven_pages(problem: AttentionProblem) -> bool:
    """Whether the page size is not a power of two."""
    size = problem.key.shape[2]
    return (problem.page_table is not None or problem.token_table is not None) and size & (size - 1) != 0


def _has_slots(view: torch.Tensor) -> bool:
    """Whether the page stride is a multiple of the head stride, as TMA boxes over all columns need (5 dimensions)."""
    page, head = page_and_head_stride(view)
    return 0 < head <= page and page % head == 0


def page_and_head_stride(view: torch.Tensor) -> tuple[int, int]:
    """Return the page and head strides of a [pages, heads, rows, dim] view in elements.

    A dimension of size 1 gets the stride of a contiguous view.
    """
    pages, heads, rows, _ = view.shape
    page, head, row, _ = view.stride()
    if heads == 1:
        head = page if pages > 1 else rows * row
    if pages == 1:
        page = heads * head
    return page, head


def head_scales(problem: AttentionProblem) -> tuple[bool, bool]:
    """Return whether the softmax scale, and the output scale, has one value for each KV head."""
    return has_head_scales(problem.softmax_scale), has_head_scales(problem.output_scale)


def has_head_scales(scale: float | torch.Tensor) -> bool:
    """Return whether a scale has one value for each KV head."""
    return isinstance(scale, torch.Tensor) and scale.numel() > 1


def require_dtypes(
    problem: AttentionProblem,
    out_dtype: torch.dtype,
    arch: str,
    kv_type: KvType = KvType.WIDE,
    *,
    queries: Iterable[torch.dtype] = DTYPES,
    outputs: Iterable[torch.dtype] = DTYPES,
) -> None:
    """Refuse other dtypes of query and output than these, and K and V that have neither the queries' dtype nor
    ``kv_type``."""
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


def dims_names(head_dims: Iterable[tuple[int, int]]) -> str:
    """Return head dims (QK, V) as messages name them."""
    return ", ".join(f"{qk}/{v}" for qk, v in head_dims)


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Return the dtypes as messages name them."""
    return ", ".join(map(str, dtypes))


def paged_fetches(tile_n: int) -> list[tuple[KvFetch, int]]:
    """Return every way to fetch pages in steps of ``tile_n`` keys, with the tokens of a TMA box."""
    boxes = [rows for rows in (8, 16, 32, 64) if tile_n % rows == 0]
    return [(KvFetch.PAGE_ROWS, 0), *((KvFetch.PAGE_BOXES, rows) for rows in boxes)]
