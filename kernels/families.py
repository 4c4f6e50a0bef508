"""Which implementation serves a family of kernels on an architecture: the one list of them.

Configs know nothing of the kernels that they describe, and kernels nothing of this list, so that imports have a
direction. What there is to choose from, to refuse and to compile ahead follows from the list.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from hopwell.kernels.append_config import AppendConfig, resolve_append, shipped_append_configs
from hopwell.kernels.decode_config import DecodeConfig, resolve_decode, shipped_decode_configs
from hopwell.kernels.mla_config import MlaConfig, resolve_mla, shipped_mla_configs
from hopwell.kernels.prefill_config import PrefillConfig, resolve_prefill, shipped_prefill_configs
from hopwell.kernels.problem import AttentionProblem, Family
from hopwell.kernels.sm100_config import Sm100PrefillConfig
from hopwell.kernels.sm120_config import Sm120PrefillConfig
from hopwell.kernels.sm120_decode_config import Sm120DecodeConfig, Sm120MlaConfig
from hopwell.kernels.support import ARCHS, BLACKWELL, HOPPER, SM120

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
    build: Build

    def refuse(self, problem: Any, arch: str) -> str | None:
        """Say why no kernel serves ``problem``, or return None where one does."""
        try:
            self.resolve(problem, arch)
        except NotImplementedError as reason:
            return str(reason)
        return None


def _build_in(module: str, config: Any) -> tuple[Any, tuple[Any, ...]]:
    """Build a kernel of one of the modules. The DSL is imported with the first of them: that takes seconds."""
    return importlib.import_module(f"hopwell.kernels.{module}").build(config)


def _build_decode(config: DecodeConfig) -> tuple[Any, tuple[Any, ...]]:
    few_rows = "byte_few_rows" if config.widens_in_registers else "decode_few_rows"
    return _build_in(f"sm90.{few_rows if config.has_tree else 'decode'}", config)


def _build_mla(config: MlaConfig) -> tuple[Any, tuple[Any, ...]]:
    kind = "byte_mla" if config.multiplies_bytes else "mla"
    return _build_in(f"sm90.{kind}{'_few_rows' if config.has_tree else ''}", config)


# How, in each family, a config of a kind is chosen for a problem, and which configs of a kind are compiled ahead.
_CHOICES: dict[Family, tuple[Callable[..., Buildable], Callable[..., Iterator[Buildable]]]] = {
    Family.PREFILL: (resolve_prefill, shipped_prefill_configs),
    Family.DECODE: (resolve_decode, shipped_decode_configs),
    Family.MLA: (resolve_mla, shipped_mla_configs),
}


def _served(archs: Sequence[str], kind: type[Buildable], build: Build) -> dict[tuple[Family, str], Implementation]:
    """Return the implementation whose configs are of ``kind``, by family and by each of ``archs``."""
    resolve, shipped = _CHOICES[kind.family]
    made = Implementation(kind, partial(resolve, kind=kind), partial(shipped, kind=kind), build)
    return {(kind.family, arch): made for arch in archs}


_APPEND = Implementation(AppendConfig, resolve_append, shipped_append_configs, partial(_build_in, "append"))

IMPLEMENTATIONS: dict[tuple[Family, str], Implementation] = {
    **_served(HOPPER, PrefillConfig, partial(_build_in, "sm90.prefill")),
    **_served(BLACKWELL, Sm100PrefillConfig, partial(_build_in, "sm100.prefill")),
    **_served(SM120, Sm120PrefillConfig, partial(_build_in, "sm120.prefill")),
    **_served(HOPPER, DecodeConfig, _build_decode),
    **_served(SM120, Sm120DecodeConfig, partial(_build_in, "sm120.decode")),
    **_served(HOPPER, MlaConfig, _build_mla),
    **_served(SM120, Sm120MlaConfig, partial(_build_in, "sm120.mla")),
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
    return found is not None and issubclass(found.config, MlaConfig) and found.config.takes_bytes


def is_tiled(family: Family, arch: str) -> bool:
    """Tell whether kernels of ``arch`` for decode or MLA have rows in tiles of few, however many there are."""
    found = IMPLEMENTATIONS.get((family, arch))
    return found is not None and issubclass(found.config, DecodeConfig) and found.config.tiled


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
