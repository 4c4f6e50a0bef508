"""Valid calls with one or two arguments broken at random: only the documented errors, and they name what was broken."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calls.valid_calls import FORMS, Form, data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hopwell import FP4Tensor

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
# Errors may name either argument of an inconsistent pair.
PARTNERS = {
    "query": ("kv_cache", "out", "lse", "sinks", "q_len_per_req", "block_tables", "causal_seqlens_kv_global"),
    "kv_cache": ("kv_block_scales", "kv_cache_sf", "query"),
    "qkv": ("sinks", "out"),
    "input_layout": ("qkv", "block_tables"),
    "block_tables": ("uses_shared_paged_kv_idx", "input_layout", "k_cache", "v_cache", "batch_offsets_k"),
    "batch_size": ("block_tables", "seq_lens", "cum_seq_lens_q"),
    "kv_layout": ("kv_cache", "kv_block_scales", "kv_cache_sf", "KV heads"),
    "uses_shared_paged_kv_idx": ("block_tables",),
    "q_len_per_req": ("mask", "block_tables", "seq_lens"),
    "q_cu_seq_lens": ("mask", "q_len_per_req", "block_tables", "seq_lens"),
    "cum_seq_lens_q": ("query", "max_q_len", "block_tables", "seq_lens", "out", "lse"),
    "mask": ("q_len_per_req",),
    "sparse_mla_top_k": ("block_tables",),
    "kv_lora_rank": ("query", "kv_cache", "out"),
    "qk_rope_head_dim": ("kv_lora_rank", "query", "kv_cache"),
    "q": ("k_cache", "v_cache", "lse", "out"),
    "k_cache": ("v_cache", "q"),
    "v_cache": ("k_cache", "q"),
    "actual_seq_lens_q": ("actual_seq_lens_kv", "block_tables", "batch_offsets_q", "lse"),
    "out_dtype": ("query", "out", "o_sf_scale", "o_sf_vec_size"),
    "out": ("query", "o_sf_scale"),
    "batch_offsets_q": ("batch_offsets_o",),
    "batch_offsets_o": ("batch_offsets_q",),
    "batch_offsets_k": ("batch_offsets_v",),
    "batch_offsets_v": ("batch_offsets_k",),
    "max_token_per_sequence": ("lse",),
    "mask_mode": ("window_left", "chunked_attention_size"),
    "window_left": ("chunked_attention_size",),
}

garbage = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(
        (math.nan, math.inf, 1e39, 10**400, 10**5000, 1j, b"HND", object(), int, torch.float16, torch.device("cpu"))
    ),
    st.text(max_size=8),
    st.sampled_from(
        ("", "HND", "nhd", "NHD", "causal", "padding", "custom", "alibi", "nvfp4", "float32", "cudnn", "PACKED_QKV")
    ),
    st.sampled_from(((), [], {}, (None, None), [1, 2, 3], range(3), (torch.zeros(2), torch.zeros(2)))),
    st.sampled_from((np.zeros(3), np.int64(3), np.float32(0.5), np.bool_(True))),
    st.sampled_from((torch.tensor(1.0), torch.tensor(3), torch.zeros(0), torch.zeros(3, 4, 64))),
    st.just(torch.zeros(2, 2).to_sparse()),
    st.builds(lambda: FP4Tensor(data(8, 4, 32, dtype=torch.uint8), data(128, 16, dtype=torch.float8_e4m3fn))),
)


def resized(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    sizes = list(tensor.shape)
    if not sizes:
        return tensor
    sizes[dim % len(sizes)] = size
    return torch.zeros(sizes, dtype=tensor.dtype)


def spread(tensor: torch.Tensor, dim: int, gap: int) -> torch.Tensor:
    """Return a tensor of the same shape with elements skipped in memory in one dimension."""
    if not tensor.dim():
        return tensor
    sizes = list(tensor.shape)
    sizes[dim % len(sizes)] += gap
    return torch.zeros(sizes, dtype=tensor.dtype).narrow(dim % len(sizes), 0, tensor.shape[dim % len(sizes)])


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0]


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    return torch.zeros(tensor.numel() + by, dtype=tensor.dtype)[by:].view(tensor.shape)


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype).expand(tensor.shape)


Change = Callable[[torch.Tensor], torch.Tensor]
dims = st.integers(-5, 4)
changes: st.SearchStrategy[Change] = st.one_of(
    st.sampled_from(DTYPES).map(lambda dtype: lambda t: torch.zeros(t.shape, dtype=dtype)),
    st.just(lambda t: t.to("meta")),
    st.just(lambda t: t[None]),
    st.just(lambda t: t[0] if t.dim() and t.shape[0] else t),
    st.just(lambda t: t.flatten()),
    st.just(lambda t: t.clone().to_sparse() if t.is_floating_point() and t.element_size() > 1 and t.dim() else t),
    st.just(every_other),
    st.just(expanded),
    st.just(lambda t: t.transpose(0, -1) if t.dim() else t),
    st.tuples(dims, st.sampled_from((0, 1, 2, 3, 5, 7, 16, 24, 96, 100))).map(lambda a: lambda t: resized(t, *a)),
    st.tuples(dims, st.integers(1, 8)).map(lambda a: lambda t: spread(t, *a)),
    st.integers(1, 8).map(lambda by: lambda t: shifted(t, by)),
)


@st.composite
def broken(draw: st.DrawFn, value: Any) -> Any:
    """Return ``value`` with something wrong; inside a tuple possibly only one part of it."""
    if isinstance(value, (tuple, list)) and draw(st.booleans()):
        parts = list(value)
        index = draw(st.integers(0, len(parts) - 1))
        parts[index] = draw(broken(parts[index]))
        return tuple(parts[: draw(st.integers(1, len(parts)))]) if draw(st.integers(0, 4)) == 0 else tuple(parts)
    if isinstance(value, torch.Tensor) and draw(st.integers(0, 3)):
        return draw(changes)(value)
    return draw(garbage)


@st.composite
def broken_calls(draw: st.DrawFn, forms: list[Form], count: int) -> tuple[Form, dict[str, Any], list[str]]:
    form = draw(st.sampled_from(forms))
    arguments = form.build()
    parameters = list(inspect.signature(form.function).parameters.values())
    names = draw(st.lists(st.sampled_from([p.name for p in parameters]), min_size=count, max_size=count, unique=True))
    for name in names:
        default = inspect.signature(form.function).parameters[name].default
        arguments[name] = draw(broken(arguments.get(name, default)))
    return form, arguments, names


def check(form: Form, arguments: dict[str, Any], names: list[str]) -> None:
    entry = form.function.__name__
    try:
        form.function(**arguments)
    except (NotImplementedError, ValueError, TypeError) as caught:
        error, text = type(caught), str(caught)
    else:
        assert form.runs
        return
    assert error in (NotImplementedError, ValueError, TypeError)
    assert len(text) < 500
    if error is NotImplementedError:
        assert text.startswith(f"{entry} ")
        assert "sm_90a" in text
    else:
        blamed = [blame for name in names for blame in (name, *PARTNERS.get(name, ()))]
        assert any(blame in text for blame in blamed), (names, text)


ENTRIES = sorted({form.function.__name__ for form in FORMS})
quick = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("entry", ENTRIES)
@settings(quick, max_examples=400)
@given(draw=st.data())
def test_one_broken_argument(entry: str, draw: st.DataObject) -> None:
    forms = [form for form in FORMS if form.function.__name__ == entry]
    check(*draw.draw(broken_calls(forms, 1)))


@pytest.mark.parametrize("entry", ENTRIES)
@settings(quick, max_examples=120)
@given(draw=st.data())
def test_two_broken_arguments(entry: str, draw: st.DataObject) -> None:
    forms = [form for form in FORMS if form.function.__name__ == entry]
    check(*draw.draw(broken_calls(forms, 2)))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wrong_type_for_each_argument(form: Form) -> None:
    """Every argument refuses an arbitrary object, and the error names exactly this argument.

    FlashInfer's plan may have any class.
    """
    for name in inspect.signature(form.function).parameters:
        error = NotImplementedError if name == "request_order_plan" else TypeError
        with pytest.raises(error, match=rf"\b{name}\b"):
            form.function(**{**form.build(), name: object()})
