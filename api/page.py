"""Entry points that append new tokens to a paged cache, at the module path and with the signatures of
``flashinfer.page``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hopwell._calls.dynamo import call_op, is_traced, traced_as_op
from hopwell._calls.launch import halves
from hopwell._checks import arguments as checks
from hopwell._checks import device_data
from hopwell._entries.append import AppendArguments, AppendCalls
from hopwell.kernels.launch.device_data import INT32_MAX, INT32_MIN, Rule, ascending, signed

__all__ = [
    "append_paged_kv_cache",
    "append_paged_kv_cache_with_slot_mapping",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]

_APPEND, _APPEND_SLOTS = AppendCalls(), AppendCalls(by_slot=True)


@traced_as_op
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_last_page_len: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    v_scale_layout: str = "linear",
    block_tables: torch.Tensor | None = None,
    uses_shared_paged_kv_idx: bool = True,
    enable_pdl: bool | None = None,
) -> None:
    """Write new keys and values into the pages of a cache, quantized to the cache's dtype.

    The call is one launch and does not wait for the device, so CUDA graphs can capture it. Graphs may have room for
    more tokens than exist: a token with a negative batch index or position is padding and is not written. The call also
    skips a token whose request does not exist, or whose position lies past the request's pages. It skips a token whose
    page id is out of range. Such a token is lost; ``HOPWELL_CHECK=1`` reports it. If two tokens have the same place, it
    is undefined which of them is written.

    Rounding is the same as in ``hopwell.layouts``. e4m3 takes x / scale rounded to nearest even, clamped at +-448.
    NVFP4 takes a block scale e4m3(max / 6) for each 16 elements of x / scale, and codes of the quotients, clamped at
    +-6.

    The signature and the meaning follow FlashInfer's documentation of the function of this name. The keyword-only
    arguments are hopwell's.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        append_key: bfloat16 or float16 [tokens, kv_heads, head_dim]. Token and head strides are free multiples of 16
            bytes, so a slice of packed QKV is allowed.
        append_value: the same; its head_dim may differ.
        batch_indices: int32, uint32 or int64 [tokens], the request that a token belongs to; negative for padding.
        positions: int32, uint32 or int64 [tokens], the position of a token among the keys of its request; negative for
            padding.
        paged_kv_cache: a pair (K, V) of [pages, page_size, kv_heads, head_dim] ("NHD") or
            [pages, kv_heads, page_size, head_dim] ("HND"), or one tensor stacked on dimension 1. The dtype is
            append_key's dtype, float8_e4m3fn, or uint8 for NVFP4, with head_dim / 2 as the last dimension. page_size is
            a multiple of 4 with interleaved scales, else any. K and V may be views of one pool of pages, a number of
            whole pages apart. The page ids then keep keys and values apart.
        kv_indices: int32, uint32 or int64 [pages], page ids of all requests, one request after another.
        kv_indptr: int32, uint32 or int64 [batch + 1], the index in ``kv_indices`` of each request's first page id.
        kv_last_page_len: int32, uint32 or int64 [batch], or None. It enters no computation: ``positions`` contain the
            same information.
        kv_layout: "NHD" or "HND".
        k_scale: divisor of keys: a positive float, or a tensor of one float32, whose value only ``HOPWELL_CHECK=1``
            reads. It is the global scale of NVFP4. The caller multiplies it into ``bmm1_scale`` of the attention call.
            A contiguous float32 tensor [num_kv_heads] has a scale for each KV head. 1.0 for 16-bit caches.
        v_scale: divisor of values, in the same forms, for ``bmm2_scale``.
        kv_cache_sf: block scales of an NVFP4 cache, float8_e4m3fn or uint8, as a pair or stacked like the cache, with
            head_dim / 16 as the last dimension.
        v_scale_layout: order of V's block scales: "linear", which decode reads, or "interleaved" by four tokens.
            ``trtllm_batch_context_with_kv_cache`` reads both, see its ``v_scale_layout``. hopwell cannot tell the two
            kinds of cache apart.
        block_tables: int32, uint32 or int64 [batch, pages_per_request], page ids in place of ``kv_indices`` and
            ``kv_indptr``.
        uses_shared_paged_kv_idx: False for ``block_tables`` [batch, 2, pages_per_request] with ids of K and of V.
        enable_pdl: programmatic dependent launch; None enables it on devices that have it.

    Returns:
        None: the cache is written in place.

    Raises:
        TypeError: an argument has a wrong Python type, or a tensor scale is not float32.
        ValueError: a dtype, shape, stride, alignment, device or value is wrong; the message names the argument.
        NotImplementedError: the call is well-formed, but no kernel serves it on this architecture; the message lists
            what is supported.
    """
    arguments = AppendArguments(
        append_key,
        append_value,
        batch_indices,
        positions,
        *halves(paged_kv_cache),
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        kv_layout,
        k_scale,
        v_scale,
        *halves(kv_cache_sf),
        v_scale_layout,
        block_tables,
        uses_shared_paged_kv_idx,
        enable_pdl,
    )
    if _APPEND.repeat(arguments) is None:
        if is_traced(append_key):
            return call_op(append_paged_kv_cache, "append_key", locals())
        _APPEND.run(arguments)
    return None


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
    *,
    v_scale_layout: str = "linear",
    enable_pdl: bool | None = None,
) -> None:
    """Write new keys and values into an NVFP4 cache: :func:`append_paged_kv_cache` under FlashInfer's other name.

    Args:
        append_key: as there, like all arguments that follow.
        append_value: as there.
        batch_indices: as there.
        positions: as there.
        paged_kv_cache: uint8.
        kv_cache_sf: as there.
        kv_indices: as there.
        kv_indptr: as there.
        kv_last_page_len: as there.
        k_scale: global scale of the keys, x = code * block scale * k_scale.
        v_scale: global scale of the values.
        kv_layout: as there.
        v_scale_layout: as there.
        enable_pdl: as there.

    Returns:
        None: the cache is written in place.

    Raises:
        TypeError, ValueError, NotImplementedError: as there.
    """
    append_paged_kv_cache(
        append_key,
        append_value,
        batch_indices,
        positions,
        paged_kv_cache,
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        kv_layout,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_sf=kv_cache_sf,
        v_scale_layout=v_scale_layout,
        enable_pdl=enable_pdl,
    )


@traced_as_op
def append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_layout: str = "NHD",
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    v_scale_layout: str = "linear",
    enable_pdl: bool | None = None,
) -> None:
    """Write new keys and values into slots of a cache: :func:`append_paged_kv_cache` without a page table.

    Slot s is row s % page_size of page s // page_size, as in vLLM's ``slot_mapping``. A negative slot is padding, and
    the call does not write its token. The call also skips a slot past the end of the cache; ``HOPWELL_CHECK=1`` reports
    it. If two tokens have the same slot, it is undefined which of them is written.

    Args:
        append_key: bfloat16 or float16 [tokens, kv_heads, head_dim], as there.
        append_value: the same; its head_dim may differ.
        slot_mapping: int32, uint32 or int64 [slots], the slot of each token, contiguous. ``slots`` is at most
            ``tokens``; the call does not write the tokens behind the last slot.
        paged_kv_cache: as there.
        kv_layout: "NHD" or "HND".
        k_scale: as there, like all arguments that follow.
        v_scale: as there.
        kv_cache_sf: as there.
        v_scale_layout: as there.
        enable_pdl: as there.

    Returns:
        None: the cache is written in place.

    Raises:
        TypeError, ValueError, NotImplementedError: as there.
    """
    arguments = AppendArguments(
        append_key,
        append_value,
        None,
        slot_mapping,
        *halves(paged_kv_cache),
        None,
        None,
        None,
        kv_layout,
        k_scale,
        v_scale,
        *halves(kv_cache_sf),
        v_scale_layout,
        None,
        True,
        enable_pdl,
    )
    if _APPEND_SLOTS.repeat(arguments) is None:
        if is_traced(append_key):
            return call_op(append_paged_kv_cache_with_slot_mapping, "append_key", locals())
        _APPEND_SLOTS.run(arguments)
    return None


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
    *,
    v_scale_layout: str = "linear",
    enable_pdl: bool | None = None,
) -> None:
    """Write new keys and values into slots of an NVFP4 cache.

    The call is :func:`append_paged_kv_cache_with_slot_mapping` under FlashInfer's name for it.

    Args:
        append_key: as there, like all arguments that follow.
        append_value: as there.
        slot_mapping: as there.
        paged_kv_cache: uint8.
        kv_cache_sf: as there.
        k_scale: global scale of the keys, x = code * block scale * k_scale.
        v_scale: global scale of the values.
        kv_layout: as there.
        v_scale_layout: as there.
        enable_pdl: as there.

    Returns:
        None: the cache is written in place.

    Raises:
        TypeError, ValueError, NotImplementedError: as there.
    """
    append_paged_kv_cache_with_slot_mapping(
        append_key,
        append_value,
        slot_mapping,
        paged_kv_cache,
        kv_layout,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_sf=kv_cache_sf,
        v_scale_layout=v_scale_layout,
        enable_pdl=enable_pdl,
    )


@traced_as_op
def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the batch indices and positions of new tokens for :func:`append_paged_kv_cache`.

    New tokens are the last ones of their requests. The call does not wait for the device.

    Args:
        append_indptr: int32, uint32 or int64 [batch + 1], the index of each request's first new token.
        seq_lens: int32, uint32 or int64 [batch], tokens of each request, new tokens included.
        nnz: number of tokens in the results, at least the last element of ``append_indptr``.

    Returns:
        (batch_indices, positions): int32 [nnz] each, -1 for tokens of no request.

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, shape or device is wrong.

    >>> starts = torch.tensor([0, 1, 3, 3, 6], dtype=torch.int32)
    >>> get_batch_indices_positions(starts, torch.tensor([5, 5, 5, 5]), 7)[1].tolist()
    [4, 3, 4, 2, 3, 4, -1]
    """
    if is_traced(append_indptr):
        return call_op(get_batch_indices_positions, "append_indptr", locals())
    starts, lengths = _starts_and("append_indptr", append_indptr, "seq_lens", seq_lens)
    nnz = checks.host_int("nnz", nnz)
    batch = lengths.shape[0]
    if batch < 1:
        raise ValueError("append_indptr must have batch + 1 elements of at least one request, got 1")
    if device_data.is_enabled():
        device_data.check(_new_token_rules(starts, lengths, nnz), starts.device)
    token = torch.arange(nnz, device=starts.device)
    request = torch.searchsorted(starts, token, right=True) - 1
    owner = request.clamp(max=batch - 1)
    position = lengths[owner] - starts[owner + 1] + token
    return _int32(torch.where(request < batch, request, -1)), _int32(torch.where(request < batch, position, -1))


