"""transformers' ``generate_batch`` (continuous batching) of models with random weights, with each attention."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hopwell.perf.results import Row, first_line

NEW_TOKENS, REQUESTS, SHORTEST, LONGEST = 128, 64, 100, 500
SLOWEST = 60.0  # seconds of a batch
SDPA = "torch SDPA"  # is several times slower, so it gets one batch


def llama(**sizes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=128256, max_position_embeddings=8192, rope_theta=5e5, **sizes)


def llama_1b() -> Any:
    sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True)
    return llama(**sizes, num_attention_heads=32, num_key_value_heads=8)


def llama_8b() -> Any:
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128)
    return llama(**sizes, num_attention_heads=32, num_key_value_heads=8)


def gpt_oss() -> Any:
    """gpt-oss 20B with two experts, because attention is the subject."""
    from transformers import GptOssConfig

    return GptOssConfig(num_local_experts=2, num_experts_per_tok=1, num_hidden_layers=24)


@dataclass(frozen=True)
class Load:
    """Requests of random tokens."""

    requests: int = REQUESTS
    shortest: int = SHORTEST
    longest: int = LONGEST
    new_tokens: int = NEW_TOKENS
    max_batch_tokens: int = 8192
    blocks: int = 640

    def prompts(self, vocabulary: int) -> list[list[int]]:
        make = torch.Generator().manual_seed(1)
        lengths = torch.randint(self.shortest, self.longest + 1, (self.requests,), generator=make)
        return [torch.randint(vocabulary, (int(length),), generator=make).tolist() for length in lengths]


@dataclass(frozen=True)
class BatchCase:
    """A model and a load. All candidates have one model; its attention is replaced."""

    name: str
    model: str
    config: Callable[[], Any]
    load: Load = Load()
    rounds: int = 2
    batches: int = 2  # warm ones, in each round

    @property
    def candidates(self) -> dict[str, Callable[[], str]]:
        """Functions that return transformers' name of a candidate."""
        return CANDIDATES

    @property
    def title(self) -> str:
        load = self.load
        prompts = f"{load.requests} prompts, {load.shortest} to {load.longest} tokens, {load.new_tokens} new each"
        return f"{self.name}: generate_batch, {self.model}, {prompts}"

    def measure(self, titles: Sequence[str], advance: Callable[[str], None], device: str = "cuda") -> list[Row]:
        """Generate with each candidate in turns, and return the median rates of warm batches."""
        model = random_model(self.config(), device)
        times: dict[str, list[float]] = {title: [] for title in titles}
        rows = {title: Row(self.title, title) for title in titles}
        for turn in range(self.rounds):
            for title in titles:
                if rows[title].failure is None and not (turn and title == SDPA):
                    try:
                        batches = 1 if title == SDPA else self.batches
                        times[title] += batch_seconds(model, CANDIDATES[title](), self.load, batches)
                    except Exception as failure:  # a peer may fail in any way; the others are still worth measuring
                        rows[title].failure = first_line(type(failure).__name__, failure)
                if turn == 0:
                    advance(f"{self.name}: {title}")
        for title, row in rows.items():
            if times[title]:
                row.milliseconds = statistics.median(times[title]) * 1e3
                row.rate = self.load.requests * self.load.new_tokens / row.milliseconds * 1e3
                row.remark = f"{len(times[title])} batches, {_range(self.load, times[title])} new tokens/s"
        return list(rows.values())


def _range(load: Load, times: Sequence[float]) -> str:
    tokens = load.requests * load.new_tokens
    return f"{tokens / max(times):.0f} to {tokens / min(times):.0f}"


