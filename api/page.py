"""Entry points that write new tokens into a paged cache, at the module path and with the signatures of
``flashinfer.page``."""

from __future__ import annotations

import torch

from hopwell._append import AppendArguments, AppendCalls
from hopwell._launch import halves

__all__ = ["append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache"]

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
