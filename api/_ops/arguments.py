"""Arguments of ops: how an entry's argument appears in a schema, and the code that converts between the two.

Schemas have no unions, tuples or Python objects. An argument that is one of several types becomes several arguments of
the op. A cache becomes K and an optional V, and a scale becomes a float and an optional tensor. Integers become SymInt,
so that a graph serves all of their values. Annotations of an entry's signature select the form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from hopwell._calls.launch import halves, single

NONE = inspect.Parameter.empty
PAIR = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class Form(NamedTuple):
    """Form of an argument in a schema.

    ``split`` and ``join`` are Python expressions. ``split`` converts the argument {0} to the op's values, and ``join``
    converts the op's values {0} and {1} back.
    """

    types: tuple[str, ...]
    split: str = "{0}"
    join: str = "{0}"
    parts: tuple[str, ...] = ()  # names of several values, of the argument's name {0}

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the op's arguments."""
        if self.parts:
            return tuple(part.format(name) for part in self.parts)
        # kv_cache becomes k_cache and v_cache
        return (name,)[: len(self.types)] if len(self.types) < 2 else (name.replace("kv", "k"), name.replace("kv", "v"))


OF_VALUE = "{0} if {1} is None else {1}", ("{0}", "{0}_tensor")
DTYPE = Form(("ScalarType?",), "dtype_of({0})")
FORMS = {
    "torch.Tensor": Form(("Tensor",)),
    "torch.Tensor | None": Form(("Tensor?",)),
    "torch.Tensor | list[torch.Tensor] | None": Form(("Tensor?",), "single({0})"),
    PAIR: Form(("Tensor", "Tensor?"), "halves({0})", "joined({0}, {1})"),
    f"{PAIR} | None": Form(("Tensor?", "Tensor?"), "halves({0})", "joined({0}, {1})"),
    f"{PAIR} | tuple[torch.Tensor, torch.Tensor, torch.Tensor]": Form(
        ("Tensor", "Tensor?", "Tensor?"), "split_qkv({0})", "joined_qkv({0}, {1}, {2}, input_layout)", ("q", "k", "v")
    ),
    "float | torch.Tensor": Form(("float", "Tensor?"), "split_value({0}, 1.0)", *OF_VALUE),
    "float | torch.Tensor | None": Form(("float?", "Tensor?"), "split_value({0}, None)", *OF_VALUE),
    "float": Form(("float",)),
    "float | None": Form(("float?",)),
    "int": Form(("SymInt",)),
    "int | None": Form(("SymInt?",)),
    "bool": Form(("bool",)),
    "bool | torch.Tensor": Form(("bool", "Tensor?"), "split_value({0}, True)", *OF_VALUE),
    "bool | None": Form(("bool?",)),
    "str": Form(("str",)),
    "str | None": Form(("str?",)),
    "torch.dtype | None": DTYPE,
    "str | torch.dtype | None": DTYPE,
    "torch.dtype | str | None": DTYPE,
    "object | None": Form((), "none_only('{0}', {0})", "None"),
}
# Arguments whose contents no kernel reads. An op allocates its workspace.
UNREAD = {"workspace_buffer": "workspace", "multi_ctas_kv_counter_buffer": "None"}


def split_value(value: Any, default: Any) -> tuple[Any, torch.Tensor | None]:
    """Return a scale or a flag as a Python value and None, or as an ignored value and a tensor."""
    return (default, value) if isinstance(value, torch.Tensor) else (value, None)


def joined(key: Any, value: Any) -> Any:
    """Return a cache as an entry takes it: one tensor, or a pair of K and V."""
    return key if value is None else (key, value)


def split_qkv(qkv: Any) -> tuple[Any, Any, Any]:
    """Return Q, K and V of any input layout, with None for parts inside another tensor."""
    if not isinstance(qkv, (tuple, list)):
        return qkv, None, None
    if len(qkv) == 3:
        return qkv[0], qkv[1], qkv[2]
    return qkv[0], *halves(qkv[1])


def joined_qkv(q: Any, k: Any, v: Any, input_layout: str) -> Any:
    """Return the tensors of :func:`split_qkv` as the entry takes them for ``input_layout``."""
    if v is None:
        return q if k is None else (q, k)
    return (q, (k, v)) if input_layout.startswith("Q_PAGED") else (q, k, v)


def dtype_of(dtype: Any) -> Any:
    """Return the dtype that a string names. "nvfp4" is none of torch's: its outputs have an op of their own."""
    return None if dtype == "nvfp4" else getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype


def none_only(name: str, value: Any) -> None:
    """Refuse a Python object for an argument that entries take as None only."""
    if value is not None:
        raise ValueError(f"{name} must be None, got an object of type {type(value).__name__}")


class Argument(NamedTuple):
    """An argument of an op. ``default`` is Parameter.empty if there is none."""

    type: str
    name: str
    default: Any


class Signature:
    """The arguments of an entry and of its ops. Arguments that concern results differ between ops and are left out."""

    def __init__(self, function: Callable[..., Any], results: Collection[str] = ()):
        self.parameters = inspect.signature(function).parameters
        self._forms = {
            name: FORMS[parameter.annotation]
            for name, parameter in self.parameters.items()
            if name not in results and name not in UNREAD
        }

    def header(self) -> str:
        """Return the entry's parameters as code. Defaults are literals."""
        parameters = [parameter.replace(annotation=NONE) for parameter in self.parameters.values()]
        return str(inspect.Signature(parameters))

    def arguments(self) -> list[Argument]:
        """Return the arguments of an op.

        All are positional, because torch gives keywords no gradients. An argument keeps its default if all arguments
        behind it have defaults.
        """
        found: list[Argument] = []
        for name, form in reversed(self._forms.items()):
            default = self.parameters[name].default
            if found and found[-1].default is NONE:
                default = NONE
            # Only the first of several values has the entry's default.
            defaults = [default, *(None if default is not NONE else NONE for _ in form.types[1:])]
            parts = zip(form.types, form.names(name), defaults, strict=False)
            found.extend(reversed([Argument(*part) for part in parts]))
        return found[::-1]

    def split(self) -> list[str]:
        """Return lines of code that convert the entry's arguments to the op's."""
        lines = []
        for name, form in self._forms.items():
            targets, value = ", ".join(form.names(name)), form.split.format(name)
            if value != name:
                lines.append(f"{targets} = {value}" if targets else value)
        return lines

    def join(self, results: Mapping[str, str]) -> str:
        """Return the entry's arguments as code: the op's arguments converted back, and ``results``."""
        values = {name: form.join.format(*form.names(name)) for name, form in self._forms.items()}
        values |= {name: value for name, value in UNREAD.items() if name in self.parameters}
        return ", ".join(f"{name}={value}" for name, value in (values | dict(results)).items())


# Functions that the code of forms calls.
CODE = (halves, single, split_value, joined, split_qkv, joined_qkv, dtype_of, none_only)
