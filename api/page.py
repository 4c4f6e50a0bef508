"""Entry points that write new tokens into a paged cache, at the module path and with the signatures of
``flashinfer.page``."""

from __future__ import annotations

import torch

from hopwell import _checks as checks
from hopwell._append import AppendArguments, AppendCalls
from hopwell._launch import halves

__all__ = [
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
]

_APPEND = AppendCalls()


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
    """Write new keys and values into the pages of a cache, quantized as its dtype says.

    One launch, without waiting for the device, so that it can be captured in a CUDA graph. A token whose request,
    position or page id is negative or past the end of what is given is not written, so that graphs may have room for
    more tokens than there are. Which of two tokens with the same place is written is not defined.

    Rounding is that of ``hopwell.layouts``: e4m3 takes x / scale rounded to nearest even, clamped at +-448; NVFP4 takes
    a scale factor e4m3(max / 6) for each 16 elements of x / scale, and codes of what remains, clamped at +-6.

    Signature and meaning follow FlashInfer's documentation of the function of this name; the keywords are ours.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        append_key: bfloat16 or float16 [tokens, kv_heads, head_dim]; token and head strides are free multiples of 16
            bytes, so that a slice of packed QKV will do.
        append_value: likewise; its head_dim may differ.
        batch_indices: int32 [tokens], the request that a token belongs to.
        positions: int32 [tokens], the place of a token among the keys of its request.
        paged_kv_cache: a pair (K, V) of [pages, page_size, kv_heads, head_dim] ("NHD") or
            [pages, kv_heads, page_size, head_dim] ("HND"), or one tensor stacked on dimension 1. In the dtype of
            append_key, float8_e4m3fn, or uint8 for NVFP4, with head_dim / 2 as the last dimension. page_size is a power
            of two up to 1024.
        kv_indices: int32 [pages], page ids of the requests in a row.
        kv_indptr: int32 [batch + 1], where those of each request begin in ``kv_indices``.
        kv_last_page_len: int32 [batch] or None. It enters no computation, as ``positions`` say the same.
        kv_layout: "NHD" or "HND".
        k_scale: what keys are divided by: a positive float, or one float32 in a tensor, unchecked. The global scale of
            NVFP4. Belongs into ``bmm1_scale`` of the attention call. 1.0 for 16-bit caches.
        v_scale: what values are divided by, likewise, for ``bmm2_scale``.
        kv_cache_sf: block scales of an NVFP4 cache, float8_e4m3fn or uint8, as a pair or stacked like the cache, with
            head_dim / 16 as the last dimension.
        v_scale_layout: "linear" for ``xqa_batch_decode_with_kv_cache``, "interleaved" (by four tokens) for
            ``trtllm_batch_context_with_kv_cache``. Their caches cannot be told apart.
        block_tables: int32 [batch, pages_per_request], page ids in place of ``kv_indices`` and ``kv_indptr``.
        uses_shared_paged_kv_idx: False for ``block_tables`` [batch, 2, pages_per_request] with ids of K and of V.
        enable_pdl: programmatic dependent launch; None means where the device has it.

    Returns:
        None: the cache is written in place.

    Raises:
        TypeError: an argument of a wrong Python type, or a tensor scale that is not float32.
        ValueError: a wrong dtype, shape, stride, alignment, device or value; the message names the argument.
        NotImplementedError: a well-formed call that no kernel serves on this architecture; the message says what is.
    """
    _APPEND.run(
        AppendArguments(
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
    )


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
        append_key: as there, like all that follow.
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


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say for each new token to which request it belongs and where in it, as :func:`append_paged_kv_cache` wants it.

    New tokens are the last ones of their requests. Nothing waits for the device.

    Args:
        append_indptr: int32 [batch + 1], where the new tokens of each request begin.
        seq_lens: int32 [batch], tokens of each request, new ones included.
        nnz: how many tokens to say it for, the last element of ``append_indptr`` or more.

    Returns:
        (batch_indices, positions): int32 [nnz] each, -1 for tokens of no request.

    Raises:
        TypeError: an argument of a wrong Python type.
        ValueError: a wrong dtype, shape or device.

    >>> starts = torch.tensor([0, 1, 3, 3, 6], dtype=torch.int32)
    >>> get_batch_indices_positions(starts, torch.tensor([5, 5, 5, 5], dtype=torch.int32), 7)[1].tolist()
    [4, 3, 4, 2, 3, 4, -1]
    """
    starts = checks.main_tensor("append_indptr", append_indptr)
    checks.dtype("append_indptr", starts, (torch.int32,))
    checks.shape("append_indptr", starts, ("batch + 1", None))
    batch = starts.shape[0] - 1
    if batch < 1:
        raise ValueError(f"append_indptr must have batch + 1 elements of at least one request, got {batch + 1}")
    lengths = checks.tensor("seq_lens", seq_lens)
    checks.dtype("seq_lens", lengths, (torch.int32,))
    checks.shape("seq_lens", lengths, ("batch", batch))
    if lengths.device != starts.device:
        raise ValueError(f"seq_lens must be on {starts.device}, the device of append_indptr, got {lengths.device}")
    token = torch.arange(checks.host_int("nnz", nnz), dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts.contiguous(), token, right=True, out_int32=True) - 1
    owner = request.clamp(max=batch - 1)
    position = lengths[owner] - starts[owner + 1] + token
    return torch.where(request < batch, request, -1), torch.where(request < batch, position, -1)


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Say how many tokens each request has, by its pages.

    Args:
        kv_indptr: int32 [batch + 1], where the pages of each request begin.
        kv_last_page_len: int32 [batch], tokens in the last page of each.
        page_size: tokens of a page.

    Returns:
        int32 [batch].

    Raises:
        TypeError: an argument of a wrong Python type.
        ValueError: a wrong dtype or shape.

    >>> get_seq_lens(torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([13, 8], dtype=torch.int32), 16).tolist()
    [45, 8]
    """
    starts = checks.main_tensor("kv_indptr", kv_indptr)
    checks.dtype("kv_indptr", starts, (torch.int32,))
    checks.shape("kv_indptr", starts, ("batch + 1", None))
    last = checks.tensor("kv_last_page_len", kv_last_page_len)
    checks.dtype("kv_last_page_len", last, (torch.int32,))
    checks.shape("kv_last_page_len", last, ("batch", starts.shape[0] - 1))
    size = checks.host_int("page_size", page_size, minimum=1)
    return (starts[1:] - starts[:-1] - 1).clamp(min=0) * size + last
