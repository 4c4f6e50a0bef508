"""Which implementation serves a family of kernels on an architecture: the one list of them.

Configs know nothing of the kernels that they describe, and kernels nothing of this list, so that imports have a
direction. What there is to choose from, to refuse and to compile ahead follows from the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hopwell.kernels import append_config, decode_config, mla_config, prefill_config
from hopwell.kernels.prefill_config import PrefillConfig
from hopwell.kernels.problem import AttentionProblem, Family
from hopwell.kernels.sm100_config import Sm100PrefillConfig
from hopwell.kernels.sm120_config import Sm120PrefillConfig
from hopwell.kernels.sm120_decode_config import Sm120DecodeConfig, Sm120MlaConfig
from hopwell.kernels.support import ARCHS, BLACKWELL, HOPPER, SM120

TITLES = {Family.PREFILL: "prefill", Family.DECODE: "decode", Family.MLA: "MLA decode", Family.APPEND: "append"}


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


@dataclass(frozen=True)
class Implementation:
    """The kernels of a family on an architecture.

    Attributes:
        config: the type of their configs.
        resolve: the config for a problem; raises NotImplementedError where no kernel serves it.
        shipped: the configs that are compiled ahead.
        build: the traceable launch function of a config, and example arguments to compile it with.
    """

    config: type[Buildable]
    resolve: Callable[[Any, str], Buildable]
    shipped: Callable[[str], Iterator[Buildable]]
    build: Callable[[Any], tuple[Any, tuple[Any, ...]]]

    def refuse(self, problem: Any, arch: str) -> str | None:
        """Say why no kernel serves ``problem``, or return None where one does."""
        try:
            self.resolve(problem, arch)
        except NotImplementedError as reason:
            return str(reason)
        return None


# The DSL is imported with the kernels, when the first of them is compiled: that takes seconds.
def _build_prefill(config: PrefillConfig) -> tuple[Any, tuple[Any, ...]]:
    from hopwell.kernels.sm90.prefill import build

    return build(config)


def _build_sm100_prefill(config: Sm100PrefillConfig) -> tuple[Any, tuple[Any, ...]]:
    from hopwell.kernels.sm100.prefill import build

    return build(config)


def _build_sm120_prefill(config: Sm120PrefillConfig) -> tuple[Any, tuple[Any, ...]]:
    from hopwell.kernels.sm120.prefill import build

    return build(config)


def _build_decode(config: decode_config.DecodeConfig) -> tuple[Any, tuple[Any, ...]]:
    from hopwell.kernels.sm90 import byte_few_rows, decode, decode_few_rows

    few_rows = byte_few_rows if config.kv_bytes == 1 else decode_few_rows
    return (few_rows if config.has_tree else decode).build(config)


def _build_mla(config: mla_config.MlaConfig) -> tuple[Any, tuple[Any, ...]]:
    from hopwell.kernels.sm90 import byte_mla, byte_mla_few_rows, mla, mla_few_rows

    if config.multiplies_bytes:
        return (byte_mla_few_rows if config.has_tree else byte_mla).build(config)
    return (mla_few_rows if config.has_tree else mla).build(config)


def _build_sm120_decode(config: Sm120DecodeConfig) -> tuple[Any, tuple[Any, ...]]:
    from hopwell.kernels.sm120.decode import build

    return build(config)


def _build_sm120_mla(config: Sm120MlaConfig) -> tuple[Any, tuple[Any, ...]]:
    from hopwell.kernels.sm120.mla import build

    return build(config)


def _build_append(config: append_config.AppendConfig) -> tuple[Any, tuple[Any, ...]]:
    from hopwell.kernels.append import build

    return build(config)


def _prefill(kind: type[PrefillConfig], build: Callable[[Any], tuple[Any, tuple[Any, ...]]]) -> Implementation:
    resolve_kind = functools.partial(prefill_config.resolve_prefill, kind=kind)
    shipped = functools.partial(prefill_config.shipped_prefill_configs, kind=kind)
    return Implementation(kind, resolve_kind, shipped, build)


def _decode(
    kind: type[decode_config.DecodeConfig], build: Callable[[Any], tuple[Any, tuple[Any, ...]]]
) -> Implementation:
    resolve_kind = functools.partial(decode_config.resolve_decode, kind=kind)
    shipped = functools.partial(decode_config.shipped_decode_configs, kind=kind)
    return Implementation(kind, resolve_kind, shipped, build)


def _mla(kind: type[mla_config.MlaConfig], build: Callable[[Any], tuple[Any, tuple[Any, ...]]]) -> Implementation:
    resolve_kind = functools.partial(mla_config.resolve_mla, kind=kind)
    shipped = functools.partial(mla_config.shipped_mla_configs, kind=kind)
    return Implementation(kind, resolve_kind, shipped, build)


_APPEND = Implementation(
    append_config.AppendConfig, append_config.resolve_append, append_config.shipped_append_configs, _build_append
)

IMPLEMENTATIONS: dict[tuple[Family, str], Implementation] = {
    **{(Family.PREFILL, arch): _prefill(PrefillConfig, _build_prefill) for arch in HOPPER},
    **{(Family.PREFILL, arch): _prefill(Sm100PrefillConfig, _build_sm100_prefill) for arch in BLACKWELL},
    **{(Family.PREFILL, arch): _prefill(Sm120PrefillConfig, _build_sm120_prefill) for arch in SM120},
    **{(Family.DECODE, arch): _decode(decode_config.DecodeConfig, _build_decode) for arch in HOPPER},
    **{(Family.DECODE, arch): _decode(Sm120DecodeConfig, _build_sm120_decode) for arch in SM120},
    **{(Family.MLA, arch): _mla(mla_config.MlaConfig, _build_mla) for arch in HOPPER},
    **{(Family.MLA, arch): _mla(Sm120MlaConfig, _build_sm120_mla) for arch in SM120},
    **{(Family.APPEND, arch): _APPEND for arch in ARCHS},
}


def architectures(family: Family) -> tuple[str, ...]:
    """Return the architectures that have kernels of ``family``."""
    return tuple(arch for one, arch in IMPLEMENTATIONS if one is family)


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


def prefill_type(arch: str) -> type[PrefillConfig]:
    """Return the type of the prefill configs of ``arch``.

    Raises:
        NotImplementedError: it has none.
    """
    kind = implementation(Family.PREFILL, arch).config
    assert issubclass(kind, PrefillConfig)
    return kind


def takes_bytes(arch: str) -> bool:
    """Tell whether MLA kernels of ``arch`` multiply e4m3 queries as they are."""
    found = IMPLEMENTATIONS.get((Family.MLA, arch))
    return found is not None and issubclass(found.config, mla_config.MlaConfig) and found.config.takes_bytes


def resolve(problem: AttentionProblem, arch: str) -> Any:
    """Return the config of the kernel that serves ``problem`` on ``arch``.

    Raises:
        NotImplementedError: there is none; the message says what is supported.
        ValueError: the problem lacks the scratch memory that kernels of its family store partial results in.
    """
    if problem.family is not Family.PREFILL and problem.scratch is None:
        raise ValueError(f"a problem of {TITLES[problem.family]} needs scratch, got None")
    return implementation(problem.family, arch).resolve(problem, arch)


def refuse(problem: AttentionProblem, arch: str) -> str | None:
    """Say why no kernel serves ``problem`` on ``arch``, or return None where one does."""
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
