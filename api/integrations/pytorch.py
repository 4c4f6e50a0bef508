"""hopwell as a FlashAttention implementation of PyTorch 2.11 and later, behind SDPA and ``varlen_attn`` on CUDA."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.nn import attention

from hopwell._entries.flash_attn import refuse
from hopwell.flash_attn import flash_attn_func, flash_attn_varlen_func

__all__ = ["NAME", "register"]

NAME = "hopwell"
Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def register() -> str:
    """Add hopwell to PyTorch's FlashAttention implementations.

    ``torch.nn.attention.activate_flash_attention_impl`` then puts hopwell's functions in place of PyTorch's forward and
    backward functions on CUDA, and ``restore_flash_attention_impl`` takes them out again. There is no backward pass:
    the function that replaces it raises NotImplementedError.

    Returns:
        The name of the implementation, "hopwell".

    Raises:
        RuntimeError: this PyTorch has no registry.

    >>> torch.nn.attention.activate_flash_attention_impl(register())  # doctest: +SKIP
    """
    if not hasattr(attention, "register_flash_attention_impl"):
        raise RuntimeError(f"PyTorch 2.11 or later is needed, which registers FlashAttention; got {torch.__version__}")
    attention.register_flash_attention_impl(NAME, register_fn=_Active)
    return NAME


class _Active:
    """Registrations of :data:`KERNELS` with PyTorch's dispatcher, until :meth:`remove`."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        for name, function in KERNELS.items():
            if hasattr(torch.ops.aten, name):
                self.library.impl(name, function, "CUDA")

    def remove(self) -> None:
        self.library = None


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Forward:
    """``aten::_flash_attention_forward``, with an output to write into. ``num_splits`` is not used."""
    refuse("hopwell in PyTorch", return_debug_mask=(return_debug_mask, False))
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": (window_size_left, window_size_right),
        "alibi_slopes": alibi_slopes,
        "return_softmax_lse": True,
        "out": out,
    }
    found: Any
    if cum_seq_q is None:
        refuse(
            "hopwell in PyTorch, for batches of equal lengths,",
            cum_seq_k=(cum_seq_k, None),
            seqused_k=(seqused_k, None),
            block_table=(block_table, None),
        )
        found = flash_attn_func(query, key, value, **options)
    else:
        bounds = cum_seq_q, cum_seq_k, max_q, max_k
        found = flash_attn_varlen_func(
            query, key, value, *bounds, **options, block_table=block_table, seqused_k=seqused_k
        )
    # Only dropout uses the last three.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return *found, seed, offset, query.new_empty(0)


def _forward_into(out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: return the log-sum-exp."""
    return _forward(*args, out=out, **kwargs)[1]


def _scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``: tensors are [batch, heads, seqlen, dim]."""
    out = torch.empty_like(query)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    lens = query.shape[2], key.shape[2]
    _, lse, *others = _forward(
        q, k, v, None, None, *lens, dropout_p, is_causal, return_debug_mask, scale=scale, out=out.transpose(1, 2)
    )
    return out, lse, None, None, *lens, *others


def _backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "hopwell has no backward pass: call torch.nn.attention.restore_flash_attention_impl() before training"
    )


KERNELS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_scaled_dot_product_flash_attention": _scaled_dot_product,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention_backward": _backward,
}
