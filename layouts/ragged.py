"""Lengths and starts of requests in ragged (packed, unpadded) tensors.

Everything stays on the device: these functions read shapes and dtypes, never values.
"""

from __future__ import annotations

import torch

from hopwell.kernels.problem import TokenOffsets
from hopwell.layouts._checks import INDEX_TYPES, require_dtype, require_tensor


def _flat(tensor: torch.Tensor, counts: tuple[int, ...], name: str) -> torch.Tensor:
    require_tensor(tensor, name)
    require_dtype(tensor, INDEX_TYPES, name)
    if tensor.numel() not in counts:
        allowed = " or ".join(str(count) for count in counts)
        raise ValueError(f"{name} must have {allowed} elements, got shape {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {tuple(tensor.shape)} and strides {tensor.stride()}")
    return tensor.view(-1)


def sequence_lengths(seq_lens: torch.Tensor, batch_size: int, name: str = "seq_lens") -> torch.Tensor:
    """View per-request lengths as [batch_size].

    Callers of FlashInfer pass [batch_size] and, following cuDNN, [batch_size, 1, 1, 1]; both are accepted.

    Args:
        seq_lens: int32, uint32 or int64, contiguous, ``batch_size`` elements in any shape.
        batch_size: number of requests.
        name: name of ``seq_lens`` in messages.

    Raises:
        TypeError: ``seq_lens`` is not a tensor, or has another dtype.
        ValueError: the number of elements is wrong, or the tensor is not contiguous.

    >>> sequence_lengths(torch.tensor([5, 7], dtype=torch.int32).view(2, 1, 1, 1), 2)
    tensor([5, 7], dtype=torch.int32)
    """
    return _flat(seq_lens, (batch_size,), name)


def token_offsets(cum_seq_lens: torch.Tensor, batch_size: int, name: str = "cum_seq_lens_q") -> TokenOffsets:
    """Read cumulative lengths: request b has tokens [cum_seq_lens[b], cum_seq_lens[b + 1]).

    Args:
        cum_seq_lens: int32, uint32 or int64, contiguous, ``batch_size + 1`` elements, in tokens.
        batch_size: number of requests.
        name: name of ``cum_seq_lens`` in messages.

    Raises:
        TypeError: ``cum_seq_lens`` is not a tensor, or has another dtype.
        ValueError: the number of elements is wrong, or the tensor is not contiguous.

    >>> token_offsets(torch.tensor([0, 5, 12], dtype=torch.int32), 2).token_elements
    1
    """
    return TokenOffsets(_flat(cum_seq_lens, (batch_size + 1,), name))


def element_offsets(
    batch_offsets: torch.Tensor, batch_size: int, elements_per_token: int, name: str = "batch_offsets_q"
) -> TokenOffsets:
    """Read element offsets: request b starts at token ``batch_offsets[b] // elements_per_token``.

    These are the ``batch_offsets_*`` arguments of FlashInfer's ``cudnn_batch_prefill_with_kv_cache``. They count
    elements of storage. A token has heads * head_dim elements in contiguous q, k, v and o; in a slice of a larger
    tensor it has its stride. In the log-sum-exp (``batch_offsets_stats``) it has one element per head. The reference
    documents ``batch_size`` entries and passes one more; only the first ``batch_size`` give starts of requests.

    Args:
        batch_offsets: int32, uint32 or int64, contiguous, ``batch_size`` or ``batch_size + 1`` elements in any shape.
        batch_size: number of requests.
        elements_per_token: at least 1.
        name: name of ``batch_offsets`` in messages.

    Raises:
        TypeError: ``batch_offsets`` is not a tensor, or has another dtype.
        ValueError: the number of elements is wrong, the tensor is not contiguous, or ``elements_per_token`` is below 1.

    >>> offsets = element_offsets(torch.tensor([0, 5 * 4096, 12 * 4096], dtype=torch.int32), 2, 32 * 128)
    >>> (offsets.tensor // offsets.token_elements).tolist()
    [0, 5, 12]
    """
    if elements_per_token < 1:
        raise ValueError(f"elements_per_token must be at least 1, got {elements_per_token}")
    return TokenOffsets(_flat(batch_offsets, (batch_size, batch_size + 1), name), elements_per_token)


def cumulative_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Convert lengths to the cumulative int32 [batch_size + 1] form of ``cum_seq_lens_q``, on their device.

    Args:
        lengths: int32, uint32 or int64 [batch_size].

    Raises:
        TypeError: ``lengths`` is not a tensor, or has another dtype.
        ValueError: it is not 1-D.

    >>> cumulative_lengths(torch.tensor([5, 0, 7], dtype=torch.int32)).tolist()
    [0, 5, 5, 12]
    """
    require_tensor(lengths, "lengths")
    require_dtype(lengths, INDEX_TYPES, "lengths")
    if lengths.dim() != 1:
        raise ValueError(f"lengths must be 1-D, got shape {tuple(lengths.shape)}")
    total = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    # torch has no cumsum for uint32. Lengths below 2**31 have the same bits in int32.
    signed = lengths.view(torch.int32) if lengths.dtype == torch.uint32 else lengths
    torch.cumsum(signed, 0, dtype=torch.int32, out=total[1:])
    return total
