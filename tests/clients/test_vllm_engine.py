"""``LLM.generate`` with hopwell's backends. Environments: vllm-0.32, vllm-newest."""

from __future__ import annotations

import pathlib

import pytest

pytest.importorskip("vllm", reason="runs in the environments vllm-0.32 and vllm-newest of environments.toml")

from tests.clients import vllm_engine
from tests.clients.tiny_models import GQA, MLA, TIE, first_difference, save

pytestmark = pytest.mark.clients

MODELS = {
    "Llama": ("HOPWELL", "Llama", GQA),
    "Mistral": ("HOPWELL", "Mistral", dict(GQA, sliding_window=16)),
    "DeepseekV2": (
        "HOPWELL_MLA",
        "DeepseekV2",
        MLA,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_model_s(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, kind, sizes = MODELS[name]
    vllm_engine.install(monkeypatch)
    model = save(tmp_path, kind, **sizes)
    tokens = vllm_engine.generate(tmp_path, backend)
    assert all(len(one) == vllm_engine.NEW_TOKENS for one in tokens)
    differences = [
        first_difference(model, prompt, one) for prompt, one in zip(vllm_engine.PROMPTS, tokens, strict=True)
    ]
    assert all(steps is None or steps <= TIE for steps in differences), differences
