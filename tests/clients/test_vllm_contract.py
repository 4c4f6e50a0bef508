"""The backend HOPWELL with vLLM's metadata and caches, beside float64. Environments: vllm-0.32, vllm-newest.

``VLLM_TARGET_DEVICE=cpu`` lets vLLM start without its CUDA extension.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="runs in the environments vllm-0.32 and vllm-newest of environments.toml")

import torch

from tests.clients.vllm_batches import CACHES, REQUESTS, Batch, run

pytestmark = pytest.mark.clients

FEATURES = {"plain": {}, "window": dict(window=7), "sinks": dict(sinks=True), "non-causal": dict(causal=False)}
# e4m3 queries round softmax weights to e4m3.
TOLERANCE = {"auto": 0.01, "fp8": 0.06, "nvfp4": 0.02}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_batches(kind: str, order: str, cache: str, feature: str) -> None:
    batch = Batch(kind, order, cache, **FEATURES[feature])
    out = run(batch)
    expected = batch.expected(batch.layer())
    torch.testing.assert_close(out[: batch.tokens].double(), expected, atol=TOLERANCE[cache], rtol=TOLERANCE[cache])
