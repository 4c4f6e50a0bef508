"""hopwell as an attention implementation of transformers 5.17 and later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from hopwell.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["NAME", "register"]

# Continuous batching takes names with "flash" in them, and decodes over pages for "flash" followed by 2 or 3.
NAME = "hopwell_flash3"
# transformers 5.17 calls an implementation by this name in continuous batching.
PAGED = f"paged|{NAME}"


def register() -> str:
    """Add hopwell to the attention implementations of transformers. A second call changes nothing.

    ``AttentionInterface`` and ``AttentionMaskInterface`` get transformers' own wrapper of FlashAttention, which unpads
    batches, cuts static caches to their length and passes page tables. The wrapper imports the functions of an
    implementation in ``modeling_flash_attention_utils._lazy_imports``, which has no registry. This function is replaced
    by one that returns hopwell's functions for hopwell's name, and calls the original for all others.

    Returns:
        The name of the implementation, "hopwell_flash3", for ``attn_implementation``.

    Raises:
        RuntimeError: this transformers does not have the function.

    >>> model = AutoModelForCausalLM.from_pretrained("...", attn_implementation=register())  # doctest: +SKIP
    """
    if not hasattr(utils, "_lazy_imports"):
        raise RuntimeError(
            f"transformers {transformers.__version__} does not have modeling_flash_attention_utils._lazy_imports, "
            "which hopwell extends; docs/integrations.md lists the tested versions"
        )
    if not hasattr(utils._lazy_imports, "hopwell_original"):
        utils._lazy_imports = _extended(utils._lazy_imports)
    transformers.AttentionInterface.register(NAME, flash_attention_forward)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    if hasattr(utils, "lazy_import_paged_flash_attention"):
        transformers.AttentionInterface.register(PAGED, _paged_forward)
    return NAME


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    device: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """Return FlashAttention's mask [batch_size, keys], and one for a static cache whose mask is missing.

    transformers 5.18 to 5.23 drop masks without padding, by which the wrapper cuts static caches to their length.
    """
    keys = int(q_offset) + q_length - kv_offset
    if attention_mask is None and keys < kv_length:
        attention_mask = torch.ones(batch_size, keys, dtype=torch.bool, device=device)
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset
    return flash_attention_mask(*sizes, attention_mask=attention_mask, device=device, **others)


def _paged_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function of transformers 5.17 for continuous batching with FlashAttention.

    That function takes the window from the module, and computes full attention for models that only pass it as an
    argument, such as Mistral.
    """
    from transformers.integrations.flash_paged import paged_attention_forward

    if kwargs.get("sliding_window") is not None and not hasattr(module, "sliding_window"):
        module.sliding_window = kwargs["sliding_window"]
    return paged_attention_forward(module, *args, **kwargs)


def _extended(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with hopwell's functions for hopwell's names."""

    @functools.wraps(original)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in (NAME, PAGED):
            return original(implementation, *args, **kwargs)
        functions = flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        return (*functions, utils._pad_input, utils._unpad_input)

    lazy_imports.hopwell_original = original  # type: ignore[attr-defined]
    return lazy_imports
