"""SGLang on a CPU with hopwell as its attention. The import lets SGLang import without its kernels.

``python tests/clients/sglang_engine.py MODEL BACKEND FIRST`` prints the greedy tokens of each prompt as JSON in its
last line. MODEL is a folder. FIRST is "engine" for SGLang's ``Engine`` with its scheduler process, or a number for a
``ModelRunner`` in this process. With a number above 0, this many tokens of each prompt are a batch of their own. SGLang
keeps the settings of a model for the process, so tests start one process for each model.
"""

from __future__ import annotations

import json
import os
import sys
import types
from array import array
from importlib import metadata
from typing import Any

import torch

metadata.version("sglang")  # tests skip this module where it is missing
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

PROMPTS = [[3, 14, 15, 92, 65, 35], list(range(20, 43)), [7, 8], list(range(60, 30, -1))]
NEW_TOKENS = 6
PAGE_SIZE = 16


class _Kernels(types.ModuleType):
    """SGLang's CPU kernels, which its imports name and the tests do not call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} is not installed")

        return missing


_library = torch.library.Library("torchvision", "FRAGMENT")
if torch.version.cuda is None:  # torchvision's extension, which defines them, does not load there
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.modules.setdefault("sgl_kernel", _Kernels("sgl_kernel"))


def _settings(model: str, backend: str) -> dict[str, Any]:
    return dict(
        model_path=model,
        device="cpu",
        dtype="bfloat16",
        attention_backend=backend,
        page_size=PAGE_SIZE,
        max_total_tokens=1024,
        max_running_requests=8,
        context_length=128,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
    )


def _runner(model: str, backend: str) -> Any:
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    one_batch.get_tokenizer = lambda *args, **kwargs: None
    server_args = one_batch.ServerArgs(**_settings(model, backend), disable_radix_cache=True)
    server_args.resolve_once()
    one_batch.publish(
        server_args,
        role="scheduler",
        ranks=one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0), gpu_id=0),
    )
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server_args, one_batch.PortArgs.init_new(server_args), 0, 0)
    return runner


def _request(number: int, prompt: list[int], first: int) -> Any:
    from sglang.benchmark.one_batch import Req, SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS)
    sampling.normalize(None)
    request = Req(
        rid=str(number), origin_input_text="", origin_input_ids=array("q", prompt[:first]), sampling_params=sampling
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.extend_end = first
    return request


def generate(model: str, backend: str, first: int = 0) -> list[list[int]]:
    """Return the greedy tokens of each prompt. With ``first`` this many tokens of a prompt are a batch of their own."""
    runner = _runner(model, backend)
    requests = [_request(i, prompt, min(first, len(prompt) - 1) or len(prompt)) for i, prompt in enumerate(PROMPTS)]
    if first:
        runner.extend(requests)
        for request, prompt in zip(requests, PROMPTS, strict=True):
            request.prefix_len = len(request.full_untruncated_fill_ids)
            request.full_untruncated_fill_ids.extend(prompt[request.prefix_len :])
            request.logprob_start_len = -1
            request.extend_end = len(prompt)
    token, _, batch = runner.extend(requests)
    tokens = [[one] for one in token.tolist()]
    for _ in range(NEW_TOKENS - 1):
        token, _ = runner.decode(token, batch)
        for row, one in zip(tokens, token.tolist(), strict=True):
            row.append(one)
    return tokens


def serve(model: str, backend: str) -> list[list[int]]:
    """Return the greedy tokens of each prompt from SGLang's ``Engine``. Its processes import this module.

    The prompts come twice. The second time their pages are in the radix cache.
    """
    from sglang import Engine

    # SGLang expands a cached prefix of MLA with Triton kernels, which need a GPU. Absorbed attention does without them.
    engine = Engine(**_settings(model, backend), chunked_prefill_size=PAGE_SIZE, disable_chunked_prefix_cache=True)
    greedy = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    try:
        first, second = (
            [list(one["output_ids"]) for one in engine.generate(input_ids=PROMPTS, sampling_params=greedy)]
            for _ in range(2)
        )
    finally:
        engine.shutdown()
    return first + second


if __name__ == "__main__":
    _model, _backend, _first = sys.argv[1:]
    print(json.dumps(serve(_model, _backend) if _first == "engine" else generate(_model, _backend, int(_first))))
