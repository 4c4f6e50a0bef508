"""Argument checks shared by the entry points.

Each check names the argument, the given value and the allowed values. A wrong Python type, and a tensor scale that is
not float32, raise TypeError; everything else raises ValueError. No check reads device memory.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from hopwell.kernels.problem import MAX_KEYS, PageTable, TokenOffsets
from hopwell.layouts import (
    TMA_ALIGNMENT,
    element_offsets,
    sequence_lengths,
    shared_page_table,
    split_page_table,
    tma_violation,
    token_offsets,
)

FP8 = torch.float8_e4m3fn
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
PREFILL_OUTPUTS = (*SIXTEEN_BIT, FP8)
INTEGERS = (torch.int32, torch.uint32, torch.int64)
STORED_BYTES = 8  # at a time, of e4m3 rows that are no multiple of 16 bytes
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
# Implementations of torch functions without overrides: torch.Tensor's, and the one of classes such as Parameter.
_TENSOR: Any = torch.Tensor  # Any, because type checkers do not know its class methods
TORCH_FUNCTIONS = (_TENSOR.__torch_function__.__func__, torch._C._disabled_torch_function_impl)


def describe(value: Any) -> str:
    """Return a brief description of ``value`` for a message.

    Large values are not formatted: the text of a storage of 4 MB takes 12 s.
    """
    if is_plain(value):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    kind = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"  # Python refuses to print the largest ints
    if type(value) in (list, tuple, dict):
        return f"a {kind} of {len(value)}"
    if type(value) in (str, bytes):
        return f"{kind} {value[:57]!r}{'...' if len(value) > 57 else ''}"
    if isinstance(value, (bool, int, float, complex, type, torch.dtype, torch.device)):
        return f"{kind} {value!r}"
    return f"an object of type {kind}"


def is_plain(value: Any) -> bool:
    """Return whether ``value`` is a tensor whose elements lie in its memory as its shape and strides describe."""
    if not isinstance(value, torch.Tensor) or not _is_plain_type(type(value)):
        return False
    return not (value.layout is not torch.strided or value.is_nested or _unread(value))


def _is_plain_type(kind: Any) -> bool:
    """Return whether tensors of a class have plain memory; fake and distributed tensors, for example, do not."""
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    dispatches = kind.__torch_dispatch__ is not _TENSOR.__torch_dispatch__
    return kind is torch.Tensor or (function in TORCH_FUNCTIONS and not dispatches)


def _unread(value: torch.Tensor) -> str:
    """Return the property that hides a strided tensor's values from a kernel that reads its memory, or an empty
    string."""
    if is_functorch_wrapped_tensor(value):
        return "one of torch.vmap or torch.func, which no kernel can read"
    if value.is_quantized:
        return "a quantized one"
    if value.is_neg():
        return "a view that negates, for resolve_neg() to resolve"
    if value.is_conj():
        return "a view that conjugates, for resolve_conj() to resolve"
    return "a ZeroTensor, which has no memory" if value._is_zerotensor() else ""


def tensor(name: str, value: Any, kinds: str = "a torch.Tensor") -> torch.Tensor:
    """Return ``value`` as a strided tensor with its own memory. ``kinds`` lists the allowed types in the message."""
    unread_tensor(name, value, kinds)
    if torch.compiler.is_dynamo_compiling():
        return value  # has no memory yet; the ops of the graph check theirs
    if not _is_plain_type(type(value)):
        raise ValueError(
            f"{name} must be a torch.Tensor, or of a subclass without __torch_function__ and __torch_dispatch__ of its "
            f"own, got a {type(value).__name__}"
        )
    if value.layout is not torch.strided or value.is_nested:
        raise ValueError(f"{name} must be a strided tensor, got layout {value.layout}, nested={value.is_nested}")
    unread = _unread(value)
    if unread:
        raise ValueError(f"{name} must be a tensor whose memory holds its elements as they are, got {unread}")
    if value.device.type != "meta" and value.numel() and value.untyped_storage().nbytes() < _end_bytes(value):
        raise ValueError(
            f"{name} must have memory for its elements, got a storage of {value.untyped_storage().nbytes()} bytes "
            f"for {describe(value)}"
        )
    return value


def unread_tensor(name: str, value: Any, kinds: str = "a torch.Tensor") -> None:
    """Check that ``value`` is a tensor of any type, because no kernel reads it."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be {kinds}, got {describe(value)}")


def _end_bytes(value: torch.Tensor) -> int:
    """Return the bytes from the start of the storage to the end of the last element."""
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (int(value.storage_offset()) + reach + 1) * value.element_size()


def main_tensor(name: str, value: Any) -> torch.Tensor:
    """Return ``value`` as the tensor whose device the call runs on."""
    checked = tensor(name, value)
    if checked.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} must be on a CUDA device or the CPU, got {checked.device}")
    return checked


