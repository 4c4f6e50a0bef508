"""The list of implementations, by kernel family and architecture, in order of preference.

Configs know nothing of the kernels that they describe, and kernels nothing of this list, so that imports have a
direction. The list decides which kernels are chosen, refused and compiled ahead.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch

from hopwell.kernels.append.config import AppendConfig, resolve_append, shipped_append_configs
from hopwell.kernels.append.geometry import append_geometry, append_operands
from hopwell.kernels.config.base import Traits
from hopwell.kernels.config.decode import DecodeConfig, resolve_decode, shipped_decode_configs
from hopwell.kernels.config.mla import MlaConfig, resolve_mla, shipped_mla_configs
from hopwell.kernels.config.prefill import PrefillConfig, resolve_prefill, shipped_prefill_configs
from hopwell.kernels.config.splitting import ROWS, TICKETS, LaunchSizes
from hopwell.kernels.launch.geometry import decode_geometry, host_value, prefill_geometry
from hopwell.kernels.launch.operands import decode_operands, prefill_operands
from hopwell.kernels.problem import AttentionProblem, Family
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig, Sm100SwapABMlaConfig
from hopwell.kernels.sm100.prefill.config import Sm100PrefillConfig
from hopwell.kernels.support import ARCHS, BLACKWELL, HOPPER, SM120, TYPES_16BIT
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig, Sm120MlaConfig
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig

TITLES = {Family.PREFILL: "prefill", Family.DECODE: "decode", Family.MLA: "MLA decode", Family.APPEND: "append"}

# Makes of a config the traceable launch function, and example arguments to compile it with.
Build = Callable[[Any], tuple[Any, tuple[Any, ...]]]


class Buildable(Protocol):
    """The properties of a kernel's config that its compilation needs."""

    family: ClassVar[Family]

    @property
    def arch(self) -> str:
        """Return the architecture that the kernel was written for."""
        ...

    @property
    def target(self) -> str:
        """Return the architecture that the kernel is compiled for."""
        ...

    @property
    def name(self) -> str:
        """Return the key of the compiled kernel: canonical and unique, a valid C identifier and file name."""
        ...

    @property
    def matrix_instruction(self) -> str:
        """Return the matrix instruction of its products, empty without products."""
        ...


@dataclass(frozen=True)
class Implementation:
    """Kernels of a family on an architecture, with configs of one type. ``config.refusal`` tells which problems they
    serve: resolve and the shipped configs follow from it.

    Attributes:
        config: the type of their configs.
        resolve: the config for a problem; raises NotImplementedError where no kernel serves it.
        shipped: the configs that are compiled ahead, of an architecture, operand types and the types of preferred
            configs. They serve problems that no preferred kernel serves. Operand types are ``support.PREFILL_TYPES``.
        build: the traceable launch function of a config, and example arguments to compile it with.
        query_dtype: the dtype in which kernels take queries, of the dtypes of a caller's queries and of K and V.
        operands: the tensors whose addresses the kernel gets, by name and in their order, of a problem, and of the
            output of attention.
        geometry: run-time sizes and strides of a problem, which the kernel of a config gets as one tuple of integers.
        numbers: floats of a problem that the kernel gets by value, besides the two scales of attention.
        counters: int32 that the kernel finds zero and leaves zero, of a geometry and a config.
        scratch_bytes: bytes of scratch that is enough for any of the kernels, of a launch's sizes; None if they need
            none.
    """

    config: type[Buildable]
    resolve: Callable[[Any, str], Buildable]
    shipped: Callable[[str, str, Sequence[Any]], Iterator[Buildable]]
    build: Build
    query_dtype: Callable[[torch.dtype, torch.dtype], torch.dtype]
    operands: Callable[..., Mapping[str, torch.Tensor | None]]
    geometry: Callable[[Any, Any], tuple[int, ...]]
    numbers: Callable[[Any], tuple[float, ...]]
    counters: Callable[[Any, Any], int]
    scratch_bytes: Callable[[LaunchSizes], int] | None


def _build_in(module: str, config: Any) -> tuple[Any, tuple[Any, ...]]:
    """Build a kernel of one of the modules. The DSL is imported with the first of them: that takes seconds."""
    return importlib.import_module(f"hopwell.kernels.{module}").build(config)


