"""``LLM.generate`` with hopwell's backends. Environments: vllm-0.32, vllm-newest."""

from __future__ import annotations

import pathlib

import pytest

pytest.importorskip("vllm", reason="runs in the environments vllm-0.32 and vllm-newest of environments.toml")

from tests.clients import vllm_engine

pytestmark = pytest.mark.clients

# Tokens that bf16 rounding cannot tell from the best one.
TIE = 3
MODELS = {
    "Llama": ("HOPWELL", "Llama", dict(num_key_value_heads=2, head_dim=64)),
    "Mistral": ("HOPWELL", "Mistral", dict(num_key_value_heads=2, head_dim=64, sliding_window=16)),
    "DeepseekV2": (
        "HOPWELL_MLA",
        "DeepseekV2",
        dict(
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            head_dim=64,
            first_k_dense_replace=2,
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_model_s(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, kind, sizes = MODELS[name]
    vllm_engine.install(monkeypatch)
    model = vllm_engine.save(tmp_path, kind, **sizes)
    tokens = vllm_engine.generate(tmp_path, backend)
    assert all(len(one) == vllm_engine.NEW_TOKENS for one in tokens)
    differences = [
        vllm_engine.first_difference(model, prompt, one)
        for prompt, one in zip(vllm_engine.PROMPTS, tokens, strict=True)
    ]
    assert all(steps is None or steps <= TIE for steps in differences), differences