def dtype(name: str, value: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Check that the dtype is one of ``allowed``."""
    if value.dtype not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(str, allowed))}, got {value.dtype}")


def device(name: str, value: torch.Tensor, expected: torch.device) -> None:
    """Check that the tensor is on ``expected``."""
    if value.device != expected:
        raise ValueError(f"{name} must be on {expected}, the device of the query, got {value.device}")


def shape(name: str, value: torch.Tensor, *dims: tuple[str, int | None], hint: str = "") -> None:
    """Check the shape against ``dims``, pairs of (name, size or None for any size). ``hint`` ends the message."""
    got = tuple(value.shape)
    if len(got) != len(dims) or any(want not in (None, size) for size, (_, want) in zip(got, dims, strict=True)):
        text = ", ".join(label if want is None else f"{label}={want}" for label, want in dims)
        raise ValueError(f"{name} must have shape [{text}], got {got}{hint}")


def unit_stride(name: str, value: torch.Tensor) -> None:
    """Check that the last dimension is contiguous."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} must have stride 1 in its last dimension, got strides {value.stride()}")


def tma_readable(name: str, value: torch.Tensor) -> None:
    """Check that TMA can address the tensor: unit last stride, 16-byte aligned address and strides."""
    violation = tma_violation(value, name)
    if violation is not None:
        raise ValueError(violation)


def host_int(name: str, value: Any, minimum: int = 0, maximum: int = INT32_MAX) -> int:
    """Return ``value`` as an int on the host. Any type with ``__index__`` is allowed, except bools and tensors."""
    if isinstance(value, (bool, torch.Tensor)):
        # A tensor has __index__ too, but calling it would wait for the device
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {describe(value)}") from None
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} must be in [{minimum}, {maximum}], got {describe(number)}")
    return number


def host_float(name: str, value: Any, minimum: float | None = None, kinds: str = "a float") -> float:
    """Return ``value`` as a finite float on the host. ``kinds`` lists the allowed types in the message."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {kinds}, got {describe(value)}")
    try:
        number = float(value) + 0.0  # -0.0 becomes 0.0, because the two compare equal in repeated calls
    except OverflowError:
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {describe(value)}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def optional_float(name: str, value: Any) -> float:
    """Return ``value`` as a float that is not negative; None means 0."""
    return 0.0 if value is None else host_float(name, value, 0.0, "a float or None")


def flag(name: str, value: Any, kinds: str = "True or False") -> bool:
    """Return ``value`` as a bool. ``kinds`` lists the allowed types in the message."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be {kinds}, got {describe(value)}")
    return value


def optional_flag(name: str, value: Any) -> bool | None:
    """Return ``value`` as a bool or None."""
    return None if value is None else flag(name, value, "True, False or None")


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Return ``value`` as one of the strings in ``allowed``."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {describe(value)}")
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {describe(value)}")
    return value


def scale(name: str, value: Any, on: torch.device, minimum: float | None = None) -> float | torch.Tensor:
    """Check and return a scale: a host float, or one float32 value on the device, which stays there.

    A one-element tensor on the host is read here, which makes it the slow path.
    """
    if isinstance(value, torch.Tensor):
        tensor(name, value)
        if value.dtype != torch.float32:
            raise TypeError(f"{name} as a tensor must be torch.float32, got {value.dtype}")
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got shape {tuple(value.shape)}")
        if value.device == on:
            return value
        if value.device.type != "cpu":
            raise ValueError(f"{name} must be on {on} or on the host, got {value.device}")
        value = value.item()
    return host_float(name, value, minimum, "a float or a float32 tensor of one element")


def is_natural(name: str, value: Any) -> bool:
    """Return whether a base of logarithms, "log2" or "ln", is e."""
    return choice(name, value, ("log2", "ln")) == "ln"


def backend_name(value: Any) -> None:
    """Check that ``backend`` is a string or None. Every string is allowed, because there is one implementation."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"backend must be a str or None, got {describe(value)}")


def log_sum_exp(name: str, value: Any, on: torch.device, *dims: tuple[str, int], hint: str = "") -> torch.Tensor:
    """Check and return a preallocated log-sum-exp of the sizes ``dims``; ``hint`` is as in :func:`shape`."""
    checked = tensor(name, value, "a torch.Tensor or None")
    shape(name, checked, *dims, hint=hint)
    dtype(name, checked, (torch.float32,))
    device(name, checked, on)
    if not checked.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {checked.stride()}")
    return checked


def sinks(value: Any, heads: int, on: torch.device) -> torch.Tensor | None:
    """Check and return attention sinks: one float32 or bfloat16 logit per query head, as a tensor or a list of one."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ValueError(f"sinks as a {type(value).__name__} must hold exactly one tensor, got {len(value)}")
        value = value[0]
    checked = tensor("sinks", value, "a torch.Tensor, a list of one, or None")
    dtype("sinks", checked, (torch.float32, torch.bfloat16))
    shape("sinks", checked, ("num_heads", heads))
    unit_stride("sinks", checked)
    device("sinks", checked, on)
    return checked