def _build_decode(config: DecodeConfig) -> tuple[Any, tuple[Any, ...]]:
    """Build a Hopper decode kernel. Packed rows are query heads of a KV head times new tokens.

    ==================  ===========================  =======================================================
    cache               packed rows                  module, instruction, partition
    ==================  ===========================  =======================================================
    bf16, fp16          any to d128, 16 beyond       swap_ab: wgmma, stream-K
    bf16, fp16          more, or d512                kernel: wgmma, split-KV
    e4m3, int8, NVFP4   up to 8 (16 up to d128)      dequant_swap_ab: mma.sync, stream-K
    e4m3, int8, NVFP4   17 to 32, up to d128         split_keys: wgmma, stream-K
    e4m3, int8, NVFP4   33 and more, up to d128      dequant_wgmma: wgmma, stream-K
    e4m3, int8          9 to 32, d144 to d256        kernel with dequant_warps: mma.sync, split-KV
    NVFP4               more                         kernel with dequant_warps: mma.sync, split-KV
    e4m3, int8          more                         kernel: dequantized in shared memory, wgmma, split-KV
    ==================  ===========================  =======================================================
    """
    module = "kernel"
    if config.has_tree:
        wgmma = "dequant_wgmma" if config.rows == ROWS else "split_keys"
        narrow = wgmma if config.accumulated_levels else "dequant_swap_ab"
        module = narrow if config.dequantizes_in_registers else "swap_ab"
    return _build_in(f"sm90.decode.{module}", config)


def _build_mla(config: MlaConfig) -> tuple[Any, tuple[Any, ...]]:
    if config.has_tree:
        return _build_in("sm90.mla.swap_ab_fp8" if config.uses_fp8_mma else "sm90.mla.swap_ab", config)
    return _build_in("sm90.mla.fp8" if config.uses_fp8_mma else "sm90.mla.kernel", config)


def _prefill(kind: type[PrefillConfig], build: Build) -> Implementation:
    """Return the prefill implementation whose configs are of ``kind``."""
    return Implementation(
        kind,
        partial(resolve_prefill, kind=kind),
        partial(shipped_prefill_configs, kind=kind),
        build,
        kind.query_dtype,
        prefill_operands,
        prefill_geometry,
        numbers=lambda problem: (problem.score.soft_cap, problem.skip_softmax),
        counters=lambda sizes, config: TICKETS,
        scratch_bytes=None,
    )


def _splitting(
    kind: type[DecodeConfig] | type[MlaConfig], resolve: Callable[..., Any], shipped: Callable[..., Any], build: Build
) -> Implementation:
    """Return the implementation of decode, or of MLA decode, whose configs are of ``kind``."""
    return Implementation(
        kind,
        partial(resolve, kind=kind),
        partial(shipped, kind=kind),
        build,
        kind.query_dtype,
        decode_operands,
        decode_geometry,
        numbers=lambda problem: (host_value(problem.output_factor),),
        counters=lambda sizes, config: config.counter_ints(sizes.slots),
        scratch_bytes=kind.scratch_bytes,
    )


def _decode(kind: type[DecodeConfig], build: Build) -> Implementation:
    """Return the decode implementation whose configs are of ``kind``."""
    return _splitting(kind, resolve_decode, shipped_decode_configs, build)


def _mla(kind: type[MlaConfig], build: Build) -> Implementation:
    """Return the MLA implementation whose configs are of ``kind``."""
    return _splitting(kind, resolve_mla, shipped_mla_configs, build)


_HOPPER_PREFILL = _prefill(PrefillConfig, partial(_build_in, "sm90.prefill.kernel"))
_BLACKWELL_PREFILL = _prefill(Sm100PrefillConfig, partial(_build_in, "sm100.prefill.kernel"))
_WARP_PREFILL = _prefill(Sm120PrefillConfig, partial(_build_in, "warp_mma.prefill.kernel"))
_HOPPER_DECODE = _decode(DecodeConfig, _build_decode)
_WARP_DECODE = _decode(Sm120DecodeConfig, partial(_build_in, "warp_mma.decode.kernel"))
_BLACKWELL_DECODE = _decode(Sm100DecodeConfig, partial(_build_in, "sm100.decode.kernel"))
_HOPPER_MLA = _mla(MlaConfig, _build_mla)
_WARP_MLA = _mla(Sm120MlaConfig, partial(_build_in, "warp_mma.mla.kernel"))
_PAIR_MLA = _mla(Sm100MlaConfig, partial(_build_in, "sm100.mla.kernel"))
_BLACKWELL_SWAP_AB_MLA = _mla(Sm100SwapABMlaConfig, partial(_build_in, "sm100.mla.swap_ab"))
_APPEND = Implementation(
    AppendConfig,
    resolve_append,
    lambda arch, types, preferred: shipped_append_configs(arch, types),
    partial(_build_in, "append.kernel"),
    lambda query, kv: query,
    append_operands,
    append_geometry,
    numbers=lambda problem: (host_value(problem.k_scale), host_value(problem.v_scale)),
    counters=lambda sizes, config: 0,
    scratch_bytes=None,
)

