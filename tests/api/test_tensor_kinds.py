"""Tensors whose memory does not hold their elements are refused by name, in first and repeated calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import FORMS, Form, batched
from torch._subclasses.fake_tensor import FakeTensorMode

from hopwell._calls import repeat


class Logged(torch.Tensor):
    """A tensor subclass with a dispatch of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def without_memory(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(0)
    return value


def conj_view(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex64).conj()


def negated(value: torch.Tensor) -> torch.Tensor:
    return value._neg_view()


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nested": lambda t: torch.nested.nested_tensor([t.clone().float(), t.clone().float()]),
    "jagged": lambda t: torch.nested.nested_tensor([t.clone(), t.clone()], layout=torch.jagged),
    "sparse": lambda t: t.float().to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint8),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "meta": lambda t: t.to("meta"),
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "negated": negated,
    "conjugated": conj_view,
    "subclass": lambda t: t.as_subclass(Logged),
    "without-memory": without_memory,
    "batched": batched,
}
ANY_KIND = ("trtllm_batch_context", "trtllm_fmha", "cudnn")  # a workspace that no kernel reads may be of any kind
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # such tensors are prototypes, or deprecated
CASES = [case for case in FORMS if case.runs]


@pytest.mark.parametrize("guards", ["torch's", "other"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tensor_of_another_kind_is_refused(
    case: Form, kind: str, guards: str, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guards == "other":
        monkeypatch.setattr(repeat, "_torch_guard", lambda *tensors: torch.no_such_guard)
    arguments = case.build()
    arguments["sinks"] = torch.zeros(arguments.get("query", torch.zeros(1, 4, 1)).shape[-2])
    if "cudnn" in str(case) or case.name == "ranks":  # they take none
        del arguments["sinks"]
    any_kind = ("workspace_buffer",) if case.function.__name__.startswith(ANY_KIND) else ()
    given = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and name not in any_kind]
    bad = {}
    for name in given:
        try:
            bad[name] = KINDS[kind](arguments[name])
        except (RuntimeError, ValueError, NotImplementedError):  # torch has no such tensor of this dtype or shape
            continue
    assert bad or kind == "mkldnn"
    for warm in (False, True):
        if warm:
            for _ in range(3):
                case.function(**arguments)
        for name, value in bad.items():
            before = len(recorded.addresses)
            with pytest.raises((TypeError, ValueError), match=name):
                case.function(**{**arguments, name: value})
            assert len(recorded.addresses) == before


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_and_plain_subclasses_are_tensors(case: Form, recorded: Any) -> None:
    class Plain(torch.Tensor):
        pass

    for wrap in (
        lambda t: t.as_subclass(Plain),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
    ):
        arguments = {
            name: wrap(value) if isinstance(value, torch.Tensor) and name != "workspace_buffer" else value
            for name, value in case.build().items()
        }
        for _ in range(3):
            case.function(**arguments)
    assert len(recorded.problems) == 1