def random_model(config: Any, device: str) -> Any:
    """Return a model in bfloat16 with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def register_hopwell() -> str:
    from hopwell.integrations import transformers

    return transformers.register()


def register_flash_attention_3() -> str:
    """Return "flash_attention_3", or a name for FlashAttention 3 of sglang-kernel if its own package is not there."""
    import transformers
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.integrations.flash_paged import paged_attention_forward
    from transformers.masking_utils import flash_attention_mask
    from transformers.utils import is_flash_attn_3_available

    if is_flash_attn_3_available():
        return "flash_attention_3"
    from sgl_kernel import flash_attn

    def varlen(*args: Any, s_aux: Any = None, **keywords: Any) -> Any:
        return flash_attn.flash_attn_varlen_func(*args, sinks=s_aux, **keywords)

    def with_kvcache(*, s_aux: Any = None, page_table: Any = None, **keywords: Any) -> Any:
        return flash_attn.flash_attn_with_kvcache(sinks=s_aux, page_table=page_table, **keywords)

    name, original = "sglang_flash3", utils._lazy_imports

    def lazy_imports(wanted: str | None, *args: Any, **keywords: Any) -> Any:
        if wanted not in (name, f"paged|{name}"):
            return original(wanted, *args, **keywords)
        return varlen, varlen, with_kvcache, utils._pad_input, utils._unpad_input

    if name not in transformers.AttentionInterface._global_mapping:
        utils._lazy_imports = lazy_imports
        transformers.AttentionInterface.register(name, flash_attention_forward)
        transformers.AttentionInterface.register(f"paged|{name}", paged_attention_forward)
        transformers.AttentionMaskInterface.register(name, flash_attention_mask)
    return name


def batch_seconds(model: Any, name: str, load: Load, batches: int) -> list[float]:
    """Return the seconds of warm batches. CUDA graphs and asynchronous batching are transformers' defaults."""
    allowed = getattr(model, "_compatible_flash_implementations", None)
    if allowed is not None:  # gpt-oss replaces other names
        type(model)._compatible_flash_implementations = [*allowed, name]
    model.set_attn_implementation(name)
    prompts = load.prompts(model.config.vocab_size)
    with torch.no_grad(), _manager(model, load) as manager:
        _generate(manager, prompts, load.new_tokens)
        return [_generate(manager, prompts, load.new_tokens) for _ in range(batches)]


@contextmanager
def _manager(model: Any, load: Load) -> Iterator[Any]:
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    batching = ContinuousBatchingConfig(
        num_blocks=load.blocks,
        max_batch_tokens=load.max_batch_tokens,
        max_requests_per_batch=load.requests,
        allow_block_sharing=False,
    )
    greedy = dict(max_new_tokens=load.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    hints = WorkloadHints(
        max_prompt_length=load.longest, max_generated_length=load.new_tokens, num_requests=load.requests
    )
    options = dict(block=True, timeout=20, warmup=True, workload_hints=hints)
    of_model = dict(generation_config=GenerationConfig(**greedy), continuous_batching_config=batching)
    with model.continuous_batching_context_manager(**of_model, **options) as manager:
        yield manager
    gc.collect()
    torch.cuda.empty_cache()


def _generate(manager: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Return the seconds from the first request to the last result.

    Raises:
        RuntimeError: a request failed, or a batch takes too long.
    """
    begin = time.perf_counter()
    manager.add_requests(inputs=prompts, max_new_tokens=new_tokens, record_timestamps=False)
    done = 0
    while done < len(prompts):
        result = manager.get_result(timeout=5)
        if result is not None and result.error:
            raise RuntimeError(result.error)
        if result is None and not manager.is_running():
            raise RuntimeError("the thread of transformers ended")
        if time.perf_counter() - begin > SLOWEST:
            raise RuntimeError(f"a batch takes more than {SLOWEST:.0f} s")
        done += result is not None and result.is_finished()
    return time.perf_counter() - begin


CANDIDATES: dict[str, Callable[[], str]] = {
    "hopwell": register_hopwell,
    "FlashAttention 3": register_flash_attention_3,
    SDPA: lambda: "paged|sdpa",
}
BATCH_CASES = (
    BatchCase("batch-1b", "Llama 3.2 1B", llama_1b),
    BatchCase("batch-8b", "Llama 3.1 8B", llama_8b, Load(new_tokens=32), rounds=1, batches=3),
    BatchCase("batch-gpt-oss", "gpt-oss 20B with two experts", gpt_oss),
)
