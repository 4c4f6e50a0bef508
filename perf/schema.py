"""Reads dataclasses from JSON, and names the field that does not fit."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


def read(kind: type[Kind], raw: Any, where: str) -> Kind:
    """Return ``raw``, parsed JSON, as an object of the dataclass ``kind``. ``where`` names its place in messages.

    Raises:
        ValueError: a field is unknown, missing, or of another type.
    """
    return _read(kind, raw, where)


def _read(kind: Any, raw: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _read_fields(kind, raw, where)
    if origin in (Union, types.UnionType):
        if raw is None and type(None) in arguments:
            return None
        (kind,) = (each for each in arguments if each is not type(None))
        return _read(kind, raw, where)
    if origin in (list, Sequence):
        _expect(raw, (list, tuple), "a list", where)
        return [_read(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(raw)]
    if origin is dict:
        _expect(raw, dict, "an object", where)
        return {name: _read(arguments[1], each, f"{where}[{name!r}]") for name, each in raw.items()}
    _expect(raw, (int, float) if kind is float else kind, kind.__name__, where)
    return raw


def _read_fields(kind: Any, raw: Any, where: str) -> Any:
    _expect(raw, dict, "an object", where)
    known = {one.name: one for one in fields(kind)}
    unknown = raw.keys() - known.keys()
    required = (one.name for one in known.values() if one.default is MISSING and one.default_factory is MISSING)
    missing = [name for name in required if name not in raw]
    for names, fault in ((sorted(unknown), "has unknown fields"), (missing, "lacks")):
        if names:
            raise ValueError(f"{where} {fault} {', '.join(names)}; its fields are {', '.join(known)}")
    hints = get_type_hints(kind)
    return kind(**{name: _read(hints[name], value, f"{where}.{name}") for name, value in raw.items()})


def _expect(raw: Any, kinds: Any, title: str, where: str) -> None:
    if not isinstance(raw, kinds) or (isinstance(raw, bool) and kinds is not bool):
        raise ValueError(f"{where} must be {title}, got {raw!r:.60}")
