"""Capabilities of each entry point by architecture: one table for the argument checks and for the documents.

A row is a title and its sample problems (``samples.py``). An architecture has a row if its implementation in
``registry.py`` refuses none of them. A call needs the rows whose samples match its problem. An entry calls
:func:`lacking` after its other checks, so that a refusal comes before any launch and names the feature.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hopwell.kernels import hardware, registry
from hopwell.kernels.append.config import CacheType
from hopwell.kernels.capability import gpu_runs, samples
from hopwell.kernels.capability.gpu_runs import MISSING
from hopwell.kernels.capability.samples import FP8, INT8, UINT8
from hopwell.kernels.masks import MaskKind
from hopwell.kernels.problem import AttentionProblem
from hopwell.kernels.support import (
    APPEND,
    ARCHS,
    COMMON_HEAD_DIMS,
    CONTEXT,
    CUDNN,
    DECODE_HEAD_DIMS,
    DECODE_NVFP4_HEAD_DIMS,
    FMHA_V2,
    MLA,
    MLA_HEAD_DIMS,
    NVFP4_HEAD_DIMS,
    OTHER_HEAD_DIMS,
    PREFILL_HEAD_DIMS,
    SAME_AS,
    XQA,
)


@dataclass(frozen=True)
class Feature:
    """One row of the table. A refusal offers the supported features of the same ``kind`` instead.

    Attributes:
        key: identifier of the row.
        kind: "data types", "masks" and so on.
        title: text of the row and of refusals.
        sample: function that turns a case into the sample problem of a call with the feature.
        cases: arguments of ``sample``; all need kernels. A row without cases is for calls that no other row covers.
        is_asked: whether a problem needs the row.
    """

    key: str
    kind: str
    title: str
    sample: Callable[..., Any]
    cases: tuple[dict[str, Any], ...]
    is_asked: Callable[[Any], bool]

    @functools.cached_property
    def archs(self) -> tuple[str, ...]:
        """Architectures that have kernels for all cases."""
        problems = self._problems
        return tuple(arch for arch in ARCHS if problems and not any(refuse(one, arch) for one in problems))

    @property
    def short_title(self) -> str:
        """Title without the name of its kind: "64" for "head dim 64"."""
        return re.sub("(head dim|page size):? ", "", self.title)

    @property
    def _problems(self) -> list[Any]:
        return [self.sample(**case) for case in self.cases]

    def marks(self, arch: str) -> tuple[str, ...]:
        """Return a mark and the matrix instruction for each kernel that serves the cases on ``arch``."""
        if arch not in self.archs:
            return ()
        return tuple(dict.fromkeys(_mark(self.key, one, arch) for one in self._problems))


def refuse(problem: Any, arch: str) -> str | None:
    """Return the reason why an entry finds no kernel for ``problem``, or None if there is a kernel."""
    return registry.refuse(as_launched(problem, arch), arch)


def as_launched(problem: Any, arch: str) -> Any:
    """Return the problem as an entry launches it: it casts queries that no kernel takes as they are."""
    if not isinstance(problem, AttentionProblem):  # an append has no queries
        return problem
    dtype = registry.query_dtype(problem.family, arch, problem.query.dtype, problem.key.dtype)
    return problem if problem.query.dtype == dtype else replace(problem, query=problem.query.to(dtype))


@dataclass(frozen=True)
class Entry:
    """An entry point: its module and its features."""

    module: str
    features: tuple[Feature, ...]

    def feature(self, key: str) -> Feature:
        """Return the feature with this key."""
        return next(feature for feature in self.features if feature.key == key)


def _joined(dims: tuple[tuple[int, int], ...]) -> str:
    return "head dim " + ", ".join(str(qk) if qk == v else f"{qk}/{v}" for qk, v in sorted(dims))


def _over(name: str, values: Any, **others: Any) -> list[dict[str, Any]]:
    """Return a case for each value of an argument."""
    return [{name: value, **others} for value in values]


@dataclass(frozen=True)
class _Rows:
    """Factory of the rows of a family of kernels, whose sample problems ``sample`` creates."""

    sample: Callable[..., Any]

    def row(
        self, key: str, kind: str, title: str, *cases: dict[str, Any], shown: dict[str, Any] | None = None
    ) -> Feature:
        """Return a row; a problem needs it if it matches all arguments of one case, or of ``shown`` if given."""
        cases = cases or ({},)
        signs = cases if shown is None else (shown,)
        return Feature(
            key, kind, title, self.sample, cases, lambda problem: any(samples.has(problem, one) for one in signs)
        )

    def no_row(
        self, key: str, kind: str, title: str, *beside: Feature, shown: Sequence[dict[str, Any]] = ({},)
    ) -> Feature:
        """Return a row that no architecture has.

        A problem needs it if it matches one case of ``shown`` and needs none of the rows ``beside``.
        """

        def is_asked(problem: Any) -> bool:
            return any(samples.has(problem, one) for one in shown) and not any(row.is_asked(problem) for row in beside)

        return Feature(key, kind, title, self.sample, (), is_asked)

    def mask(self, mask: MaskKind, note: str = "", **case: Any) -> Feature:
        """Return the row of a mask, with a note on the argument that selects it."""
        rule = mask.rule
        return self.row(rule.feature, "masks", rule.title + note, dict(mask=mask, **case))

    @property
    def page_sizes(self) -> Feature:
        """Row of page sizes."""
        return self.row("page_size", "page sizes", "page size: any", *_over("page_size", _PAGE_SIZES))

    @property
    def sinks(self) -> Feature:
        """Row of sinks."""
        return self.row("sinks", "extras", "attention sinks", dict(sinks=samples.SINKS))

    @property
    def tensor_scales(self) -> Feature:
        """Row of scales as device tensors."""
        return self.row("tensor_scales", "extras", "scales as device tensors", dict(tensor_scales=True))

    def head_scales(self, of: str, *cases: dict[str, Any]) -> Feature:
        """Return the row of scales of each KV head, with the data that they scale."""
        asked: dict[str, Any] = dict(head_scales=True)
        scaled = [case | asked for case in cases]
        return self.row("head_scales", "extras", f"scales of each KV head of {of}", *scaled, shown=asked)

    def with_others(self, *known: Feature) -> tuple[Feature, ...]:
        """Return the rows of head dims, and a row for all other head dims."""
        return *known, self.no_row("other_head_dim", "head dims", "other head dims", *known)


_PAGE_SIZES = (1, 3, 16, 1056)  # both ways to fetch, and a page larger than a TMA box can be
_PREFILL, _DECODE, _MLA, _APPEND = (
    _Rows(sample) for sample in (samples.prefill, samples.decode, samples.mla, samples.append)
)
_BYTES_IN: dict[str, Any] = dict(query=FP8, kv=FP8)  # 8-bit operands of prefill and MLA

_16BIT = _PREFILL.row("16bit", "data types", "bf16 or fp16 query, KV and output")
_FP8 = _PREFILL.row("fp8", "data types", "fp8 (e4m3) query and KV", _BYTES_IN, shown=dict(query=FP8))
_FP8_OUT = _PREFILL.row(
    "fp8_out", "data types", "fp8 (e4m3) output", dict(out=FP8), dict(out=FP8, **_BYTES_IN), shown=dict(out=FP8)
)
_SKIP_SOFTMAX = _PREFILL.row("skip_softmax", "extras", "skip-softmax", dict(skip_softmax=1.0))
_PREFILL_HEAD_DIMS = (
    *_PREFILL.with_others(
        _PREFILL.row(
            "head_dim",
            "head dims",
            f"{_joined(COMMON_HEAD_DIMS)} (QK/V where they differ)",
            *_over("dims", COMMON_HEAD_DIMS),
        ),
        _PREFILL.row(
            "multiple_head_dim",
            "head dims",
            "head dim: other multiples of 8 up to 256",
            *_over("dims", (dims for dims in OTHER_HEAD_DIMS if max(dims) <= 256)),
        ),
        _PREFILL.row("large_head_dim", "head dims", "head dim 512", dict(dims=(512, 512))),
    ),
    _PREFILL.row(
        "8bit_head_dim",
        "head dims",
        "with fp8 query or KV: the same head dims",
        *_over("dims", PREFILL_HEAD_DIMS, **_BYTES_IN),
        *_over("dims", PREFILL_HEAD_DIMS, kv=FP8),
    ),
)
_PREFILL_NVFP4_HEAD_DIMS = _PREFILL.row(
    "nvfp4_head_dim",
    "head dims",
    f"with NVFP4 caches: {_joined(NVFP4_HEAD_DIMS)}",
    *_over("dims", NVFP4_HEAD_DIMS, kv=UINT8),
)
# The entry refuses other sizes with interleaved scales before a problem exists.
_PREFILL_NVFP4_PAGE_SIZES = _PREFILL.row(
    "nvfp4_page_size",
    "page sizes",
    "with NVFP4 caches and interleaved V scales: page size: multiples of 4",
    *_over("page_size", (4, 12, 1056), kv=UINT8),
)
_DECODE_MULTIPLES = tuple((qk, v) for qk, v in DECODE_HEAD_DIMS if qk == v <= 256)
(_NARROWER_V,) = ((qk, v) for qk, v in DECODE_HEAD_DIMS if qk != v)
_DECODE_UNEQUAL, _DECODE_LARGE = (
    [dict(dims=dims), *_over("kv", (FP8, INT8), dims=dims)] for dims in (_NARROWER_V, (512, 512))
)
_DECODE_NVFP4_HEAD_DIMS = _DECODE.row(
    "nvfp4_head_dim",
    "head dims",
    f"with NVFP4 caches: {_joined(DECODE_NVFP4_HEAD_DIMS)}",
    *_over("dims", DECODE_NVFP4_HEAD_DIMS, kv=UINT8),
)
_DECODE_KNOWN_HEAD_DIMS = (
    _DECODE.row("head_dim", "head dims", "head dim: multiples of 16 up to 256", *_over("dims", _DECODE_MULTIPLES)),
    _DECODE.row("unequal_head_dim", "head dims", f"{_joined((_NARROWER_V,))} (QK/V)", *_DECODE_UNEQUAL),
    _DECODE.row("large_head_dim", "head dims", "head dim 512", *_DECODE_LARGE),
)
_NVFP4_APPEND = _over("kind", (CacheType.NVFP4, CacheType.NVFP4_INTERLEAVED))
_MLA_HEAD_DIMS = _MLA.row("head_dim", "head dims", f"{_joined(MLA_HEAD_DIMS)} (QK/V)", *_over("dims", MLA_HEAD_DIMS))
_MLA_SPARSE_HEAD_DIM = _MLA.row(
    "sparse_head_dim",
    "head dims",
    "with sparse top-k head dim 512 as well",
    dict(dims=(512, 512), sparse=True),
)

ENTRIES: dict[str, Entry] = {
    CONTEXT: Entry(
        "hopwell.prefill",
        (
            _16BIT,
            _PREFILL.row("fp8_kv", "data types", "fp8 (e4m3) KV cache with a bf16 or fp16 query", dict(kv=FP8)),
            _FP8,
            _PREFILL.row("nvfp4_kv", "data types", "NVFP4 KV cache", dict(kv=UINT8)),
            _Rows(samples.prefill_with_linear_v_scales).row(
                "linear_v_scales",
                "data types",
                "NVFP4 KV cache with linear V scales (`v_scale_layout`)",
                shown=dict(kv=UINT8, linear_v_scales=True),
            ),
            _FP8_OUT,
            _PREFILL.row(
                "nvfp4_out",
                "data types",
                "NVFP4 output",
                dict(out=UINT8),
                dict(out=UINT8, **_BYTES_IN),
                shown=dict(out=UINT8),
            ),
            *_PREFILL_HEAD_DIMS,
            _PREFILL_NVFP4_HEAD_DIMS,
            _PREFILL.no_row(
                "other_nvfp4_head_dim",
                "head dims",
                "other head dims with NVFP4 caches",
                _PREFILL_NVFP4_HEAD_DIMS,
                shown=[dict(kv=UINT8)],
            ),
            _PREFILL.page_sizes,
            _PREFILL_NVFP4_PAGE_SIZES,
            # All caches become views of the same problem: kernels know strides and tables, not layouts.
            _PREFILL.row("cache", "KV caches", "HND and NHD, stacked and separate, shared and separate page ids"),
            _PREFILL.mask(MaskKind.CAUSAL),
            _PREFILL.mask(MaskKind.FULL, " (`causal=False`)"),
            _PREFILL.mask(MaskKind.SLIDING_WINDOW),
            _PREFILL.mask(MaskKind.LOCAL, " (`window_right`)"),
            _PREFILL.sinks,
            _PREFILL.tensor_scales,
            _PREFILL.head_scales("an fp8 or NVFP4 cache", *_over("kv", (FP8, UINT8)), _BYTES_IN),
            _SKIP_SOFTMAX,
            _PREFILL.row("lse", "extras", "log-sum-exp, base 2 or e", dict(lse=True)),
            # No problem can need these two rows.
            _PREFILL.no_row("fp16_softmax", "extras", "softmax in fp16 (`use_fp16_softmax`)", shown=()),
            _PREFILL.no_row("spcompress", "extras", "`uses_spcompress`", shown=()),
        ),
    ),
    FMHA_V2: Entry(
        "hopwell.prefill",
        (
            _16BIT,
            _FP8,
            _FP8_OUT,
            *_PREFILL_HEAD_DIMS,
            _PREFILL.page_sizes,
            _PREFILL.row("cache", "KV caches", "all five input layouts"),
            _PREFILL.mask(MaskKind.CAUSAL),
            _PREFILL.mask(MaskKind.FULL, " (`padding`)"),
            _PREFILL.mask(MaskKind.SLIDING_WINDOW),
            _PREFILL.mask(MaskKind.LOCAL, " (`window_right`)"),
            _PREFILL.mask(MaskKind.CHUNKED),
            _PREFILL.sinks,
            _PREFILL.row("alibi", "extras", "ALiBi", dict(alibi=True)),
            _PREFILL.row("alibi_soft_cap", "extras", "ALiBi together with a soft cap", dict(alibi=True, soft_cap=30.0)),
            _PREFILL.row("soft_cap", "extras", "logits soft cap", *_over("soft_cap", (30.0, 1e6))),
            _PREFILL.row("softmax_stats", "extras", "softmax statistics", dict(statistics=True)),
            _SKIP_SOFTMAX,
        ),
    ),
    CUDNN: Entry(
        "hopwell.prefill",
        (
            _16BIT,
            _FP8,
            _FP8_OUT,
            *_PREFILL_HEAD_DIMS,
            _PREFILL.page_sizes,
            _PREFILL.row("cache", "KV caches", "paged and ragged KV, element offsets"),
            _PREFILL.mask(MaskKind.CAUSAL),
            _PREFILL.mask(MaskKind.FULL),
            _PREFILL.row("lse", "extras", "log-sum-exp, padded or ragged, base 2 or e", dict(lse=True)),
            _PREFILL.row(
                "fp8_scales",
                "extras",
                "scales of fp8 inputs (`q_scale`, `k_scale`, `v_scale`)",
                dict(tensor_scales=True, **_BYTES_IN),
                shown=dict(tensor_scales=True),
            ),
            _PREFILL.head_scales("fp8 inputs", _BYTES_IN),
        ),
    ),
    XQA: Entry(
        "hopwell.decode",
        (
            _DECODE.row("16bit", "data types", "bf16 or fp16 query, KV and output"),
            _DECODE.row("fp8_kv", "data types", "fp8 (e4m3) KV cache", dict(kv=FP8)),
            _DECODE.row("int8_kv", "data types", "int8 KV cache", dict(kv=INT8)),
            _DECODE.row("nvfp4_kv", "data types", "NVFP4 KV cache", dict(kv=UINT8)),
            _DECODE.row(
                "fp8",
                "data types",
                "fp8 (e4m3) query with an fp8 or NVFP4 KV cache (`trtllm_batch_decode_with_kv_cache`)",
                *_over("kv", (FP8, UINT8), query=FP8),
                shown=dict(query=FP8),
            ),
            _DECODE.row(
                "fp8_out",
                "data types",
                "fp8 (e4m3) output with an fp8 or NVFP4 KV cache",
                dict(kv=FP8, out=FP8),
                shown=dict(out=FP8),
            ),
            *_DECODE_KNOWN_HEAD_DIMS,
            _DECODE_NVFP4_HEAD_DIMS,
            _DECODE.no_row(
                "other_nvfp4_head_dim",
                "head dims",
                "other head dims with NVFP4 caches",
                _DECODE_NVFP4_HEAD_DIMS,
                shown=[dict(kv=UINT8)],
            ),
            _DECODE.no_row("other_head_dim", "head dims", "other head dims", *_DECODE_KNOWN_HEAD_DIMS),
            _DECODE.page_sizes,
            _DECODE.row("cache", "KV caches", "HND and NHD, stacked, separate, K and V the same data"),
            _DECODE.mask(MaskKind.DRAFT, q_len=2),
            _DECODE.mask(MaskKind.CYCLIC),
            _DECODE.mask(MaskKind.SLIDING_WINDOW),
            _DECODE.sinks,
            _DECODE.tensor_scales,
            _DECODE.head_scales("an 8-bit or NVFP4 cache", *_over("kv", (FP8, INT8, UINT8))),
        ),
    ),
    MLA: Entry(
        "hopwell.mla",
        (
            _MLA.row("16bit", "data types", "bf16 or fp16 query and cache"),
            _MLA.row("fp8_kv", "data types", "fp8 (e4m3) cache with a bf16 or fp16 query", dict(kv=FP8)),
            _MLA.row("fp8", "data types", "fp8 (e4m3) query and cache", _BYTES_IN, shown=dict(query=FP8)),
            _MLA.row(
                "fp8_ds_mla",
                "data types",
                "cache of 656-byte rows (fp8 with scales, bf16 rotary part)",
                dict(kv=UINT8, row=656),
                shown=dict(kv=UINT8),
            ),
            _MLA_HEAD_DIMS,
            _MLA.no_row("other_head_dim", "head dims", "other head dims", _MLA_HEAD_DIMS, _MLA_SPARSE_HEAD_DIM),
            _MLA_SPARSE_HEAD_DIM,
            _MLA.page_sizes,
            _MLA.row("cache", "KV caches", "3-D and 4-D caches"),
            _MLA.row(
                "multi_token", "masks", "several tokens per request (causal, bottom-right)", *_over("q_len", (2, 32))
            ),
            _MLA.mask(MaskKind.CYCLIC),
            _MLA.row("sparse", "masks", "sparse top-k", dict(sparse=True)),
            _MLA.sinks,
            _MLA.tensor_scales,
        ),
    ),
    APPEND: Entry(
        "hopwell.page",
        (
            _APPEND.row("16bit", "data types", "bf16 or fp16 new tokens, and a cache of their type"),
            _APPEND.row("fp8_kv", "data types", "fp8 (e4m3) cache", dict(kind=CacheType.E4M3)),
            _APPEND.row("nvfp4_kv", "data types", "NVFP4 cache, V scales linear or interleaved", *_NVFP4_APPEND),
            _APPEND.page_sizes,
            _APPEND.row("cache", "KV caches", "HND and NHD, stacked and separate, shared and separate page ids"),
            _APPEND.tensor_scales,
            _APPEND.head_scales("an fp8 or NVFP4 cache", dict(kind=CacheType.E4M3), *_NVFP4_APPEND),
        ),
    ),
}


def table_of(entry: str) -> Entry:
    """Return the table of the entry point ``entry``."""
    return ENTRIES[SAME_AS.get(entry, entry)]


def refusal(entry: str, feature: str, detail: str, arch: str) -> NotImplementedError:
    """Return the error for a call of ``entry`` that needs a ``feature`` without a kernel on ``arch``.

    Args:
        entry: name of the entry point.
        feature: key of the feature in the table.
        detail: the argument and value that need it, for example ``"out_dtype='nvfp4'"``.
        arch: architecture of the call.
    """
    table = table_of(entry)
    row = table.feature(feature)
    here = "; ".join(one.short_title for one in table.features if one.kind == row.kind and arch in one.archs)
    allowed = f"supports these {row.kind}: {here};" if here else f"supports no {row.kind},"
    elsewhere = f"; {row.title}: supported on {', '.join(row.archs)}" if row.archs else ""
    return NotImplementedError(f"{entry} on {arch} {allowed} got {detail}{elsewhere}")


def require(entry: str, feature: str, detail: str, arch: str) -> None:
    """Raise :func:`refusal`'s error unless ``entry`` has ``feature`` on ``arch``."""
    if arch not in table_of(entry).feature(feature).archs:
        raise refusal(entry, feature, detail, arch)


