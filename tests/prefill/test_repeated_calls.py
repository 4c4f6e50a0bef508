"""Checks that the short path of repeated calls keeps: overlap of memory, and the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.batches.prefill import Batch
from helpers.calls.entries import KV_LENS, Q_LENS, context_arguments, cudnn_arguments, fmha_v2_arguments

import hopwell

OPERANDS = ("query", "key", "value")


class Form(NamedTuple):
    """A way to call an entry, with a batch's query, K and V."""

    entry: Callable[..., Any]
    operands: tuple[torch.Tensor, ...]
    arguments: Callable[..., dict[str, Any]]

    def output(self, *operands: torch.Tensor, **more: Any) -> torch.Tensor:
        result = self.entry(**self.arguments(*(operands or self.operands)) | more)
        return result[0] if isinstance(result, tuple) else result


def context(data: Batch) -> Form:
    *pools, table = data.pages(16)
    return Form(
        hopwell.trtllm_batch_context_with_kv_cache,
        (data.q, *pools),
        lambda q, k, v: context_arguments(data, (k, v), table, query=q),
    )


def fmha_v2(data: Batch) -> Form:
    key, value, _ = data.ragged()
    return Form(
        hopwell.trtllm_fmha_v2_prefill,
        (data.q, key, value),
        lambda q, k, v: fmha_v2_arguments(data, (q, k, v), "SEPARATE_Q_K_V"),
    )


def cudnn(data: Batch) -> Form:
    *pools, table = data.pages(16)
    return Form(
        hopwell.cudnn_batch_prefill_with_kv_cache,
        (data.q, *pools),
        lambda q, k, v: cudnn_arguments(data, k, v, q=q, block_tables=table),
    )


FORMS = (context, fmha_v2, cudnn)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("form_of", FORMS, ids=lambda form_of: form_of.__name__)
def test_an_output_next_to_an_input_and_over_it(form_of: Callable[[Batch], Form], operand: str, device: str) -> None:
    """An output may end at an input's first byte, and vice versa, but must not overlap it by even one unit of 16 bytes.

    A refused call writes nothing.
    """
    data = Batch([20, 9], [90, 9], device=device)
    form = form_of(data)
    operands, place = list(form.operands), OPERANDS.index(operand)
    given, size = operands[place], data.q.numel()
    memory = torch.cat((given.new_zeros(size), given.flatten(), given.new_zeros(size)))
    operands[place] = memory[size:-size].view(given.shape)

    def output_at(begin: int) -> torch.Tensor:
        return form.output(*operands, out=memory[begin : begin + size].view(data.q.shape))

    behind = size + given.numel()
    for begin in (0, behind, 0, behind):
        data.expected().check(output_at(begin))
    before = memory.clone()
    for begin in (8, behind - 8, size):
        with pytest.raises(ValueError, match="out must not share memory"):
            output_at(begin)
    assert torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("form_of", FORMS, ids=lambda form_of: form_of.__name__)
def test_another_device_than_the_current_one(form_of: Callable[[Batch], Form]) -> None:
    """Equal calls on the current device alternate with it."""
    batches = [Batch(Q_LENS, KV_LENS, device=f"cuda:{index}", seed=index) for index in range(2)]
    forms = [form_of(data) for data in batches]
    for _ in range(3):
        for data, form in zip(batches, forms, strict=True):
            out = form.output()
            assert out.device == data.q.device
            data.expected().check(out)
    assert torch.cuda.current_device() == 0
