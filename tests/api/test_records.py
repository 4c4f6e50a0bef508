"""The fields of a call have the names of the entry's parameters, and operands are in the fields that name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from helpers.calls import valid_calls

from hopwell import cudnn, decode, mla, prefill
from hopwell._calls.launch import call_arguments
from hopwell._calls.repeat import OperandMap
from hopwell._entries import context as context_entry
from hopwell._entries import cudnn as cudnn_entry
from hopwell._entries import fmha_v2 as fmha_v2_entry
from hopwell._entries import mla as mla_entry
from hopwell._entries import xqa as xqa_entry
from hopwell.kernels.launch.arguments import OPERANDS, DecodeAddresses

RECORDS: list[tuple[Callable[..., Any], type, set[str], set[str]]] = [  # what parameters, and what fields, are besides
    (prefill.trtllm_batch_context_with_kv_cache, context_entry.ContextCall, set(), {"query_dtype"}),
    (prefill.trtllm_fmha_v2_prefill, fmha_v2_entry.FmhaV2Call, set(), set()),
    (
        cudnn.cudnn_batch_prefill_with_kv_cache,
        cudnn_entry.CudnnCall,
        set(),
        {"output_scale"},
    ),
    (decode.trtllm_batch_decode_with_kv_cache, xqa_entry.TrtllmDecodeCall, set(), {"query_dtype"}),
    (mla.trtllm_batch_decode_with_kv_cache_mla, mla_entry.MlaCall, set(), {"query_dtype"}),
]


@pytest.mark.parametrize(
    ("entry", "kind", "parameters", "fields"), RECORDS, ids=lambda part: getattr(part, "__name__", "")
)
def test_a_record_has_a_field_for_each_parameter(
    entry: Callable[..., Any], kind: Any, parameters: set[str], fields: set[str]
) -> None:
    assert set(inspect.signature(entry).parameters) - set(kind._fields) == parameters
    assert set(kind._fields) - set(inspect.signature(entry).parameters) == fields
    assert not kind._field_defaults


def test_what_decode_adds_to_xqa_has_defaults() -> None:
    others = set(xqa_entry.XqaCall._fields) - set(inspect.signature(decode.xqa_batch_decode_with_kv_cache).parameters)
    assert others == set(xqa_entry.XqaCall._field_defaults)


def test_a_record_lacks_nothing() -> None:
    with pytest.raises(TypeError, match="qkv"):
        call_arguments(fmha_v2_entry.FmhaV2Call, {"query": None})


PLACES = (prefill._CONTEXT, prefill._FMHA_V2, cudnn._CUDNN, decode._XQA, decode._TRTLLM, mla._MLA)


@pytest.mark.parametrize("calls", PLACES, ids=("context", "fmha_v2", "cudnn", "xqa", "trtllm", "mla"))
def test_operands_lie_in_arguments(calls: Any) -> None:
    for operand, names in calls.operand_map.operands.items():
        assert operand in {*OPERANDS, *DecodeAddresses._fields}
        assert set([names] if isinstance(names, str) else names) <= set(calls.operand_map.tensors)


def test_an_argument_at_another_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    places = prefill._CONTEXT.operand_map
    swapped = [*places.tensors]
    swapped[3], swapped[4] = swapped[4], swapped[3]
    monkeypatch.setattr(prefill._CONTEXT, "operand_map", OperandMap(tuple(swapped), places.operands))
    with pytest.raises(AssertionError, match="operand kv_lens of the kernel does not lie in seq_lens"):
        prefill.trtllm_batch_context_with_kv_cache(**valid_calls.form(valid_calls.CONTEXT, "stacked-HND"))