def lacking(entry: str, problem: Any, arch: str) -> Feature | None:
    """Return the first row of ``entry`` that a problem needs and ``arch`` lacks, or None."""
    rows = table_of(entry).features
    return next((row for row in rows if arch not in row.archs and row.is_asked(problem)), None)


def _mark(key: str, problem: Any, arch: str) -> str:
    """Return the mark of a row and the matrix instruction of the kernel that serves its ``problem`` on ``arch``."""
    launched = as_launched(problem, arch)
    instruction = registry.resolve(launched, arch).matrix_instruction
    cast = "" if launched is problem else " (Q cast to 16 bits)"
    return f"{gpu_runs.mark(problem.family, key, arch, instruction)} {instruction}".strip() + cast


def gpus_of(archs: Sequence[str]) -> str:
    """Return the products with these architectures."""
    return ", ".join(gpu for arch in archs for gpu in hardware.ARCHITECTURES[arch].gpus)


def support_matrix() -> str:
    """Return the table in Markdown: for each entry its features as rows and the architectures as columns.

    A cell has a mark and the matrix instruction of the kernels. ● has run on a GPU of the column, ◐ on a Hopper GPU
    (the same source compiled for Hopper), ○ only in the emulator. - has no kernel.
    """
    columns = " | ".join(f"{gpus_of([arch])} ({arch})" for arch in ARCHS)
    sections = []
    for name, entry in ENTRIES.items():
        names = [name, *(other for other, table in SAME_AS.items() if table == name)]
        lines = [
            ", ".join(f"`{entry.module}.{one}`" for one in names),
            "",
            f"| | {columns} |",
            "|---|" + "---|" * len(ARCHS),
        ]
        for row in entry.features:
            cells = (", ".join(row.marks(arch)) or MISSING for arch in ARCHS)
            lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"