# Blackwell has mma.sync as well, so sm_120 kernels serve the problems that its own kernels refuse.
_ROWS: tuple[tuple[Family, Sequence[str], tuple[Implementation, ...]], ...] = (
    (Family.PREFILL, HOPPER, (_HOPPER_PREFILL,)),
    (Family.PREFILL, BLACKWELL, (_BLACKWELL_PREFILL, _WARP_PREFILL)),
    (Family.PREFILL, SM120, (_WARP_PREFILL,)),
    (Family.DECODE, HOPPER, (_HOPPER_DECODE,)),
    (Family.DECODE, BLACKWELL, (_BLACKWELL_DECODE, _WARP_DECODE)),
    (Family.DECODE, SM120, (_WARP_DECODE,)),
    (Family.MLA, HOPPER, (_HOPPER_MLA,)),
    (Family.MLA, BLACKWELL, (_PAIR_MLA, _BLACKWELL_SWAP_AB_MLA)),
    (Family.MLA, SM120, (_WARP_MLA,)),
    (Family.APPEND, ARCHS, (_APPEND,)),
)
# An implementation serves the problems that all implementations before it refuse.
IMPLEMENTATIONS = {(family, arch): found for family, archs, found in _ROWS for arch in archs}


def architectures(family: Family) -> tuple[str, ...]:
    """Return the architectures that have kernels of ``family``."""
    return tuple(arch for arch in ARCHS if (family, arch) in IMPLEMENTATIONS)


def implementations(family: Family, arch: str) -> tuple[Implementation, ...]:
    """Return the implementations of ``family`` on ``arch``, in order of preference.

    Raises:
        NotImplementedError: there is none.
    """
    found = IMPLEMENTATIONS.get((family, arch))
    if found is None:
        raise NotImplementedError(
            f"there is no {TITLES[family]} kernel for {arch}; supported: {', '.join(architectures(family))}"
        )
    return found


def implementation_of(config: Buildable) -> Implementation:
    """Return the implementation that ``config`` belongs to."""
    return next(made for made in implementations(config.family, config.arch) if isinstance(config, made.config))


def prefill_type(arch: str, traits: Traits | None = None) -> type[PrefillConfig]:
    """Return the type of the prefill configs of ``arch`` that serve problems with ``traits``, or the type that serves
    the rest.

    Raises:
        NotImplementedError: there is none.
    """
    kinds: list[Any] = [made.config for made in implementations(Family.PREFILL, arch)]
    chosen = (kind for kind in kinds if traits is not None and kind.refusal(traits, arch) is None)
    return next(chosen, kinds[-1])


@cache
def query_dtype(family: Family, arch: str, query: torch.dtype, kv: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels of ``family`` on ``arch`` take queries of dtype ``query`` over K and V of dtype
    ``kv``. An entry casts queries that no kernel takes as they are."""
    taken = [made.query_dtype(query, kv) for made in IMPLEMENTATIONS.get((family, arch), ())]
    return query if query in taken or not taken else taken[-1]


def scratch_bytes(family: Family, arch: str, sizes: LaunchSizes) -> int:
    """Return the scratch of the kernels of ``family`` on ``arch``, see :class:`Implementation`; 0 without kernels."""
    needed = [made.scratch_bytes for made in IMPLEMENTATIONS.get((family, arch), ())]
    return max((of(sizes) for of in needed if of is not None), default=0)


def resolve(problem: Any, arch: str) -> Any:
    """Return the config of the kernel that serves ``problem`` on ``arch``.

    Raises:
        NotImplementedError: there is none; the message lists the supported ones.
        ValueError: the problem lacks the scratch memory that kernels of its family store partial results in.
    """
    found = implementations(problem.family, arch)
    if any(made.scratch_bytes is not None for made in found) and problem.scratch is None:
        raise ValueError(f"a problem of {TITLES[problem.family]} needs scratch, got None")
    *preferred, rest = found
    for made in preferred:
        with contextlib.suppress(NotImplementedError):
            return made.resolve(problem, arch)
    return rest.resolve(problem, arch)


def refuse(problem: AttentionProblem, arch: str) -> str | None:
    """Return why no kernel serves ``problem`` on ``arch``, or None if one does."""
    try:
        resolve(problem, arch)
    except NotImplementedError as reason:
        return str(reason)
    return None


def shipped_configs(arch: str = "sm_90a", family: Family = Family.PREFILL, types: str = TYPES_16BIT) -> Iterator[Any]:
    """Return the configs of ``family`` with operands of ``types`` that are compiled ahead for ``arch``; none where it
    has no kernels of the family."""
    found = IMPLEMENTATIONS.get((family, arch), ())
    for place, made in enumerate(found):
        yield from made.shipped(arch, types, [preferred.config for preferred in found[:place]])


def build(config: Buildable) -> tuple[Any, tuple[Any, ...]]:
    """Return the traceable launch function of a kernel, and example arguments to compile it with."""
    return implementation_of(config).build(config)
