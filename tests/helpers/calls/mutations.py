"""Changes of one argument between two calls: memory, metadata, kind, type and value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.calls.valid_calls import batched, misaligned

Path = tuple[Any, ...]  # the name of an argument, and indices into tuples in it
WRITTEN = ("out", "lse", "workspace_buffer", "paged_kv_cache", "kv_cache_sf")


class Logged(torch.Tensor):
    """A tensor subclass with a dispatch of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Index:
    """An integer that may change between two calls."""

    def __init__(self, value: int):
        self.value = value

    def __index__(self) -> int:
        return self.value


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    return (
        0
        if tensor.numel() == 0
        else tensor.as_strided((1,), (1,)).nbytes
        + tensor.element_size()
        * sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )


def at(space: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the sizes and strides of ``like`` from byte ``start`` of ``space``."""
    inside = space[start : start + bytes_of(like)].view(like.dtype)
    return inside.as_strided(like.shape, like.stride())


def resized(tensor: torch.Tensor, storage_bytes: int, start: int = 0) -> torch.Tensor:
    """Return a copy ``start`` bytes into a storage that has been resized afterwards."""
    copy = at(torch.zeros(start + bytes_of(tensor), dtype=torch.uint8), start, tensor)
    copy.untyped_storage().resize_(storage_bytes)
    return copy


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda t: None,
    "number": lambda t: 1,
    "list": lambda t: [t],
    "pair": lambda t: (t, t),
    "pair-with-none": lambda t: (t, None),
    "triple": lambda t: (t, None, None),
    "array": lambda t: t.float().numpy() if t.dtype.itemsize < 4 else t.numpy(),
    "copy": torch.clone,
    "half": lambda t: t.half(),
    "wider": lambda t: t.long() if not t.is_floating_point() else t.float(),
    "other-index": lambda t: t.to(torch.uint32 if t.dtype == torch.int32 else torch.int32),
    "bytes": lambda t: t.view(torch.uint8),
    "one-more-dim": lambda t: t[None],
    "fewer": lambda t: t[:-1].contiguous(),
    "more": lambda t: torch.cat([t, t[-1:]]),
    "empty": lambda t: t[:0],
    "every-third": lambda t: t.repeat_interleave(3, 0)[::3],
    "strided-last": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "wide-rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "misaligned": misaligned,
    "further-in-storage": lambda t: at(torch.zeros(512 + bytes_of(t), dtype=torch.uint8), 256, t),
    "resized-to-nothing": lambda t: resized(t, 0),
    "resized-to-half": lambda t: resized(t, bytes_of(t) // 2),
    # No other tensor has a storage of this size. A tensor of the same size and address would be known, see host.md.
    "resized-further-in": lambda t: resized(t, bytes_of(t) + 36, start=256),
    "resized-within-bounds": lambda t: resized(t, bytes_of(t) + 64),
    "requires-grad": lambda t: t.clone().requires_grad_(),
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "negated": lambda t: t.clone()._neg_view(),
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "nested": lambda t: torch.nested.nested_tensor([t.clone().float(), t.clone().float()]),
    "sparse": lambda t: t.float().to_sparse(),
    "meta": lambda t: t.to("meta"),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "subclass": lambda t: t.clone().as_subclass(Logged),
    "batched": batched,
}
PLAIN: dict[str, Callable[[Any], Any]] = {
    "none": lambda v: None,
    "string": lambda v: "other",
    "true": lambda v: True,
    "float": float,
    "negative": lambda v: -1,
    "next": lambda v: v + 1,
    "huge": lambda v: 1 << 40,
    "numpy-scalar": lambda v: numpy.array(v)[()],
    "numpy-0d": numpy.array,
    "numpy-float32": numpy.float32,
    "index": Index,
    "tensor": torch.tensor,
    "float-tensor": lambda v: torch.tensor(float(v)),
    "double-tensor": lambda v: torch.tensor(float(v), dtype=torch.float64),
    "list": lambda v: [v],
}
PAIRS: dict[str, Callable[[Any], Any]] = {
    "none": lambda v: None,
    "list": list,
    "reversed": lambda v: v[::-1],
    "first": lambda v: v[0],
    "of-one": lambda v: v[:1],
    "first-and-none": lambda v: (v[0], None),
    "none-and-second": lambda v: (None, v[1]),
    "with-none": lambda v: (*v, None),
    "first-twice": lambda v: (v[0], v[0]),
}


def leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield an argument, and the parts of tuples in it, with their paths."""
    yield path, value
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from leaves(part, (*path, i))


def replaced(arguments: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return arguments with another value at ``path``."""

    def inside(old: Any, rest: Path) -> Any:
        return value if not rest else (*old[: rest[0]], inside(old[rest[0]], rest[1:]), *old[rest[0] + 1 :])

    return {**arguments, path[0]: inside(arguments[path[0]], path[1:])}


def overlaps(arguments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield arguments in which a written tensor shares memory with another argument."""
    tensors = [
        (path, value)
        for name, argument in arguments.items()
        for path, value in leaves(argument, (name,))
        if isinstance(value, torch.Tensor) and value.numel()
    ]
    for (path, one), (other_path, other) in itertools.permutations(tensors, 2):
        if path[0] not in WRITTEN and other_path[0] not in WRITTEN:
            continue
        # ``other`` starts in the last 16 bytes of ``one``, and follows it.
        start = bytes_of(one) + -bytes_of(one) % 16
        for name, at_byte in (("over the end of", start - 16), ("behind", start)):
            space = torch.zeros(at_byte + max(bytes_of(other), 16), dtype=torch.uint8)
            moved = replaced(arguments, path, at(space, 0, one))
            yield f"{other_path} {name} {path}", replaced(moved, other_path, at(space, at_byte, other))
        if one.shape == other.shape and one.dtype == other.dtype:
            yield f"{other_path} is {path}", replaced(arguments, other_path, one)


def mutations(arguments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changed arguments with the name of the change, except changes that torch cannot make."""
    for name, argument in arguments.items():
        for path, value in leaves(argument, (name,)):
            table = TENSORS if isinstance(value, torch.Tensor) else PAIRS if isinstance(value, tuple) else PLAIN
            for change, make in table.items():
                try:
                    made = make(value)
                except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
                    continue
                yield f"{path} {change}", replaced(arguments, path, made)
    yield from overlaps(arguments)
