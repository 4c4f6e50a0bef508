"""vLLM's engine on a CPU with hopwell as its attention: stand-ins for the ops of its extension, and tiny models."""

from __future__ import annotations

import os
import pathlib
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

PROMPTS = [[3, 14, 15, 92, 65, 35], list(range(20, 43)), [7], list(range(60, 30, -1))]
NEW_TOKENS = 6
_library: list[torch.library.Library] = []


def slot_mapping(
    tokens: int,
    padded: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    stride: int,
    slots: torch.Tensor,
    block_size: int = 0,
    *_: Any,
    **others: Any,
) -> None:
    """Fill the slots of a batch, as vLLM's Triton kernel does."""
    block_size = others.get("KV_CACHE_BLOCK_SIZE", block_size)
    slots[tokens:padded] = -1
    for request, (first, last) in enumerate(zip(query_start_loc.tolist(), query_start_loc[1:].tolist(), strict=False)):
        token = positions[first:last]
        slots[first:last] = block_table[request, token // block_size].long() * block_size + token % block_size


def write_latent(
    latent: torch.Tensor,
    rotary: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    **_: Any,
) -> None:
    """Write rows of a 16-bit latent cache, as vLLM's op does."""
    real = slots >= 0
    rows = torch.cat([latent, rotary], -1)[: slots.shape[0]][real].to(cache.dtype)
    cache.view(-1, cache.shape[-1])[slots[real]] = rows


def install(monkeypatch: Any) -> None:
    """Let the CPU platform take the backends that the user names, and define what its extension would bring."""
    import vllm._custom_ops

    if not _library:
        library = torch.library.Library("_C", "FRAGMENT")
        for schema, body in (
            ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
            ("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
        ):
            library.define(schema)
            library.impl(schema.partition("(")[0], body, "CompositeExplicitAutograd")
        _library.append(library)
    monkeypatch.setattr(cpu_triton_utils, "_compute_slot_mapping_kernel_impl", slot_mapping)
    monkeypatch.setattr(vllm._custom_ops, "concat_and_cache_mla", write_latent)

    def backend(cls: Any, selected_backend: AttentionBackendEnum, *args: Any, **kwargs: Any) -> str:
        return selected_backend.get_path()

    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(backend))
    prefill = classmethod(lambda cls, *args, **kwargs: MLAPrefillBackendEnum["HOPWELL"].get_class())
    monkeypatch.setattr(CpuPlatform, "get_mla_prefill_backend_cls", prefill)


def generate(folder: pathlib.Path, backend: str, **options: Any) -> list[list[int]]:
    """Return the greedy tokens of each prompt. Steps of 16 tokens mix chunks of prompts with decodes."""
    llm = LLM(
        str(folder),
        attention_backend=backend,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        compilation_config={"mode": 0, "custom_ops": ["none"]},
        max_model_len=128,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        block_size=16,
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
