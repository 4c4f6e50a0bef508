"""Code shared by candidates of other projects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from hopwell.perf.family import Candidate

WORKSPACE_BYTES = 1 << 30


def flashinfer() -> Any:
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # its libraries look for it among the loaded ones
    import flashinfer as peer

    return peer


# The arguments of sglang-kernel's operator, in order, with their defaults.
FA3_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("q", "k", "v", "k_new", "v_new", "q_v", "out")),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k")),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")),
    "softmax_scale": None,
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "scheduler_metadata": None,
    "num_splits": 1,
    "pack_gqa": None,
    "sm_margin": 0,
    "sinks": None,
}


def flash_attention_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Callable[[], torch.Tensor]:
    """Return a call of FlashAttention 3 from sglang-kernel. Its own wrappers would check and copy in each call."""
    from sgl_kernel import flash_attn  # noqa: F401  (registers the operator)

    given = dict(q=q, k=k, v=v, **options)
    unknown = set(given) - set(FA3_ARGUMENTS)
    if unknown:
        raise TypeError(f"FlashAttention 3 has no arguments {', '.join(sorted(unknown))}")
    arguments = tuple((FA3_ARGUMENTS | given).values())
    operator = torch.ops.sgl_kernel.fwd.default
    return lambda: operator(*arguments)[0]


def flash_mla() -> Any:
    """Return FlashMLA from sglang-kernel."""
    from sgl_kernel import flash_mla as peer

    return peer


def peer_workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def for_pages(name: str, make: Callable[[int], Candidate], *page_sizes: int) -> dict[str, Candidate]:
    """Return a candidate for each of these page sizes, by title."""
    return {f"{name}, pages of {size}": make(size) for size in page_sizes}
