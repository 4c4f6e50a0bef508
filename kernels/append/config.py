"""Append problems (new tokens into a paged cache) and the kernel that serves them: pure Python, no GPU, no DSL."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch

from hopwell.kernels import support
from hopwell.kernels.config.base import DTYPES, has_head_scales
from hopwell.kernels.problem import Family, PageTable

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # smaller values may be flushed to 0 in float32


class CacheType(enum.Enum):
    """Forms of the written cache elements."""

    WIDE = "wide"  # the new tokens, unchanged
    E4M3 = "e4m3"
    NVFP4 = "nvfp4"
    NVFP4_INTERLEAVED = "nvfp4_interleaved"  # V's scales are interleaved by four tokens, see layouts/scales.py

    @property
    def is_nvfp4(self) -> bool:
        return self in (CacheType.NVFP4, CacheType.NVFP4_INTERLEAVED)

    @property
    def elements(self) -> int:
        """Elements that a thread processes at a time: 16 bytes of a wide row, a block with one scale, or 16 bytes of
        e4m3."""
        return 8 if self is CacheType.WIDE else 16


@dataclass(frozen=True)
class AppendProblem:
    """Checked new tokens and their destinations.

    Attributes:
        key, value: [tokens, kv_heads, head_dim], with 16-byte aligned rows.
        key_cache, value_cache: canonical views [pages, kv_heads, page_size, stored head_dim].
        key_scales, value_scales: for NVFP4 [pages, kv_heads, page_size, head_dim / 16], else None.
        batch_indices: [tokens], int32, uint32 or int64, like all indices; None if ``positions`` are slots.
        positions: [tokens], positions in requests, or slots of the cache: page * page_size + row. Negative values of
            either tensor are padding.
        page_table: ids of K's and of V's pages: 2-D, or 1-D if ``page_starts`` gives the start of each request; None if
            ``positions`` are slots.
        page_starts: [batch + 1] or None.
        batch: number of requests.
        k_scale, v_scale: divisors before rounding: floats, or float32 on the device, one or one for each KV head.
        kind: form of the written elements.
        programmatic_launch: let this kernel's launch overlap the tail of the preceding kernel (PDL).
    """

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    batch_indices: torch.Tensor | None
    positions: torch.Tensor
    page_table: PageTable | None
    page_starts: torch.Tensor | None
    batch: int
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    kind: CacheType
    programmatic_launch: bool

    family: ClassVar[Family] = Family.APPEND


def pool_distance(key: torch.Tensor, value: torch.Tensor) -> int | None:
    """Return the distance in pages from K's first page to V's first page if both are pages of one pool, else None.

    In one pool, page p of V has the memory of page p + distance of K. The two have memory in common only if they are
    the same page, so a page table can keep keys and values apart.

    Args:
        key: canonical view [pages, kv_heads, page_size, stored head_dim].
        value: the same.
    """
    if not key.numel() or not value.numel():
        return None
    size = key.element_size()
    page = key.stride(0) * size
    inner = zip(key.shape[1:], key.stride()[1:], strict=True)
    filled = (1 + sum((count - 1) * stride for count, stride in inner)) * size
    pages, rest = divmod(value.data_ptr() - key.data_ptr(), max(page, size))
    is_one_pool = key.stride() == value.stride() and key.shape[1:] == value.shape[1:] and not rest
    return pages if is_one_pool and filled <= page else None


class AppendAddresses(NamedTuple):
    """Device addresses in bytes; 0 means absent. Addresses of int64 indices are odd, see ``launch.address_of``."""

    key: int
    value: int
    key_cache: int
    value_cache: int
    key_scales: int
    value_scales: int
    batch_indices: int
    positions: int
    key_table: int  # 0: positions are slots
    value_table: int
    page_starts: int  # 0: the tables have a row for each request
    k_scale: int  # 0: the scale is passed by value
    v_scale: int


class AppendGeometry(NamedTuple):
    """Sizes, and strides in elements."""

    tokens: int
    kv_heads: int
    batch: int
    k_dim: int
    v_dim: int
    page_size: int
    page_shift: int  # log2 of a page size that is a power of two, else -1
    key_table_row: int
    value_table_row: int
    table_width: int  # page ids of a request, or of all requests if page_starts is given
    k_pages: int
    v_pages: int
    key_token: int
    key_head: int
    value_token: int
    value_head: int
    k_page: int
    k_head: int
    k_row: int
    v_page: int
    v_head: int
    v_row: int
    k_scale_page: int
    k_scale_head: int
    k_scale_row: int
    v_scale_page: int
    v_scale_head: int
    v_scale_row: int


@dataclass(frozen=True)
class AppendConfig:
    """Config of an append kernel: everything that changes generated code. Sizes and head dims are run-time arguments.

    ``k_head_scales`` and ``v_head_scales``: whether each KV head has its own scale.
    """

    family: ClassVar[Family] = Family.APPEND
    matrix_instruction: ClassVar[str] = ""  # an append has no matrix product

    arch: str
    dtype: str  # of the new tokens; "16bit" if they are copied
    kind: CacheType
    k_head_scales: bool = field(default=False, kw_only=True)
    v_head_scales: bool = field(default=False, kw_only=True)

    @property
    def target(self) -> str:
        """Architecture that the kernel is compiled for."""
        return support.build_of(self.arch)

    @property
    def name(self) -> str:
        """Key of the compiled kernel: canonical and unique, a valid C identifier and file name."""
        scales = "_k_head_scales" * self.k_head_scales + "_v_head_scales" * self.v_head_scales
        return f"append_{self.arch}_{self.dtype}_{self.kind.value}{scales}"


def _config(arch: str, dtype: str, kind: CacheType) -> AppendConfig:
    return AppendConfig(arch, "16bit" if kind is CacheType.WIDE else dtype, kind)


def resolve_append(problem: AppendProblem, arch: str) -> AppendConfig:
    """Return the append kernel for ``problem`` on ``arch``."""
    config = _config(arch, DTYPES[problem.key.dtype], problem.kind)
    k_scales, v_scales = map(has_head_scales, (problem.k_scale, problem.v_scale))
    return replace(config, k_head_scales=k_scales, v_head_scales=v_scales)


def shipped_append_configs(arch: str = "sm_90a", types: str = support.TYPES_16BIT) -> Iterator[AppendConfig]:
    """Yield the append kernels that are compiled ahead: new tokens have 16 bits, so all go with these ``types``."""
    if types != support.TYPES_16BIT:
        return
    pairs = itertools.product(DTYPES.values(), CacheType)
    yield from dict.fromkeys(_config(arch, dtype, kind) for dtype, kind in pairs)
