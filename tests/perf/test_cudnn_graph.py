"""cuDNN's graph for measurements of e4m3 prefill, on a stand-in for cuDNN's frontend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hopwell.perf.prefill_candidates import PREFILL
from hopwell.perf.prefill_workloads import Prefill, Tensors
from hopwell.perf.quantized import BF16, E4M3, MAX_BYTE_ERROR

CANDIDATE = PREFILL["cuDNN fp8 graph"]
SMALL = Prefill("small", "2 requests", (20, 20), (20, 20), 4, 2, 64, 64, q_dtype=E4M3, kv_dtype=E4M3)
STREAM = 7


class UnsupportedError(Exception): ...


def setter(field: str) -> Callable[[Any, Any], Any]:
    """Return a method that sets a field and returns the object."""

    def set_field(self: Any, value: Any) -> Any:
        setattr(self, field, value)
        return self

    return set_field


@dataclass(eq=False)
class Declared:
    """A tensor of a graph, with the frontend's interface: each setter returns it."""

    dim: Any = None
    stride: Any = None
    data_type: Any = None
    name: str = ""
    is_output: bool = False

    set_output, set_dim, set_stride, set_data_type = map(setter, ("is_output", "dim", "stride", "data_type"))

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the memory layout that cuDNN assumes, from the declaration alone."""
        assert data.dtype is self.data_type
        return data.as_strided(self.dim, self.stride)


class Graph:
    """Computes attention in float32 on the declared tensors, and refuses outputs of other types."""

    def __init__(self, output: torch.dtype, **options: Any) -> None:
        self.output, self.handle, self.plans = output, options["handle"], None

    def tensor(self, **options: Any) -> Declared:
        return Declared(**options)

    def sdpa_fp8(self, *, attn_scale: float, use_causal_mask: bool, generate_stats: bool, **inputs: Declared) -> Any:
        assert not generate_stats
        self.inputs, self.attn_scale, self.is_causal = inputs, attn_scale, use_causal_mask
        self.outputs = [Declared() for _ in range(4)]
        return tuple(self.outputs)

    def build(self, modes: list[str]) -> None:
        assert [each.is_output for each in self.outputs] == [True, False, False, False]
        if self.outputs[0].data_type is not self.output:
            raise UnsupportedError
        self.plans = modes

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[Declared, torch.Tensor], workspace: torch.Tensor, handle: Any) -> None:
        assert self.plans == ["A", "FALLBACK"]
        assert workspace.numel()
        assert handle is self.handle
        assert handle.stream == STREAM
        x = {name: each.of(pack[each]).float() for name, each in self.inputs.items()}
        q, k, v = (x[name] * x[f"descale_{name}"] for name in "qkv")
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = q @ k.transpose(2, 3) * self.attn_scale
        if self.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        weights = (scores - scores.amax(3, keepdim=True)).exp()
        narrow = (weights * x["scale_s"]).to(E4M3).float()
        out = narrow @ v * x["descale_s"] / weights.sum(3, keepdim=True) * x["scale_o"]
        [written] = [data for each, data in pack.items() if each is self.outputs[0]]
        self.outputs[0].of(written).copy_(out)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an installer of a cuDNN whose card supports one output type for e4m3."""

    def install(output: torch.dtype) -> None:
        modes, types = {"A": "A", "FALLBACK": "FALLBACK"}, {"FP8_E4M3": E4M3, "BFLOAT16": BF16, "FLOAT": torch.float32}
        fake = SimpleNamespace(
            data_type=SimpleNamespace(**types),
            heur_mode=SimpleNamespace(**modes),
            cudnnGraphNotSupportedError=UnsupportedError,
            create_handle=lambda: SimpleNamespace(stream=0),
            set_stream=lambda handle, stream: setattr(handle, "stream", stream),
            pygraph=lambda **options: Graph(output, **options),
        )
        monkeypatch.setitem(sys.modules, "cudnn", fake)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))

    return install


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("output", [BF16, E4M3])
def test_the_graph_is_attention_of_the_requests(cards: Any, output: torch.dtype, causal: bool) -> None:
    cards(output)
    t = Tensors(replace(SMALL, causal=causal), "cpu")
    out = CANDIDATE(t)()
    assert out.dtype is output
    assert out.shape == t.output().shape
    assert t.error(out) < MAX_BYTE_ERROR


def test_what_cudnn_refuses_is_said(cards: Any) -> None:
    cards(torch.float16)
    with pytest.raises(UnsupportedError):
        CANDIDATE(Tensors(SMALL, "cpu"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(q_dtype=BF16, kv_dtype=BF16), "e4m3 only"),
        (dict(q_dtype=BF16), "e4m3 only"),
        (dict(kv_lens=(20, 30)), "one length"),
        (dict(window_left=3), "without window"),
        (dict(sinks=True), "sinks"),
    ],
)
def test_other_cases_are_not_served(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(NotImplementedError, match=why):
        CANDIDATE(Tensors(replace(SMALL, **changes), "cpu"))
