"""Ops of an entry, generated from its signature.

An entry has some thirty arguments, and so has each of its ops. Generated code repeats no list of arguments. An op has
two functions:

* The implementation converts the op's arguments to the entry's and calls the entry.
* The fake implementation returns empty results of the right shapes, for compilers and for meta tensors.

One more function, the traced one, has the entry's signature and calls the op that fits. Dynamo traces it in place of
the entry. It has no loops and no tables, so Dynamo adds few guards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hopwell._ops import results
from hopwell._ops.arguments import CODE, NONE, Argument, Signature
from hopwell.utils import FP4Tensor


class Variant(NamedTuple):
    """An op of an entry for one set of results.

    Args:
        suffix: the end of the op's name.
        returned: the results in the schema.
        value: the results as code, of the entry's results {0}; empty if the op returns nothing.
        written: arguments for results to write, in the schema.
        given: arguments of the entry that concern results, as code.
    """

    suffix: str
    returned: str
    value: str
    written: Sequence[str] = ()
    given: Mapping[str, str] = {}


class Entry(NamedTuple):
    """An entry and the ops that are made of it.

    Args:
        function: the entry.
        variants: its ops.
        call: the traced function's call of an op, as code. It may use ``ops``, ``inputs``, all arguments of an op
            without results; ``new``, which allocates results; and the entry's arguments.
        new: returns new results of an op. Parameters of this function and the next are arguments of the op.
        workspace: returns the workspace of a call.
        first: the first line of the traced function, which sees the entry's arguments unchanged.
        aliases: alias annotations of arguments that the ops write.
    """

    function: Callable[..., Any]
    variants: Sequence[Variant]
    call: str
    new: Callable[..., Any] | None = None
    workspace: Callable[..., Any] | None = None
    first: str = ""
    aliases: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def signature(self) -> Signature:
        return Signature(self.function, {name for variant in self.variants for name in variant.given})

    def schema(self, variant: Variant) -> str:
        """Return the schema of an op."""
        inputs = [self._declared(argument) for argument in self.signature.arguments()]
        written = ["*", *variant.written] if variant.written else []
        return f"{self.name}{variant.suffix}({', '.join([*inputs, *written])}) -> {variant.returned}"

    def implementation(self, variant: Variant) -> Callable[..., Any]:
        lines = [f"workspace = {_call('new_workspace', self.workspace)}"] if self.workspace else []
        return self._function(variant, [*lines, f"results = function({self.signature.join(variant.given)})"])

    def fake(self, variant: Variant) -> Callable[..., Any]:
        return self._function(
            variant, [f"results = {_call('allocate', self.new)}"] if self.new and variant.value else []
        )

    def traced(self, ops: results.Ops) -> Callable[..., Any]:
        """Return the function that Dynamo traces in place of the entry."""
        signature = self.signature
        lines = [self.first] if self.first else []
        lines += [*signature.split(), f"inputs = ({', '.join(argument.name for argument in signature.arguments())},)"]
        if self.new and "new" in self.call:
            lines.append(f"new = lambda: {_call('allocate', self.new)}")
        return _compiled(self.name, signature.header(), [*lines, f"return {self.call}"], ops=ops, allocate=self.new)

    def _function(self, variant: Variant, lines: Sequence[str]) -> Callable[..., Any]:
        """Return a function with the op's arguments. Dispatchers leave out values that equal the default."""
        parts = [f"{a.name}" if a.default is NONE else f"{a.name}={a.default!r}" for a in self.signature.arguments()]
        if variant.written:
            parts += ["*", *(text.rpartition(" ")[2] for text in variant.written)]
        returned = [f"return {variant.value.format('results')}"] if variant.value else ["return None"]
        names = dict(function=self.function, allocate=self.new, new_workspace=self.workspace)
        return _compiled(self.name + variant.suffix, f"({', '.join(parts)})", [*lines, *returned], **names)

    def _declared(self, argument: Argument) -> str:
        """Return an argument as in a schema."""
        kind = argument.type
        if argument.name in self.aliases:
            kind = kind.replace("Tensor", f"Tensor({self.aliases[argument.name]}!)")
        if argument.default is NONE:
            return f"{kind} {argument.name}"
        literal = f'"{argument.default}"' if isinstance(argument.default, str) else argument.default
        return f"{kind} {argument.name}={literal}"


def first(found: Any) -> Any:
    """Return the output of a call, which may have a second result beside it."""
    return found[0] if isinstance(found, tuple) else found


def _call(name: str, function: Callable[..., Any] | None) -> str:
    """Return a call of ``function`` under ``name`` as code; arguments have the names of its parameters."""
    assert function is not None
    return f"{name}({', '.join(f'{part}={part}' for part in inspect.signature(function).parameters)})"


CALLS = (results.call, results.call_context, results.call_cudnn, results.call_fmha_v2, results.call_in_place)
NAMES = {function.__name__: function for function in (*CALLS, *CODE, results.is_nvfp4, first, FP4Tensor)}


def _compiled(name: str, header: str, lines: Sequence[str], **names: Any) -> Callable[..., Any]:
    body = "\n    ".join(lines)
    namespace = {**NAMES, **names}
    exec(compile(f"def {name}{header}:\n    {body}\n", f"<op {name}>", "exec"), namespace)
    return namespace[name]
