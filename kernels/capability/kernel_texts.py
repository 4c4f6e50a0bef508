"""Kernels as text, for command lines: the type of the config and its fields, such as
``AppendConfig:arch=sm_90a,dtype=bf16,kind=e4m3``."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Iterator
from typing import Any

from hopwell.kernels import support
from hopwell.kernels.append.config import AppendConfig
from hopwell.kernels.config.base import KernelConfig
from hopwell.kernels.registry import Buildable


def text_of(config: Buildable) -> str:
    """Return the text of a kernel. Fields with their default values are left out."""
    assert dataclasses.is_dataclass(config)
    values = [(field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    shown = [f"{field.name}={_text(value)}" for field, value in values if value != field.default]
    return f"{type(config).__name__}:{','.join(shown)}"


def config_of(text: str) -> Buildable:
    """Return the kernel of a text.

    Raises:
        ValueError: the text is not one that :func:`text_of` returns; the message names the wrong part.
    """
    name, _, fields = text.partition(":")
    kinds = {kind.__name__: kind for kind in (*_subclasses(KernelConfig), AppendConfig)}
    if name not in kinds:
        raise ValueError(f"kernel {text!r}: the type must be one of {', '.join(sorted(kinds))}, got {name!r}")
    types, values = typing.get_type_hints(kinds[name]), {}
    for pair in fields.split(","):
        field, _, value = pair.partition("=")
        if field not in {one.name for one in dataclasses.fields(kinds[name])}:
            raise ValueError(f"kernel {text!r}: {name} has no field {field!r}")
        values[field] = _value(text, field, value, types[field])
    try:
        config = kinds[name](**values)
        known = config.arch in support.ARCHS and bool(config.name)
    except (
        KeyError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:  # a missing field, or no such tile
        raise ValueError(f"kernel {text!r}: there is no such kernel: {error}") from None
    if not known:
        raise ValueError(f"kernel {text!r}: arch must be one of {', '.join(support.ARCHS)}, got {config.arch!r}")
    return config


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _value(text: str, field: str, value: str, kind: Any) -> Any:
    """Return the value of a field of type ``kind``: an enum (or a subclass of it), a bool, an int or a str."""
    if issubclass(kind, enum.Enum):
        members = [member for one in (kind, *_subclasses(kind)) for member in one]
        found = [member for member in members if member.value == value]
        if not found:
            allowed = ", ".join(str(member.value) for member in members)
            raise ValueError(f"kernel {text!r}: {field} must be one of {allowed}, got {value!r}")
        return found[0]
    if kind is str:
        return value
    if not (value.isascii() and value.isdecimal()) or (kind is bool and value not in ("0", "1")):
        raise ValueError(
            f"kernel {text!r}: {field} must be {'0 or 1' if kind is bool else 'an integer'}, got {value!r}"
        )
    return kind(int(value))
