"""A causal language model of transformers whose attention reads and writes a paged cache of 16, 8 or 4 bits an element.

Prompts of different lengths lie packed one after the other, without padding; then all requests go on together, a token
at a time. Random weights, and bytes as tokens, keep the example self-contained. Each narrow cache is then given the
tokens that the 16-bit one led to, and what it does to the logits is printed::

    python examples/model.py --caches bf16 fp8 nvfp4
"""

import argparse
import logging
import math
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import hopwell
from hopwell import layouts


class CacheType(NamedTuple):
    """How keys and values are stored. ``scale_of`` finds the factor that a tensor is divided by."""

    dtype: torch.dtype
    elements_a_byte: int = 1
    scale_of: Callable[[torch.Tensor], torch.Tensor | float] = lambda tokens: 1.0

    @property
    def is_nvfp4(self):
        return self.dtype == torch.uint8


CACHES = {
    "bf16": CacheType(torch.bfloat16),
    "fp8": CacheType(torch.float8_e4m3fn, scale_of=layouts.fp8_scale),
    "nvfp4": CacheType(torch.uint8, 2, layouts.nvfp4_global_scale),
}


class LayerCache:
    """The pages of a layer, keys and values of [pages, 2, kv_heads, page_size, ...], and how they are scaled."""

    def __init__(self, kind, pages, kv_heads, page_size, dim, device):
        self.kind, shape = kind, (pages, 2, kv_heads, page_size)
        self.data = torch.empty(*shape, dim // kind.elements_a_byte, dtype=kind.dtype, device=device)
        block_scales = torch.zeros(*shape, dim // layouts.NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=device)
        self.block_scales = block_scales.unbind(1) if kind.is_nvfp4 else None
        self.scales = None

    def append(self, batch, key, value):
        """Write new tokens [tokens, kv_heads, dim]. The first ones, of the prompts, decide what all are divided by."""
        if self.scales is None:
            self.scales = self.kind.scale_of(key), self.kind.scale_of(value)
        hopwell.append_paged_kv_cache(
            key,
            value,
            batch.requests,
            batch.positions,
            self.data,
            kv_layout="HND",
            k_scale=self.scales[0],
            v_scale=self.scales[1],
            kv_cache_sf=self.block_scales,
            v_scale_layout="linear",
            block_tables=batch.block_tables,
        )


class PagedBatch:
    """Requests with a paged KV cache for each layer, and where in it the tokens at hand belong."""

    def __init__(self, lengths, steps, config, kind, page_size=16, device="cuda"):
        self.kind, self.longest = kind, max(lengths)
        counts = [math.ceil((n + steps) / page_size) for n in lengths]
        self.capacity = page_size * max(counts)
        ids = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        tables = [torch.nn.functional.pad(i, (0, max(counts) - len(i)), value=-1) for i in ids]
        self.block_tables = torch.stack(tables).to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        sizes = (sum(counts), kv_heads, page_size, dim)
        self.caches = [LayerCache(kind, *sizes, device) for _ in range(config.num_hidden_layers)]
        workspace_bytes = hopwell.decode.xqa_workspace_bytes(heads, kv_heads, dim, self.capacity, device=device)
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self.place(self.seq_lens, uses_context=True)

    def place(self, new, uses_context):
        """The last ``new`` tokens of each request are those at hand."""
        self.uses_context = uses_context
        self.starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
        self.last = self.starts[1:] - 1  # where the requests' last tokens are among those at hand
        tokens = int(self.starts[-1])
        self.requests, self.positions = hopwell.get_batch_indices_positions(self.starts, self.seq_lens, tokens)
        self.position_ids = self.positions[None].long()

    def step(self):
        """Go on with one token of each request."""
        self.longest = 1
        self.seq_lens += 1
        self.place(torch.ones_like(self.seq_lens), uses_context=False)


def paged_attention(module, query, key, value, attention_mask, scaling, batch, **_):
    """Attention of a packed batch; tensors come as [1, heads, tokens, head_dim]."""
    cache = batch.caches[module.layer_idx]
    cache.append(batch, key[0].transpose(0, 1), value[0].transpose(0, 1))
    k_scale, v_scale = cache.scales
    arguments = dict(
        query=query[0].transpose(0, 1),
        kv_cache=cache.data,
        kv_cache_sf=cache.block_scales,
        workspace_buffer=batch.workspace,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        bmm1_scale=scaling * k_scale,
        bmm2_scale=v_scale,
        kv_layout="HND",
    )
    if batch.uses_context:
        out = hopwell.trtllm_batch_context_with_kv_cache(
            **arguments,
            max_q_len=batch.longest,
            max_kv_len=batch.capacity,
            batch_size=len(batch.seq_lens),
            cum_seq_lens_q=batch.starts,
            cum_seq_lens_kv=batch.starts,
            v_scale_layout="linear" if batch.kind.is_nvfp4 else "interleaved",  # as decode reads them
        )
    else:
        out = hopwell.trtllm_batch_decode_with_kv_cache(**arguments, max_seq_len=batch.capacity)
    return out[None], None


AttentionInterface.register("hopwell", paged_attention)


@torch.inference_mode()
def generate(model, prompts, steps, cache="bf16", given=None):
    """Return the logits of the prompts' tokens and the requests' next tokens, and the same for each step.

    Each token is the most likely one, or is ``given``, a tensor for each step.
    """
    lengths = [len(prompt) for prompt in prompts]
    batch = PagedBatch(lengths, steps, model.config, CACHES[cache], device=model.device)
    tokens = torch.tensor(list(b"".join(prompts)), device=model.device)
    for step in range(1 + steps):
        if step > 0:
            batch.step()
        logits = model(tokens[None], position_ids=batch.position_ids, batch=batch, use_cache=False).logits[0]
        tokens = logits[batch.last].argmax(-1) if given is None else given[step]
        yield logits, tokens


def compare(reference, logits):
    """Print how logits differ from the logits of a 16-bit cache after the same tokens.

    The perplexity belongs to a text drawn from the reference. It is exp of the cross entropy. Its least value, for
    equal distributions, is exp of the reference's own entropy. Its excess is exp of the mean Kullback-Leibler
    divergence, less 1.
    """
    reference, logits = reference.float(), logits.float()
    expected, found = reference.log_softmax(-1), logits.log_softmax(-1)
    entropy, cross_entropy = (-(expected.exp() * each).sum(-1).mean() for each in (expected, found))
    return {
        "relative error": ((logits - reference).norm() / reference.norm()).item(),
        "perplexity": cross_entropy.exp().item(),
        "excess": torch.expm1(cross_entropy - entropy).item(),
        "same token": (logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
    }


def sizes(on_gpu):
    """Return the arguments of the model's config, lengths of the prompts, and steps: small ones for the emulator."""
    if on_gpu:
        heads = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
        layers = dict(hidden_size=4096, intermediate_size=8192, num_hidden_layers=4, max_position_embeddings=8192)
        return heads | layers, (4096, 1000, 137, 2048), 64
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    layers = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, max_position_embeddings=128)
    return heads | layers, (47, 64, 30), 4


def report(runs):
    """Print a row for the prompts and one for the steps of each narrow cache."""
    (_, reference), *others = runs.items()
    rows = []
    for cache, logits in others:
        for part, first, end in (("prompts", 0, 1), ("steps", 1, None)):
            figures = compare(torch.cat(reference[first:end]), torch.cat(logits[first:end]))
            rows.append({"cache": cache, "part": part, **figures})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=["bf16"], help="the first is the reference")
    caches = parser.parse_args().caches
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hopwell").setLevel(logging.INFO)  # says when a kernel is compiled
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    arguments, lengths, steps = sizes(on_gpu)
    config = LlamaConfig(vocab_size=256, **arguments)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="hopwell").eval()
    model = model.to("cuda" if on_gpu else "cpu")
    text = (pathlib.Path(__file__).parents[1] / "LICENSE").read_bytes()
    prompts = [text[1000 : 1000 + n] for n in lengths]
    shape = f"{config.num_hidden_layers} layers with random weights"
    print(f"{len(prompts)} prompts of {lengths} bytes and {steps} steps, {shape}, {caches[0]} cache")
    logits, tokens = zip(*generate(model, prompts, steps, caches[0]), strict=True)
    for request, continued in enumerate(torch.stack(tokens, 1).tolist()):
        print(f"bytes that continue prompt {request}: {continued}")
    runs = {caches[0]: logits}
    for cache in caches[1:]:
        print(f"the same tokens over the {cache} cache")
        runs[cache] = [each for each, _ in generate(model, prompts, steps, cache, given=tokens)]
    figures = report(runs)
    if figures:
        print(f"logits compared with the {caches[0]} cache; excess: of perplexity, same token: of greedy choices")
    for row in figures:
        print(", ".join(f"{name} {each:.3g}" if isinstance(each, float) else each for name, each in row.items()))
