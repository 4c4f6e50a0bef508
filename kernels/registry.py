"""The list of implementations, by kernel family and architecture.

Configs know nothing of the kernels that they describe, and kernels nothing of this list, so that imports have a
direction. The list decides which kernels are chosen, refused and compiled ahead.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from hopwell.kernels.append.config import AppendConfig, resolve_append, shipped_append_configs
from hopwell.kernels.append.geometry import append_geometry
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.decode import DecodeConfig, resolve_decode, shipped_decode_configs
from hopwell.kernels.config.mla import MlaConfig, resolve_mla, shipped_mla_configs
from hopwell.kernels.config.prefill import PrefillConfig, resolve_prefill, shipped_prefill_configs
from hopwell.kernels.config.splitting import TICKETS
from hopwell.kernels.launch.geometry import decode_geometry, host_value, prefill_geometry
from hopwell.kernels.problem import AttentionProblem, Family
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig, resolve_sm100_mla, shipped_sm100_mla_configs
from hopwell.kernels.sm100.prefill.config import Sm100PrefillConfig
from hopwell.kernels.support import ARCHS, BLACKWELL, HOPPER, SM120
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig, Sm120MlaConfig
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig

TITLES = {Family.PREFILL: "prefill", Family.DECODE: "decode", Family.MLA: "MLA decode", Family.APPEND: "append"}

# Makes of a config the traceable launch function, and example arguments to compile it with.
Build = Callable[[Any], tuple[Any, tuple[Any, ...]]]


class Buildable(Protocol):
    """A kernel's config, as far as compiling it goes."""

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
    """The kernels of a family on an architecture.

    Attributes:
        config: the type of their configs; where there are two, of those that serve what the others do not.
        preferred: the types of configs that serve a problem before ``config`` does.
        resolve: the config for a problem; raises NotImplementedError where no kernel serves it.
        shipped: the configs that are compiled ahead.
        build: the traceable launch function of a config, and example arguments to compile it with.
        geometry: run-time sizes and strides of a problem, which the kernel of a config gets as one tuple of integers.
        numbers: floats of a problem that the kernel gets by value, besides the two scales of attention.
        counters: int32 that the kernel finds zero and leaves zero, of a geometry and a config.
        scratch_bytes: bytes of scratch that is enough for any of the kernels, of packed rows, KV heads, output columns,
            keys of a request and multiprocessors.
    """

    config: type[Buildable]
    resolve: Callable[[Any, str], Buildable]
    shipped: Callable[[str], Iterator[Buildable]]
    build: Build
    geometry: Callable[[Any, Any], tuple[int, ...]]
    numbers: Callable[[Any], tuple[float, ...]]
    counters: Callable[[Any, Any], int]
    scratch_bytes: Callable[[int, int, int, int, int], int]
    preferred: tuple[type[Buildable], ...] = ()

    def refuse(self, problem: Any, arch: str) -> str | None:
        """Return why no kernel serves ``problem``, or None if one does."""
        try:
            self.resolve(problem, arch)
        except NotImplementedError as reason:
            return str(reason)
        return None


def _build_in(module: str, config: Any) -> tuple[Any, tuple[Any, ...]]:
    """Build a kernel of one of the modules. The DSL is imported with the first of them: that takes seconds."""
    return importlib.import_module(f"hopwell.kernels.{module}").build(config)


def _build_decode(config: DecodeConfig) -> tuple[Any, tuple[Any, ...]]:
    """Build a Hopper decode kernel. Packed rows are query heads of a KV head times new tokens.

    ==================  ===========================  =======================================================
    cache               packed rows                  module, instruction, partition
    ==================  ===========================  =======================================================
    bf16, fp16          up to 64 (16 beyond d128)    swap_ab: wgmma, stream-K
    bf16, fp16          more, or d512                kernel: wgmma, split-KV
    e4m3, int8, NVFP4   up to 8                      dequant_swap_ab: mma.sync, stream-K
    e4m3, int8          9 to 64, up to d128          dequant_wgmma: wgmma, stream-K
    e4m3, int8          9 to 32, d144 to d256        kernel with dequant_warps: mma.sync, split-KV
    NVFP4               more than 8                  kernel with dequant_warps: mma.sync, split-KV
    e4m3, int8          more than 32, or d512        kernel: dequantized in shared memory, wgmma, split-KV
    ==================  ===========================  =======================================================
    """
    module = "kernel"
    if config.has_tree:
        narrow = "dequant_wgmma" if config.accumulated_levels else "dequant_swap_ab"
        module = narrow if config.dequantizes_in_registers else "swap_ab"
    return _build_in(f"sm90.decode.{module}", config)


