"""Arguments of ``hopwell.flash_attn``: names, refusals, and the entry points that serve a call. Nothing is launched."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from hopwell import flash_attn
from hopwell._entries import flash_attn as calls
from hopwell.kernels.problem import Family, MaskKind

B, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
# Positional parameters of FlashAttention 2.8, from its interface.
FIRST = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
POSITIONAL = {
    "flash_attn_func": f"q k v {FIRST}",
    "flash_attn_varlen_func": f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {FIRST} block_table",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
    "return_softmax_lse",
}
# Keywords of FlashAttention 3, and of vLLM's copy of it.
KEYWORDS = {
    "flash_attn_func": "qv q_descale k_descale v_descale attention_chunk num_splits pack_gqa sm_margin",
    "flash_attn_varlen_func": "seqused_q seqused_k qv q_descale k_descale v_descale attention_chunk num_splits "
    "pack_gqa sm_margin s_aux return_softmax_lse out",
    "flash_attn_with_kvcache": "qv page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale "
    "k_descale v_descale attention_chunk scheduler_metadata pack_gqa sm_margin s_aux",
}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(name: str, **changes: Any) -> Any:
    q, k = tensor(B, 3, HEADS, DIM), tensor(B, 64, KV_HEADS, DIM)
    ragged = {"cu_seqlens_q": ints(0, 3, 6), "cu_seqlens_k": ints(0, 64, 128), "max_seqlen_q": 3, "max_seqlen_k": 64}
    arguments: dict[str, dict[str, Any]] = {
        "flash_attn_func": {"q": q, "k": k, "v": k},
        "flash_attn_varlen_func": {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": k.flatten(0, 1), **ragged},
        "flash_attn_with_kvcache": {"q": q, "k_cache": k, "v_cache": k.clone(), "cache_seqlens": ints(5, 6)},
    }
    return getattr(flash_attn, name)(**{**arguments[name], **changes})


def has(name: str, argument: str) -> bool:
    return argument in inspect.signature(getattr(flash_attn, name)).parameters


@pytest.mark.parametrize("name", POSITIONAL)
def test_parameters_are_those_of_flash_attention(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    positional = [key for key, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL[name].split()
    assert set(KEYWORDS[name].split()) <= parameters.keys()
    assert set(flash_attn.__all__) >= {name}


UNSUPPORTED: dict[str, Any] = {
    "dropout_p": 0.1,
    "alibi_slopes": tensor(HEADS),
    "qv": tensor(B, 3, HEADS, DIM),
    "attention_chunk": 64,
    "seqused_q": ints(1, 2),
    "rotary_cos": tensor(64, 16),
    "rotary_sin": tensor(64, 16),
    "rotary_seqlens": ints(1, 2),
    "cache_leftpad": ints(0, 1),
}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, key) for name in POSITIONAL for key in UNSUPPORTED if has(name, key)]
)
def test_arguments_without_a_kernel_are_refused(name: str, argument: str, recorded: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name} supports only {argument}="):
        call(name, **{argument: UNSUPPORTED[argument]})
    assert not recorded.problems


@pytest.mark.parametrize("name", POSITIONAL)
def test_arguments_that_only_tune_change_nothing(name: str, recorded: Any) -> None:
    tuning = {
        "dropout_p": 0,
        "deterministic": True,
        "num_splits": 3,
        "pack_gqa": True,
        "sm_margin": 4,
        "rotary_interleaved": False,
    }
    call(name)
    call(name, **{key: value for key, value in tuning.items() if has(name, key)})
    assert len({(p.family, p.mask, p.softmax_scale) for p in recorded.problems}) == 1


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("flash_attn_func", {"window_size": 3}, ValueError, "window_size must be a pair"),
    ("flash_attn_func", {"softmax_scale": 0.0}, ValueError, "softmax_scale must be positive"),
    ("flash_attn_func", {"softcap": -1.0}, ValueError, "softcap must be at least 0"),
    ("flash_attn_func", {"causal": None}, TypeError, "causal must be"),
    ("flash_attn_func", {"q": tensor(3, HEADS, DIM)}, ValueError, r"q must have shape \[batch, seqlen"),
    ("flash_attn_func", {"k_descale": torch.ones(B, KV_HEADS)}, NotImplementedError, "k_descale must be the same"),
    ("flash_attn_func", {"out": tensor(B, 4, HEADS, DIM)}, ValueError, "out must have shape"),
    ("flash_attn_varlen_func", {"max_seqlen_q": None}, ValueError, "max_seqlen_q must be given"),
    ("flash_attn_varlen_func", {"cu_seqlens_k": None}, ValueError, "cu_seqlens_k must be given"),
    ("flash_attn_varlen_func", {"seqused_k": ints(1, 2), "softcap": 2.0}, NotImplementedError, "seqused_k=None"),
    ("flash_attn_with_kvcache", {"softcap": 2.0}, NotImplementedError, "KV cache supports only softcap=0.0"),
    ("flash_attn_with_kvcache", {"k": tensor(B, 1, KV_HEADS, DIM)}, ValueError, "k and v must be given together"),
    ("flash_attn_with_kvcache", {"block_table": ints(1), "page_table": ints(1)}, ValueError, "only one of block_table"),
    ("flash_attn_with_kvcache", {"q": tensor(3, 1, HEADS, DIM)}, ValueError, "request for each of the 3 requests"),
    (
        "flash_attn_with_kvcache",
        {"block_table": ints(0, 1).view(2, 1), "cache_batch_idx": ints(0, 1)},
        ValueError,
        "cache_batch_idx must be None",
    ),
    (
        "flash_attn_with_kvcache",
        {"k": tensor(B, 1, KV_HEADS, DIM), "v": tensor(B, 1, KV_HEADS, DIM), "cache_seqlens": None},
        ValueError,
        "cache_seqlens must be given",
    ),
    ("flash_attn_with_kvcache", {"v_cache": tensor(B, 128, KV_HEADS, DIM)}, ValueError, "same first two sizes"),
    (
        "flash_attn_with_kvcache",
        {"cache_batch_idx": ints(0, 1, 1), "cache_seqlens": ints(5, 6, 7)},
        ValueError,
        r"cache_batch_idx must have shape \[batch=2\], got \(3,\)",
    ),
    (
        "flash_attn_with_kvcache",
        {"block_table": ints(0, 1, 1).view(3, 1), "cache_seqlens": ints(5, 6, 7)},
        ValueError,
        r"block_table must have shape \[batch=2, pages_per_request\], got \(3, 1\)",
    ),
]


@pytest.mark.parametrize(("name", "changes", "error", "text"), REFUSED)
def test_wrong_arguments_are_named(
    name: str, changes: dict[str, Any], error: type[Exception], text: str, recorded: Any
) -> None:
    with pytest.raises(error, match=text):
        call(name, **changes)
    assert not recorded.problems


MASKS: list[tuple[dict[str, Any], MaskKind, int]] = [
    ({}, MaskKind.FULL, -1),
    ({"window_size": (None, None)}, MaskKind.FULL, -1),
    ({"window_size": (-1, 2)}, MaskKind.FULL, -1),  # three queries have two keys behind the first one's
    ({"causal": True}, MaskKind.CAUSAL, -1),
    ({"window_size": (-1, 0)}, MaskKind.CAUSAL, -1),
    ({"causal": True, "window_size": (-1, 5)}, MaskKind.CAUSAL, -1),
    ({"causal": True, "window_size": (5, 5)}, MaskKind.SLIDING_WINDOW, 5),
    ({"window_size": (5, 0)}, MaskKind.SLIDING_WINDOW, 5),
    ({"window_size": (5, -1)}, MaskKind.LOCAL, 5),
    ({"window_size": (-1, 1)}, MaskKind.LOCAL, -1),
    ({"window_size": (5, 1)}, MaskKind.LOCAL, 5),
]


@pytest.mark.parametrize(("options", "kind", "left"), MASKS)
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_window_size_and_causal_are_a_mask(
    name: str, options: dict[str, Any], kind: MaskKind, left: int, recorded: Any
) -> None:
    call(name, **options)
    assert (recorded.problems[-1].mask.kind, recorded.problems[-1].mask.window_left) == (kind, left)


def test_short_causal_calls_over_a_cache_run_decode_kernels(recorded: Any) -> None:
    family = {
        (1, HEADS, KV_HEADS, True, DIM): Family.DECODE,
        (1, HEADS, KV_HEADS, False, DIM): Family.DECODE,  # one query sees all keys anyway
        (3, HEADS, KV_HEADS, True, DIM): Family.DECODE,
        (3, HEADS, KV_HEADS, False, DIM): Family.PREFILL,
        (32, HEADS, KV_HEADS, True, DIM): Family.DECODE,
        (33, HEADS, KV_HEADS, True, DIM): Family.PREFILL,
        (1, HEADS, KV_HEADS, True, 72): Family.PREFILL,  # decode has no kernel for this head dim
    }
    for (q_len, heads, kv_heads, causal, dim), expected in family.items():
        k = tensor(B, 64, kv_heads, dim)
        call("flash_attn_with_kvcache", q=tensor(B, q_len, heads, dim), k_cache=k, v_cache=k.clone(), causal=causal)
        assert recorded.problems[-1].family is expected, (q_len, causal, dim)


def test_short_calls_over_values_narrower_than_keys_run_decode_kernels(recorded: Any) -> None:
    caches = dict(k_cache=tensor(B, 64, KV_HEADS, 192), v_cache=tensor(B, 64, KV_HEADS, 128))
    call("flash_attn_with_kvcache", q=tensor(B, 1, HEADS, 192), causal=True, **caches)
    assert recorded.problems[-1].family is Family.DECODE


@pytest.mark.parametrize(("capacity", "page_size"), [(64, 64), (4096, 1024), (96, 32), (33, 1)])
def test_a_contiguous_cache_has_the_largest_pages_that_divide_it(capacity: int, page_size: int, recorded: Any) -> None:
    k = tensor(B, capacity, KV_HEADS, DIM)
    call("flash_attn_with_kvcache", k_cache=k, v_cache=k.clone(), causal=True)
    assert recorded.problems[-1].key.shape[2] == page_size
    assert recorded.problems[-1].key.data_ptr() == k.data_ptr()


def test_keys_of_any_memory_order_are_not_copied(recorded: Any) -> None:
    k = tensor(B, KV_HEADS, 64, DIM).transpose(1, 2)
    call("flash_attn_func", k=k, v=k)
    assert recorded.problems[-1].key.data_ptr() == k.data_ptr()


def test_a_bound_on_the_device_is_not_read(monkeypatch: pytest.MonkeyPatch, recorded: Any) -> None:
    monkeypatch.setattr(torch.Tensor, "item", None)
    monkeypatch.setattr(torch.Tensor, "__int__", None)
    call("flash_attn_varlen_func", max_seqlen_q=ints(3), max_seqlen_k=ints(64))
    assert recorded.problems[-1].max_q_len == 6


def test_a_refused_call_leaves_the_cache_unchanged(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "append_paged_kv_cache", None)
    k = tensor(B, 1, KV_HEADS, DIM)
    with pytest.raises(NotImplementedError, match=r"softcap=0\.0"):
        call("flash_attn_with_kvcache", k=k, v=k, softcap=2.0)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_the_log_sum_exp_has_a_column_for_each_token_of_q(options: dict[str, Any], recorded: Any) -> None:
    """CUDA graphs pad q behind its last request, and a bound on the device is as large as all tokens."""
    q = tensor(16, HEADS, DIM)
    for bound in (3, ints(3)):
        _, lse = call("flash_attn_varlen_func", q=q, max_seqlen_q=bound, return_softmax_lse=True, **options)
        assert lse.shape == (HEADS, 16)
        assert lse.is_contiguous()
        log = recorded.problems[-1].lse
        assert log is None or log.tensor.untyped_storage().nbytes() == 4 * HEADS * 16
