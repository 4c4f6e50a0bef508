from __future__ import annotations

import os

# vLLM chooses its platform when it is imported. These tests run on CPU tensors, without vLLM's CUDA extension.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