def _build_mla(config: MlaConfig) -> tuple[Any, tuple[Any, ...]]:
    if config.has_tree:
        return _build_in("sm90.mla.swap_ab_fp8" if config.uses_fp8_mma else "sm90.mla.swap_ab", config)
    return _build_in("sm90.mla.fp8" if config.uses_fp8_mma else "sm90.mla.kernel", config)


def _no_scratch(rows: int, kv_heads: int, columns: int, capacity: int, sms: int) -> int:
    """Kernels that share no request's keys among CTAs need no scratch."""
    return 0


def _prefill(kind: type[PrefillConfig], build: Build) -> Implementation:
    """Return the prefill implementation whose configs are of ``kind``."""
    return Implementation(
        kind,
        partial(resolve_prefill, kind=kind),
        partial(shipped_prefill_configs, kind=kind),
        build,
        prefill_geometry,
        numbers=lambda problem: (problem.score.soft_cap, problem.skip_softmax),
        counters=lambda sizes, config: TICKETS,
        scratch_bytes=_no_scratch,
    )


def _decode(kind: type[DecodeConfig] | type[MlaConfig], build: Build) -> Implementation:
    """Return the implementation of decode, or of MLA decode, whose configs are of ``kind``."""
    resolve: Callable[..., Buildable]
    shipped: Callable[..., Iterator[Buildable]]
    if issubclass(kind, Sm100MlaConfig):
        resolve, shipped = resolve_sm100_mla, shipped_sm100_mla_configs
    elif issubclass(kind, MlaConfig):
        resolve, shipped = partial(resolve_mla, kind=kind), partial(shipped_mla_configs, kind=kind)
    else:
        resolve, shipped = partial(resolve_decode, kind=kind), partial(shipped_decode_configs, kind=kind)
    return Implementation(
        kind,
        resolve,
        shipped,
        build,
        decode_geometry,
        numbers=lambda problem: (host_value(problem.output_factor),),
        counters=lambda sizes, config: config.counter_ints(sizes.slots),
        scratch_bytes=kind.scratch_bytes,
    )


def _preferring(first: Implementation, then: Implementation, dims: Container[tuple[int, int]] = ()) -> Implementation:
    """Return the implementation that takes the kernels of ``then`` for problems that ``first`` refuses.

    Head dims in ``dims`` are compiled ahead for ``first`` alone.
    """

    def resolve(problem: Any, arch: str) -> Buildable:
        with contextlib.suppress(NotImplementedError):
            return first.resolve(problem, arch)
        return then.resolve(problem, arch)

    def shipped(arch: str) -> Iterator[Buildable]:
        others: Iterator[Any] = then.shipped(arch)
        yield from first.shipped(arch)
        yield from (config for config in others if (config.head_dim_qk, config.head_dim_v) not in dims)

    def build(config: Any) -> tuple[Any, tuple[Any, ...]]:
        return (first if isinstance(config, first.config) else then).build(config)

    def scratch_bytes(*sizes: int) -> int:
        return max(first.scratch_bytes(*sizes), then.scratch_bytes(*sizes))

    return replace(
        then,
        resolve=resolve,
        shipped=shipped,
        build=build,
        scratch_bytes=scratch_bytes,
        preferred=(first.config,),
    )


def _served(family: Family, by_archs: dict[Sequence[str], Implementation]) -> dict[tuple[Family, str], Implementation]:
    """Return the implementations of a family, by family and architecture."""
    return {(family, arch): made for archs, made in by_archs.items() for arch in archs}


_WARP_PREFILL = _prefill(Sm120PrefillConfig, partial(_build_in, "warp_mma.prefill.kernel"))
_BLACKWELL_PREFILL = _prefill(Sm100PrefillConfig, partial(_build_in, "sm100.prefill.kernel"))

_WARP_MLA = _decode(Sm120MlaConfig, partial(_build_in, "warp_mma.mla.kernel"))
_PAIR_MLA = _decode(Sm100MlaConfig, partial(_build_in, "sm100.mla.kernel"))

_APPEND = Implementation(
    AppendConfig,
    resolve_append,
    shipped_append_configs,
    partial(_build_in, "append.kernel"),
    append_geometry,
    numbers=lambda problem: (host_value(problem.k_scale), host_value(problem.v_scale)),
    counters=lambda sizes, config: 0,
    scratch_bytes=_no_scratch,
)

