"""nano-vllm generates with ``hopwell.flash_attn``. Environment: nano-vllm.

Its scheduler, block manager, prefix cache and model run as they are. Its Triton kernel and the CUDA calls of its runner
have stand-ins for CPU tensors.
"""

from __future__ import annotations

import atexit
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import hopwell.flash_attn

pytestmark = [pytest.mark.clients, pytest.mark.emulator]
pytest.importorskip("transformers")
if importlib.util.find_spec("nanovllm") is None:  # its import needs the stand-ins
    pytest.skip("nano-vllm is not installed", allow_module_level=True)

DIM, LAYERS, NEW, PAGE = 32, 2, 4, 256
NEAR = 0.25  # two bf16 steps of the largest logits
PREFIX = [(7 * i) % 250 + 1 for i in range(PAGE)]
PROMPTS = [[5, 9, 77, 120], list(range(7, 30)), [44]]


class Host(ModuleType):
    """``torch`` without CUDA: memory for eight pages, and no pinned memory."""

    cuda = SimpleNamespace(
        set_device=lambda rank: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
        reset_peak_memory_stats=lambda: None,
        mem_get_info=lambda: (2 * LAYERS * PAGE * 2 * DIM * 2 * 9, 1 << 40),
        memory_stats=lambda: {"allocated_bytes.all.current": 0},
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def set_default_device(device: str) -> None:
        """Leave the default device."""

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)


def store(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Stand-in for the Triton kernel that writes the cache."""
    kept = slots >= 0
    for cache, tokens in ((k_cache, k), (v_cache, v)):
        cache.flatten(0, 1)[slots[kept].long()] = tokens[kept]


@pytest.fixture
def engine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, list[str]]]:
    """Return an engine, its model in transformers with eager attention, and the names of hopwell's functions called."""
    # These import Dynamo, which must not see the stand-in of Triton.
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM  # noqa: F401

    triton = ModuleType("triton")
    triton.jit = lambda function: function  # type: ignore[attr-defined]
    language = ModuleType("triton.language")
    language.constexpr = int  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    for name, module in (("triton", triton), ("triton.language", language), ("flash_attn", hopwell.flash_attn)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function or (lambda same: same))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, non_blocking=False: self)

    from nanovllm import LLM
    from nanovllm.engine import model_runner
    from nanovllm.layers import attention
    from nanovllm.models import qwen3

    # Configurations of transformers 5 have "rope_scaling" without a scaling too.
    rope = qwen3.get_rope
    monkeypatch.setattr(qwen3, "get_rope", lambda *args, rope_scaling, **options: rope(*args, **options))
    calls: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{function.__name__}{'' if kwargs['block_table'] is None else ' pages'}")
            return function(*args, **kwargs)

        return call

    init, group = torch.distributed.init_process_group, SimpleNamespace(**vars(torch.distributed))
    group.init_process_group = lambda backend, *args, **kwargs: init("gloo", *args, **kwargs)
    monkeypatch.setattr(model_runner, "torch", Host("torch"))
    monkeypatch.setattr(model_runner, "dist", group)
    monkeypatch.setattr(attention, "store_kvcache", store)
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        monkeypatch.setattr(attention, name, counted(getattr(attention, name)))

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=DIM,
        max_position_embeddings=PAGE + 16,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0, 0.3)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=list)
    llm = LLM(
        str(tmp_path), enforce_eager=True, tokenizer=tokenizer, max_num_seqs=4, max_num_batched_tokens=2 * (PAGE + 16)
    )
    calls.clear()
    yield llm, model, calls
    atexit.unregister(llm.exit)
    llm.exit()


def test_generate(engine: tuple[Any, Any, list[str]]) -> None:
    """In the second round the prompts share a page."""
    from nanovllm import SamplingParams

    llm, model, calls = engine
    greedy = SamplingParams(max_tokens=NEW, ignore_eos=True, top_k=1)
    for prompts in (PROMPTS, [[*PREFIX, 3, 4], [*PREFIX, 8, 9, 10]]):
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = output["token_ids"]
            assert len(tokens) == NEW
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
            lost = logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (lost <= NEAR).all(), lost
    decode = ["flash_attn_with_kvcache pages"] * LAYERS * (NEW - 1)
    first, second = "flash_attn_varlen_func", "flash_attn_varlen_func pages"
    assert calls == [*[first] * LAYERS, *decode, *[second] * LAYERS, *decode]