def index_tensor(name: str, value: Any, on: torch.device) -> torch.Tensor:
    """Check and return a tensor of lengths, offsets or page ids."""
    checked = tensor(name, value)
    dtype(name, checked, INTEGERS)
    device(name, checked, on)
    return checked


def lengths(name: str, value: Any, batch: int, on: torch.device) -> torch.Tensor:
    """Return one length for each request as [batch], from a tensor of any shape."""
    return sequence_lengths(index_tensor(name, value, on), batch, name)


def cumulative(name: str, value: Any, batch: int, on: torch.device) -> TokenOffsets:
    """Read cumulative lengths in tokens."""
    return token_offsets(index_tensor(name, value, on), batch, name)


def offsets(
    name: str, value: Any, batch: int, token_elements: int, tokens: int, on: torch.device
) -> TokenOffsets | None:
    """Read the starts of requests in elements of a tensor of ``tokens`` tokens with ``token_elements`` each."""
    if value is None:
        return None
    starts = element_offsets(index_tensor(name, value, on), batch, token_elements, name)
    if value.dtype == torch.int64 and tokens * token_elements > UINT32_MAX:
        raise ValueError(
            f"{name} as torch.int64 must fit 32 bits, got them for {tokens} tokens of {token_elements} elements; "
            "offsets in tokens reach further"
        )
    return starts


def page_table(
    value: Any, batch: int, on: torch.device, *, shared: bool = True, batch_source: str = "batch_size"
) -> PageTable:
    """Read ``block_tables``: 2-D with ids shared by K and V, or 3-D with separate ids.

    ``batch_source`` describes in messages how ``batch`` follows from other arguments.
    """
    table = index_tensor("block_tables", value, on)
    if table.dim() and table.shape[0] != batch:
        raise ValueError(f"block_tables must have {batch} rows ({batch_source}), got shape {tuple(table.shape)}")
    return shared_page_table(table, batch) if shared else split_page_table(table, batch)


def capacity(table: PageTable, page_size: int) -> int:
    """Return the most tokens of a request that ``block_tables`` has room for."""
    pages = table.key.shape[1]
    if pages * page_size > MAX_KEYS:
        raise ValueError(
            f"block_tables may have room for {MAX_KEYS} tokens of a request at most, "
            f"got {pages} pages of {page_size}, which are {pages * page_size}"
        )
    return pages * page_size


def page_size(name: str, size: int) -> None:
    """Check that pages of the cache ``name`` have at least one token."""
    if size < 1:
        raise ValueError(f"{name} must have a page size of at least 1, got {size}")


def power_of_two(name: str, number: int) -> None:
    """Check that ``number`` is 1, 2, 4, ..."""
    if number < 1 or number & (number - 1):
        raise ValueError(f"{name} must be a power of two, got {number}")


def layout_hint(heads: int, key: torch.Tensor, other: str, page_multiple: int = 1) -> str:
    """Return the end of a message about the shape of ``key`` [pages, kv_heads, page_size, head_dim].

    It names the ``other`` layout, which swaps kv_heads and page_size, if the shape fits that layout.
    """
    _, page_size, kv_heads, _ = key.shape
    fits = kv_heads > 0 and page_size > 0 and heads % kv_heads == 0 and page_size % page_multiple == 0
    return f"; the shape fits {other}" if fits else ""


def grouped_heads(heads: int, key: torch.Tensor, kv_name: str, other: str = "") -> None:
    """Check that every KV head of ``key`` [pages, kv_heads, page_size, head_dim] serves equally many query heads.

    Args:
        heads: query heads.
        key: the keys.
        kv_name: the argument that contains the keys.
        other: the layout that swaps kv_heads and page_size, for the message; empty if there is none.
    """
    kv_heads = key.shape[1]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        hint = layout_hint(heads, key, other) if other and heads > 0 else ""
        raise ValueError(
            f"the query heads must be a positive multiple of the KV heads of {kv_name}, "
            f"got {heads} query heads and {kv_heads} KV heads{hint}"
        )


