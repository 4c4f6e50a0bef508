"""Custom ops of the entry points: ``torch.ops.hopwell.xqa_batch_decode_with_kv_cache`` and others.

``torch.compile`` and ``torch.export`` put these ops into graphs in place of calls of the entry points. Models need not
import this module: it is imported when an entry is first traced. Import it to call an op by its name, or to load a
graph that contains one.

An op has the arguments of its entry, with these differences:

* All arguments are positional or keywords, in the order of the entry.
* A cache is two arguments, ``k_cache`` and ``v_cache`` for ``kv_cache``. ``v_cache`` is None for a stacked cache.
* A scale is two arguments, a float and a tensor: ``bmm1_scale`` and ``bmm1_scale_tensor``. The tensor counts if given.
* ``qkv`` is three arguments, ``q``, ``k`` and ``v``. ``q`` alone is packed QKV, and ``k`` without ``v`` holds both.
* Sinks are one tensor. A dtype is a torch.dtype.
* There is no workspace: a call allocates it, and a CUDA graph keeps it in the graph's own memory.
* Results have ops of their own. ``NAME`` returns the output, ``NAME_lse`` the output and the log-sum-exp, and
  ``NAME_out`` writes ``out`` and, if given, ``lse``. ``trtllm_fmha_v2_prefill_stats`` and ``_out_stats`` return
  statistics, and ``trtllm_batch_context_with_kv_cache_out_nvfp4`` writes an NVFP4 output.

Ops have no backward. Backward through an op raises RuntimeError. An op that writes its arguments raises it at once if
gradients are enabled and an input requires one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hopwell import cudnn, decode, mla, page, prefill
from hopwell._ops import results
from hopwell._ops.generated import Entry, Variant

__all__ = ["TRACED"]

NAMESPACE = "hopwell"


def _with_lse(flag: str = "return_lse") -> tuple[Variant, ...]:
    written = {"out": "out", "lse": "lse", flag: "lse is not None"}
    return (
        Variant("", "Tensor", "first({0})", given={flag: "False"}),
        Variant("_lse", "(Tensor, Tensor)", "{0}", given={flag: "True"}),
        Variant("_out", "()", "", ("Tensor(a!) out", "Tensor(b!)? lse=None"), written),
    )


_STATS = "save_softmax_stats"
_WITH_STATS = (
    Variant("", "Tensor", "first({0})", given={_STATS: "False"}),
    Variant("_stats", "(Tensor, Tensor)", "{0}", given={_STATS: "True"}),
    Variant("_out", "()", "", ("Tensor(a!) out",), {"out": "out", _STATS: "False"}),
    Variant("_out_stats", "Tensor", "{0}[1]", ("Tensor(a!) out",), {"out": "out", _STATS: "True"}),
)
_NVFP4 = Variant(
    "_out_nvfp4",
    "()",
    "",
    ("Tensor(a!) out", "Tensor(b!) out_scale", "SymInt scale_start_index=0", "Tensor(c!)? lse=None"),
    {"out": "FP4Tensor(out, out_scale, scale_start_index)", "lse": "lse", "return_lse": "lse is not None"},
)
_CALL = "call(ops, inputs, new, out, lse, return_lse)"
ENTRIES = (
    Entry(
        prefill.trtllm_batch_context_with_kv_cache,
        (*_with_lse(), _NVFP4),
        "call_context(ops, inputs, new, out, lse, return_lse, nvfp4)",
        results.context_results,
        results.no_workspace,
        first="nvfp4 = is_nvfp4(out, out_dtype)",
    ),
    Entry(
        prefill.trtllm_fmha_v2_prefill,
        _WITH_STATS,
        f"call_fmha_v2(ops, inputs, out, {_STATS})",
        results.fmha_v2_results,
        results.q_workspace,
    ),
    Entry(
        cudnn.cudnn_batch_prefill_with_kv_cache,
        _with_lse(),
        "call_cudnn(ops, inputs, new, out, lse, return_lse)",
        results.cudnn_results,
        results.q_workspace,
    ),
    Entry(decode.xqa_batch_decode_with_kv_cache, _with_lse(), _CALL, results.xqa_results, results.xqa_workspace),
    Entry(
        decode.trtllm_batch_decode_with_kv_cache,
        _with_lse(),
        _CALL,
        results.context_results,
        results.trtllm_decode_workspace,
    ),
    Entry(mla.trtllm_batch_decode_with_kv_cache_mla, _with_lse(), _CALL, results.mla_results, results.mla_workspace),
    *(
        Entry(
            append,
            (Variant("", "()", ""),),
            "call_in_place(ops, inputs)",
            aliases=dict(paged_k_cache="a", paged_v_cache="b", k_cache_sf="c", v_cache_sf="d"),
        )
        for append in (page.append_paged_kv_cache, page.append_paged_kv_cache_with_slot_mapping)
    ),
    Entry(
        page.get_batch_indices_positions,
        (Variant("", "(Tensor, Tensor)", "{0}"),),
        "ops.out(*inputs)",
        results.batch_indices_positions,
    ),
    Entry(page.get_seq_lens, (Variant("", "Tensor", "{0}"),), "ops.out(*inputs)", results.seq_lens),
)

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # ops live as long as this object


def _register(entry: Entry, variant: Variant) -> torch._ops.OpOverload:
    """Define an op and return it."""
    schema = entry.schema(variant)
    name, writes = schema.partition("(")[0], "!)" in schema
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, entry.implementation(variant), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", entry.fake(variant), lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if writes:
        _LIBRARY.impl(name, _refusing_gradients(op), "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(op, _backward(name), setup_context=_keep_inputs, lib=_LIBRARY)
    return op


def _message(name: str) -> str:
    return (
        f"hopwell is inference only: {NAMESPACE}::{name} has no backward; use torch.no_grad(), torch.inference_mode() "
        "or detach()"
    )


def _refusing_gradients(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the autograd implementation of an op that writes its arguments, which can have no gradients."""

    def autograd(keys: Any, *args: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **keywords):
            raise RuntimeError(_message(op._opname))
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **keywords)

    return autograd


def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.inputs = inputs


def _backward(name: str) -> Callable[..., Any]:
    """Return a backward that raises when it runs.

    Compilers trace it together with the forward, so it raises in an op. The op takes a gradient of the results, because
    compilers would move an op of inputs alone into the forward.
    """

    def backward(ctx: Any, *gradients: Any) -> Any:
        of_result = next(gradient for gradient in gradients if gradient is not None)

        def of_input(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return torch.ops.hopwell.no_gradient(value, of_result, _message(name)) if is_float else None

        return tuple(of_input(value) for value in ctx.inputs)

    return backward


def _no_gradient(value: torch.Tensor, of_result: torch.Tensor, message: str) -> torch.Tensor:
    raise RuntimeError(message)


def _fake_gradient(value: torch.Tensor, of_result: torch.Tensor, message: str) -> torch.Tensor:
    return torch.empty_like(value)


_LIBRARY.define("no_gradient(Tensor value, Tensor of_result, str message) -> Tensor")
_LIBRARY.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::no_gradient", _fake_gradient, lib=_LIBRARY)


def _traced(entry: Entry) -> Callable[..., Any]:
    ops = [_register(entry, variant) for variant in entry.variants]
    return entry.traced(results.Ops(*ops))


# By the name of an entry, the function that Dynamo traces in place of it.
TRACED = {entry.name: _traced(entry) for entry in ENTRIES}
