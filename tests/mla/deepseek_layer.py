"""The attention of a DeepSeek-V3 layer in torch, decoding from a paged latent cache. Run this file to see it work.

The cache has one row of 576 numbers for each token, whatever the number of heads: a latent of 512, from which every
head's key and value could be computed, and a rotated key of 64 that all heads share. Nobody computes those keys and
values. A head's logit is q_nope . (W_k latent) + q_rope . k_rope, which is also (W_k^T q_nope) . latent + q_rope .
k_rope: with W_k absorbed into the query, the row itself is the key. And the weighted sum of values W_v latent is W_v
times the weighted sum of latents: the row's first 512 numbers are the value, and W_v comes after attention. What is in
between is ``trtllm_batch_decode_with_kv_cache_mla``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import rms_norm

import hopwell
from hopwell.mla import mla_workspace_bytes


@dataclass(frozen=True)
class Sizes:
    """The sizes of DeepSeek-V3."""

    hidden: int = 7168
    heads: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128  # columns of a head's query and key without a position
    rope: int = 64  # rotated ones
    v: int = 128

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5


class LatentCache:
    """Pages of latent rows, which lie anywhere in the pool, with room for ``capacity`` tokens of each request."""

    def __init__(self, requests: int, capacity: int, sizes: Sizes, page_size: int, device: str):
        self.page_size, self.width = page_size, math.ceil(capacity / page_size)
        pages, columns = requests * self.width, sizes.kv_lora + sizes.rope
        self.pool = torch.empty(pages, page_size, columns, dtype=torch.bfloat16, device=device)
        ids = torch.randperm(pages, dtype=torch.int32, device=device)
        self.block_tables = ids.view(requests, self.width)
        self.seq_lens = torch.zeros(requests, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        return self.page_size * self.width

    def append(self, rows: torch.Tensor, request: torch.Tensor, position: torch.Tensor) -> None:
        """Put each of ``rows`` where the token at ``position`` of ``request`` belongs."""
        page = self.block_tables[request, position // self.page_size]
        self.pool[page, position % self.page_size] = rows


def rotated(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Neighbouring columns of x [tokens, ..., rope] turned by an angle that grows with the token's position."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    columns = torch.arange(pairs.shape[-1], device=x.device) / pairs.shape[-1]
    angle = position[:, None] * 10000.0**-columns
    turns = torch.polar(torch.ones_like(angle), angle).view(-1, *[1] * (x.dim() - 2), pairs.shape[-1])
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    """``q_gain`` is what random weights need for logits that tell tokens apart."""

    def __init__(self, sizes: Sizes, device: str, q_gain: float = 3.0):
        super().__init__()
        self.sizes = s = sizes

        def weight(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
            values = torch.randn(rows, columns, device=device) * (gain / math.sqrt(columns))
            return nn.Parameter(values, requires_grad=False)

        self.q_down = weight(s.q_lora, s.hidden)
        self.q_up = weight(s.heads * (s.nope + s.rope), s.q_lora, q_gain)
        self.kv_down = weight(s.kv_lora + s.rope, s.hidden)
        self.kv_up = weight(s.heads * (s.nope + s.v), s.kv_lora)
        self.project = weight(s.hidden, s.heads * s.v)

    def queries(self, hidden: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, heads, nope] and [tokens, heads, rope]."""
        s = self.sizes
        latent = rms_norm(hidden @ self.q_down.T, (s.q_lora,))
        nope, rope = (latent @ self.q_up.T).unflatten(-1, (s.heads, -1)).split([s.nope, s.rope], -1)
        return nope, rotated(rope, position)

    def latent_rows(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """[tokens, kv_lora + rope]: what the cache keeps of each token."""
        latent, rope = (hidden @ self.kv_down.T).split([self.sizes.kv_lora, self.sizes.rope], -1)
        return torch.cat([rms_norm(latent, (self.sizes.kv_lora,)), rotated(rope, position)], -1)

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_k [heads, nope, kv_lora] and W_v [heads, v, kv_lora]."""
        return self.kv_up.unflatten(0, (self.sizes.heads, -1)).split([self.sizes.nope, self.sizes.v], 1)

    def decode(self, hidden: torch.Tensor, cache: LatentCache, workspace: torch.Tensor) -> torch.Tensor:
        """The layer's output for new tokens [batch, q_len, hidden], which go into the cache."""
        s, (batch, q_len, _) = self.sizes, hidden.shape
        position = (cache.seq_lens[:, None] + torch.arange(q_len, device=hidden.device)).flatten()
        request = torch.arange(batch, device=hidden.device).repeat_interleave(q_len)
        hidden = hidden.flatten(0, 1)
        cache.append(self.latent_rows(hidden, position), request, position)
        cache.seq_lens += q_len

        w_k, w_v = self.up_projections()
        nope, rope = self.queries(hidden, position)
        absorbed = torch.einsum("thn,hnl->thl", nope, w_k)
        summed = hopwell.trtllm_batch_decode_with_kv_cache_mla(
            query=torch.cat([absorbed, rope], -1).unflatten(0, (batch, q_len)),
            kv_cache=cache.pool,
            workspace_buffer=workspace,
            qk_nope_head_dim=s.nope,
            kv_lora_rank=s.kv_lora,
            qk_rope_head_dim=s.rope,
            block_tables=cache.block_tables,
            seq_lens=cache.seq_lens,
            max_seq_len=cache.capacity,
            bmm1_scale=s.scale,
        )
        values = torch.einsum("bqhl,hvl->bqhv", summed, w_v)
        return values.flatten(2) @ self.project.T


def generate(
    layer: LatentAttention, prompts: list[torch.Tensor], steps: torch.Tensor, page_size: int = 64
) -> list[torch.Tensor]:
    """Outputs [batch, q_len, hidden] of each of ``steps`` [steps, batch, q_len, hidden], which follow the prompts."""
    count, batch, q_len, _ = steps.shape
    device, longest = steps.device.type, max(len(prompt) for prompt in prompts)
    cache = LatentCache(batch, longest + count * q_len, layer.sizes, page_size, device)
    for request, prompt in enumerate(prompts):
        position = torch.arange(len(prompt), device=device)
        cache.append(layer.latent_rows(prompt, position), torch.full_like(position, request), position)
        cache.seq_lens[request] = len(prompt)
    size = mla_workspace_bytes(layer.sizes.heads, cache.capacity, q_len, device=device)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    return [layer.decode(hidden, cache, workspace) for hidden in steps]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    sizes = Sizes() if on_gpu else Sizes(hidden=256, heads=8, q_lora=128)  # the emulator takes its time
    lengths, count = ([1000, 1, 4096, 317], 64) if on_gpu else ([100, 1], 4)
    torch.manual_seed(0)
    layer = LatentAttention(sizes, device).bfloat16()
    prompts = [torch.randn(n, sizes.hidden, device=device).bfloat16() for n in lengths]
    steps = torch.randn(count, len(lengths), 1, sizes.hidden, device=device).bfloat16()
    outputs = generate(layer, prompts, steps)
    print(f"{len(outputs)} steps of {len(lengths)} requests, {sizes.heads} heads")
    print(f"output of a token: {list(outputs[-1][0, 0].shape)}, of size {outputs[-1].float().std():.3f}")


if __name__ == "__main__":
    main()
