"""A causal language model of transformers whose attention reads and writes a paged cache.

Prompts of different lengths lie packed one after the other, without padding; then all requests go on together, a token
at a time. Random weights, and bytes as tokens, keep the example self-contained.
"""

import math
import pathlib

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import hopwell


class PagedBatch:
    """Requests with a paged KV cache for each layer, and where in it the tokens at hand belong."""

    def __init__(self, lengths, steps, config, page_size=16, device="cuda", dtype=torch.bfloat16):
        self.page_size, self.longest = page_size, max(lengths)
        counts = [math.ceil((n + steps) / page_size) for n in lengths]
        self.capacity = page_size * max(counts)
        ids = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        tables = [torch.nn.functional.pad(i, (0, max(counts) - len(i)), value=-1) for i in ids]
        self.block_tables = torch.stack(tables).to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.nn.functional.pad(self.seq_lens.cumsum(0), (1, 0)).int()
        self.requests = torch.arange(len(lengths), device=device)
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        shape = (sum(counts), 2, kv_heads, page_size, dim)
        self.caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        workspace_bytes = hopwell.decode.xqa_workspace_bytes(heads, kv_heads, dim, self.capacity, device=device)
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self.is_prompt = True
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        self.place(self.requests.repeat_interleave(self.seq_lens), positions, self.starts[1:] - 1)

    def place(self, request, position, last):
        """Each token is of a request and has a position in it; ``last`` are the places of the requests' last tokens."""
        self.position_ids, self.last = position[None], last
        self.page = self.block_tables[request, position // self.page_size].long()
        self.row = position % self.page_size

    def step(self):
        """Go on with one token of each request."""
        self.is_prompt = False
        self.seq_lens += 1
        self.place(self.requests, self.seq_lens - 1, self.requests)


def paged_attention(module, query, key, value, attention_mask, scaling, batch, **_):
    """Attention of a packed batch; tensors come as [1, heads, tokens, head_dim]."""
    cache = batch.caches[module.layer_idx]
    cache[batch.page, 0, :, batch.row] = key[0].transpose(0, 1)
    cache[batch.page, 1, :, batch.row] = value[0].transpose(0, 1)
    arguments = dict(
        query=query[0].transpose(0, 1),
        kv_cache=cache,
        workspace_buffer=batch.workspace,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        bmm1_scale=scaling,
        bmm2_scale=1.0,
        kv_layout="HND",
    )
    if batch.is_prompt:
        out = hopwell.trtllm_batch_context_with_kv_cache(
            **arguments,
            max_q_len=batch.longest,
            max_kv_len=batch.longest,
            batch_size=len(batch.seq_lens),
            cum_seq_lens_q=batch.starts,
            cum_seq_lens_kv=batch.starts,
        )
    else:
        out = hopwell.xqa_batch_decode_with_kv_cache(**arguments, max_seq_len=batch.capacity)
    return out[None], None


AttentionInterface.register("hopwell", paged_attention)


@torch.inference_mode()
def generate(model, prompts, steps):
    """Logits of the prompts' tokens and the requests' next tokens, then those of each step."""
    lengths = [len(prompt) for prompt in prompts]
    batch = PagedBatch(lengths, steps, model.config, device=model.device, dtype=model.dtype)
    tokens = torch.tensor(list(b"".join(prompts)), device=model.device)
    for step in range(1 + steps):
        if step > 0:
            batch.step()
        logits = model(tokens[None], position_ids=batch.position_ids, batch=batch, use_cache=False).logits[0]
        tokens = logits[batch.last].argmax(-1)
        yield logits, tokens


def sizes(on_gpu):
    """Arguments of the model's config, and lengths of the prompts: small ones for the emulator."""
    if on_gpu:
        heads = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
        layers = dict(hidden_size=4096, intermediate_size=8192, num_hidden_layers=4, max_position_embeddings=8192)
        return heads | layers, (4096, 1000, 137, 2048)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    layers = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, max_position_embeddings=128)
    return heads | layers, (47, 64, 30)


if __name__ == "__main__":
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    arguments, lengths = sizes(on_gpu)
    config = LlamaConfig(vocab_size=256, **arguments)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="hopwell").eval()
    model = model.to("cuda" if on_gpu else "cpu")
    text = (pathlib.Path(__file__).parents[1] / "LICENSE").read_bytes()
    prompts = [text[1000 : 1000 + n] for n in lengths]
    logits, tokens = zip(*generate(model, prompts, steps=64 if on_gpu else 4), strict=True)
    print(torch.stack(tokens, 1).tolist())