@traced_as_op
def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Compute the number of tokens of each request from its pages.

    Args:
        kv_indptr: int32, uint32 or int64 [batch + 1], the index of each request's first page.
        kv_last_page_len: int32, uint32 or int64 [batch], tokens in the last page of each request.
        page_size: tokens of a page.

    Returns:
        int32 [batch].

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, shape or device is wrong.

    >>> get_seq_lens(torch.tensor([0, 3, 4]), torch.tensor([13, 8]), 16).tolist()
    [45, 8]
    """
    if is_traced(kv_indptr):
        return call_op(get_seq_lens, "kv_indptr", locals())
    starts, last = _starts_and("kv_indptr", kv_indptr, "kv_last_page_len", kv_last_page_len)
    size = checks.host_int("page_size", page_size, minimum=1)
    if device_data.is_enabled():
        device_data.check(_page_rules(starts, last, size), starts.device)
    return _int32((starts[1:] - starts[:-1] - 1).clamp(min=0) * size + last)


def _new_token_rules(starts: torch.Tensor, lengths: torch.Tensor, nnz: int) -> Iterator[Rule]:
    counts = starts[1:] - starts[:-1]
    text = f"at most {nnz}, the number of tokens that the call gives as nnz"
    yield ascending("append_indptr", starts)
    yield Rule("append_indptr", starts, starts > nnz, lambda index: text)
    yield Rule("seq_lens", lengths, lengths < counts, lambda index: f"at least {int(counts[index])}, its new tokens")


def _page_rules(starts: torch.Tensor, last: torch.Tensor, page_size: int) -> Iterator[Rule]:
    yield ascending("kv_indptr", starts)
    yield Rule("kv_last_page_len", last, (last < 0) | (last > page_size), lambda index: f"in [0, {page_size}]")


def _starts_and(starts_name: str, starts: Any, name: str, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Check starts [batch + 1] and a second tensor [batch] of the same requests, and return both as int64."""
    checks.main_tensor(starts_name, starts)
    checks.dtype(starts_name, starts, checks.INTEGERS)
    checks.shape(starts_name, starts, ("batch + 1", None))
    if not starts.shape[0]:
        raise ValueError(f"{starts_name} must have batch + 1 elements, got none")
    checks.tensor(name, value)
    checks.dtype(name, value, checks.INTEGERS)
    checks.shape(name, value, ("batch", starts.shape[0] - 1))
    if value.device != starts.device:
        raise ValueError(f"{name} must be on {starts.device}, the device of {starts_name}, got {value.device}")
    return signed(starts).contiguous(), signed(value)


def _int32(values: torch.Tensor) -> torch.Tensor:
    """Convert int64 to int32. Values out of range are clamped, so that they do not wrap around to valid positions."""
    return values.clamp(INT32_MIN, INT32_MAX).int()