def stored_in(name: str, value: torch.Tensor, at_once: int) -> None:
    """Check that kernels can store ``at_once`` bytes at a time: unit last stride, aligned address and other strides."""
    steps = [stride for size, stride in zip(value.shape[:-1], value.stride(), strict=False) if size != 1]
    addresses = (value.data_ptr(), *(stride * value.element_size() for stride in steps))
    if value.stride(-1) != 1 or any(address % at_once for address in addresses):
        raise ValueError(
            f"{name} must have 1 as its last stride, and its address and its other strides must be multiples of "
            f"{at_once} bytes, got strides {value.stride()} at address {value.data_ptr():#x}"
        )


def output(
    name: str, value: Any, sizes: Sequence[int], of: torch.dtype, on: torch.device, at_once: int = 0
) -> torch.Tensor:
    """Check and return a preallocated [tokens, heads, dim] output.

    Strides are free if no two rows share memory. Kernels store ``at_once`` bytes at a time; with 0 they store with TMA,
    which must be able to address the output. They store e4m3 rows that are no multiple of 16 bytes by 8 bytes.
    """
    if of == FP8 and sizes[-1] % TMA_ALIGNMENT:
        at_once = STORED_BYTES
    checked = tensor(name, value, "a torch.Tensor or None")
    shape(name, checked, *zip(("tokens", "heads", "head_dim"), sizes, strict=True))
    dtype(name, checked, (of,))
    device(name, checked, on)
    if at_once:
        stored_in(name, checked, at_once)
    else:
        tma_readable(name, checked)
    reach = 1
    for stride, size in sorted(zip(checked.stride(), checked.shape, strict=True)):
        if size > 1 and checked.numel():
            if stride < reach:
                raise ValueError(f"{name} must not overlap itself, got strides {checked.stride()} for {tuple(sizes)}")
            reach += (size - 1) * stride
    return checked


def output_dtype(
    given: Any,
    out: Any,
    default: torch.dtype,
    allowed: Sequence[torch.dtype],
    inputs: str,
    name: str = "out_dtype",
    names: str = "None",
) -> torch.dtype:
    """Return the dtype of the output: ``given``, else the dtype of ``out``, else ``default``.

    Args:
        given: the argument called ``name``.
        out: the tensor to write into, or None.
        default: the dtype if neither is given.
        allowed: the dtypes that kernels store.
        inputs: the inputs that ``allowed`` depends on, for the message.
        name: the argument that selects a dtype.
        names: the strings that ``name`` allows in place of a dtype, for the message, or "None" if there are none.
    """
    if given is not None and not isinstance(given, torch.dtype):
        error = ValueError if isinstance(given, str) and names != "None" else TypeError
        raise error(f"{name} must be a torch.dtype or {names}, got {describe(given)}")
    if out is not None:
        tensor("out", out, "a torch.Tensor or None")
        if given is not None and given != out.dtype:
            raise ValueError(f"{name} must be the dtype of out, {out.dtype}, where both are given, got {given}")
    found = given or (default if out is None else out.dtype)
    if found not in allowed:
        blamed = "out" if given is None else name
        raise ValueError(f"{blamed} must be {' or '.join(map(str, allowed))} for {inputs}, got {found}")
    return found


def allocated(out: torch.Tensor | None, query: torch.Tensor, v_dim: int, of: torch.dtype) -> torch.Tensor | None:
    """Return ``out``, or a new tensor if the launch's own allocation, in the query's dtype, has the wrong dtype."""
    if out is not None or of == query.dtype:
        return out
    return torch.empty((*query.shape[:-1], v_dim), dtype=of, device=query.device)


def disjoint(name: str, written: torch.Tensor, others: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """Check that ``written`` shares no memory with any of ``others``.

    Tensors may interleave in one buffer, such as two halves of its last dimension. If every outer stride of both is a
    multiple of some g, it suffices that their rows are disjoint modulo g.
    """
    if written.numel() == 0:
        return
    start, end, row, strides = _extent(written)
    for other_name, other in others:
        if other is None or other.numel() == 0 or other.device != written.device:
            continue
        other_start, other_end, other_row, other_strides = _extent(other)
        if other_start >= end or start >= other_end:
            continue
        period = math.gcd(*strides, *other_strides)
        if period and (other_start - start) % period >= row and (start - other_start) % period >= other_row:
            continue
        raise ValueError(f"{name} must not share memory with {other_name}, but their address ranges overlap")


def _extent(value: torch.Tensor) -> tuple[int, int, int, list[int]]:
    """Return the first byte, the byte past the last, the bytes of an innermost gapless run, and the strides between
    runs."""
    size = value.element_size()
    steps = [(n, stride * size) for n, stride in zip(value.shape, value.stride(), strict=True) if n > 1]
    start = value.data_ptr()
    end = start + size + sum((n - 1) * step for n, step in steps)
    row = size
    rest: list[int] = []
    for n, step in sorted(steps, key=lambda pair: pair[1]):
        if step == row and not rest:
            row *= n
        else:
            rest.append(step)
    return start, end, row, rest