# Kernels of sm_120 multiply with mma.sync, which Blackwell has as well: they serve what it has no others for.
IMPLEMENTATIONS: dict[tuple[Family, str], Implementation] = {
    **_served(
        Family.PREFILL,
        {
            HOPPER: _prefill(PrefillConfig, partial(_build_in, "sm90.prefill.kernel")),
            BLACKWELL: _preferring(_BLACKWELL_PREFILL, _WARP_PREFILL, Sm100PrefillConfig.tiles),
            SM120: _WARP_PREFILL,
        },
    ),
    **_served(
        Family.DECODE,
        {
            HOPPER: _decode(DecodeConfig, _build_decode),
            (*BLACKWELL, *SM120): _decode(Sm120DecodeConfig, partial(_build_in, "warp_mma.decode.kernel")),
        },
    ),
    **_served(
        Family.MLA,
        {
            HOPPER: _decode(MlaConfig, _build_mla),
            BLACKWELL: _preferring(_PAIR_MLA, _WARP_MLA),
            SM120: _WARP_MLA,
        },
    ),
    **_served(Family.APPEND, {ARCHS: _APPEND}),
}


def architectures(family: Family) -> tuple[str, ...]:
    """Return the architectures that have kernels of ``family``."""
    return tuple(arch for arch in ARCHS if (family, arch) in IMPLEMENTATIONS)


def implementation(family: Family, arch: str) -> Implementation:
    """Return the implementation of ``family`` on ``arch``.

    Raises:
        NotImplementedError: there is none.
    """
    found = IMPLEMENTATIONS.get((family, arch))
    if found is None:
        raise NotImplementedError(
            f"there is no {TITLES[family]} kernel for {arch}; supported: {', '.join(architectures(family))}"
        )
    return found


def prefill_type(arch: str, dims: tuple[int, int] | None = None, kv_type: KvType = KvType.WIDE) -> type[PrefillConfig]:
    """Return the type of the prefill configs of ``arch`` that serve head dims (QK, V) with K and V of ``kv_type``.
    Without ``dims``, return the type that serves the rest.

    Raises:
        NotImplementedError: there is none.
    """
    found = implementation(Family.PREFILL, arch)
    for kind in found.preferred:
        assert issubclass(kind, PrefillConfig)
        if dims in kind.all_tiles() and kv_type in kind.kv_types:
            return kind
    assert issubclass(found.config, PrefillConfig)
    return found.config


def _says(family: Family, arch: str, fact: str) -> bool:
    """Tell whether there are kernels of ``family`` on ``arch`` of which the type of their configs says ``fact``."""
    found = IMPLEMENTATIONS.get((family, arch))
    return found is not None and bool(getattr(found.config, fact))


def can_dequantize_q(arch: str) -> bool:
    """Tell whether prefill kernels of ``arch`` over NVFP4 caches take e4m3 queries, which they dequantize
    themselves."""
    return _says(Family.PREFILL, arch, "can_dequantize_q")


def has_fp8_mma(arch: str) -> bool:
    """Tell whether all MLA kernels of ``arch`` multiply e4m3 queries as they are."""
    return _says(Family.MLA, arch, "has_fp8_mma")


def may_have_fp8_mma(arch: str) -> bool:
    """Tell whether some MLA kernels of ``arch`` multiply e4m3 queries as they are: all, or those for some problems."""
    found = IMPLEMENTATIONS.get((Family.MLA, arch))
    kinds = () if found is None else (found.config, *found.preferred)
    return any(getattr(kind, "has_fp8_mma", False) for kind in kinds)


def scratch_bytes(family: Family, arch: str, *sizes: int) -> int:
    """Return the scratch of the kernels of ``family`` on ``arch``, see :class:`Implementation`; 0 without kernels."""
    found = IMPLEMENTATIONS.get((family, arch))
    return 0 if found is None else found.scratch_bytes(*sizes)


def resolve(problem: AttentionProblem, arch: str) -> Any:
    """Return the config of the kernel that serves ``problem`` on ``arch``.

    Raises:
        NotImplementedError: there is none; the message lists the supported ones.
        ValueError: the problem lacks the scratch memory that kernels of its family store partial results in.
    """
    if problem.family is not Family.PREFILL and problem.scratch is None:
        raise ValueError(f"a problem of {TITLES[problem.family]} needs scratch, got None")
    return implementation(problem.family, arch).resolve(problem, arch)


def refuse(problem: AttentionProblem, arch: str) -> str | None:
    """Return why no kernel serves ``problem`` on ``arch``, or None if one does."""
    try:
        return implementation(problem.family, arch).refuse(problem, arch)
    except NotImplementedError as reason:
        return str(reason)


def shipped_configs(arch: str = "sm_90a", family: Family = Family.PREFILL) -> Iterator[Any]:
    """Return the configs of ``family`` that are compiled ahead for ``arch``; none where it has no kernels of the
    family."""
    found = IMPLEMENTATIONS.get((family, arch))
    return iter(()) if found is None else found.shipped(arch)


def build(config: Buildable) -> tuple[Any, tuple[Any, ...]]:
    """Return the traceable launch function of a kernel, and example arguments to compile it with."""
    return implementation(config.family, config.arch).build(config)
