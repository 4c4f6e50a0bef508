from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import hopwell.prefill
from hopwell import cudnn, decode, mla
from hopwell._calls import launch
from hopwell._entries.context_by_request import ContextByRequest
from hopwell.kernels.launch.arguments import addresses_of
from hopwell.kernels.problem import AttentionProblem
from hopwell.kernels.registry import IMPLEMENTATIONS

TICKETS = 1 << 40


class RecordingPlan:
    """Stand-in for ``hopwell.kernels.Plan`` that records launches, the subject of these tests."""

    problems: ClassVar[list[AttentionProblem]] = []
    addresses: ClassVar[list[tuple[int, ...]]] = []  # of every launch, the fields of Addresses up to the tickets
    has_work = repeatable = True
    tickets = SimpleNamespace(address=lambda: TICKETS)
    anchor = object()

    def __init__(self, problem: AttentionProblem):
        self.problems.append(problem)

    def execute(self, problem: AttentionProblem, name: Callable[[str], str] = str) -> torch.Tensor:
        out = problem.out
        if out is None:
            out = problem.query.new_empty((*problem.query.shape[:-1], problem.v_dim))
        addresses = addresses_of(self.operands(problem, out))
        self.function(self.anchor, (*addresses, TICKETS))
        return out

    @staticmethod
    def operands(problem: AttentionProblem, out: torch.Tensor | None) -> Mapping[str, torch.Tensor | None]:
        return IMPLEMENTATIONS[problem.family, "sm_90a"][0].operands(problem, out)

    def constants(self, softmax_scale: float, output_scale: float) -> tuple[float, float]:
        return softmax_scale, output_scale

    def function(self, anchor: object, addresses: Sequence[int], *constants: float) -> None:
        assert anchor is self.anchor
        *operands_of_call, tickets = addresses
        assert tickets == TICKETS
        self.addresses.append(tuple(operands_of_call))


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[RecordingPlan]:
    """Return the recording plan, with nothing recorded and no call prepared."""
    monkeypatch.setattr(launch, "Plan", RecordingPlan)
    prefill = [(hopwell.prefill, name) for name in ("_CONTEXT", "_FMHA_V2")]
    for module, calls in (*prefill, (cudnn, "_CUDNN"), (decode, "_XQA"), (decode, "_TRTLLM"), (mla, "_MLA")):
        monkeypatch.setattr(module, calls, launch.Calls(getattr(module, calls).operand_map))
    monkeypatch.setattr(hopwell.prefill, "_CONTEXT_BY_REQUEST", ContextByRequest())
    RecordingPlan.problems.clear()
    RecordingPlan.addresses.clear()
    return RecordingPlan


@pytest.fixture
def launched(recorded: type[RecordingPlan]) -> list[AttentionProblem]:
    """Return the problems that passed the checks and were launched."""
    return recorded.problems
