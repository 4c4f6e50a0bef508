"""The attention of a DeepSeek-V3 layer in torch, decoding from a paged latent cache. Run this file as a demo.

The cache has one row of 576 numbers for each token, for any number of heads. A row has a latent of 512, from which
every head's key and value could be computed, and a rotated key of 64 shared by all heads. The layer never computes
these keys and values. A head's logit is q_nope . (W_k latent) + q_rope . k_rope. It equals (W_k^T q_nope) . latent +
q_rope . k_rope: with W_k absorbed into the query, the row itself is the key. The weighted sum of values W_v latent
equals W_v times the weighted sum of latents. The row's first 512 numbers are therefore the value, and W_v comes after
attention. ``trtllm_batch_decode_with_kv_cache_mla`` computes the part between the two.

The cache may be narrower: e4m3 rows with one scale for all of them, or ``fp8_ds_mla`` rows of 656 bytes. As in
DeepSeek-V3.2, each new token may attend only to the ``top_k`` tokens that an index of small keys finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.functional import rms_norm

import hopwell
from hopwell import layouts
from hopwell.mla import mla_workspace_bytes

CACHE_TYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}


@dataclass(frozen=True)
class Sizes:
    """The sizes of DeepSeek-V3. With a ``top_k`` (2048 in DeepSeek-V3.2), each new token attends to this number of
    tokens.
    """

    hidden: int = 7168
    heads: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128  # columns of a head's query and key without a position
    rope: int = 64  # rotated ones
    v: int = 128
    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 0

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5


class LatentCache:
    """Pages of latent rows, anywhere in the pool, with room for ``capacity`` tokens of each request.

    Rows in e4m3 share one scale, computed from the first tokens.
    """

    def __init__(self, kind: str, requests: int, capacity: int, sizes: Sizes, page_size: int, device: str):
        self.kind, self.page_size, self.width = kind, page_size, math.ceil(capacity / page_size)
        pages, columns = requests * self.width, sizes.kv_lora + sizes.rope
        row = layouts.FP8_DS_MLA_BYTES if kind == "fp8_ds_mla" else columns
        self.pool = torch.empty(pages, page_size, row, dtype=CACHE_TYPES[kind], device=device)
        self.scale: torch.Tensor | None = None
        self.index_keys = torch.empty(pages * page_size, sizes.index_dim, dtype=torch.bfloat16, device=device)
        ids = torch.randperm(pages, dtype=torch.int32, device=device)
        self.block_tables = ids.view(requests, self.width)
        self.seq_lens = torch.zeros(requests, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        return self.page_size * self.width

    def slots(self, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the pool slots of the tokens at ``position`` of ``request``."""
        return self.block_tables[request, position // self.page_size] * self.page_size + position % self.page_size

    def append(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        if self.kind == "fp8_ds_mla":
            layouts.fill_fp8_ds_mla_cache(self.pool, *rows.split([512, 64], -1), slots)
            return
        if self.kind == "e4m3":
            self.scale = layouts.fp8_scale(rows) if self.scale is None else self.scale
            rows = layouts.quantize_fp8(rows, self.scale)
        self.pool.view(-1, self.pool.shape[-1])[slots.long()] = rows

    def scaled(self, factor: float) -> float | torch.Tensor:
        """Return the multiplier for products with rows that are ``factor`` times as large."""
        return factor if self.scale is None else (factor * self.scale).view(1)


def rotated(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring columns of x [tokens, ..., rope] by an angle that grows with the token's position."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    columns = torch.arange(pairs.shape[-1], device=x.device) / pairs.shape[-1]
    angle = position[:, None] * 10000.0**-columns
    ping_pong = torch.polar(torch.ones_like(angle), angle).view(-1, *[1] * (x.dim() - 2), pairs.shape[-1])
    return torch.view_as_real(pairs * ping_pong).flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    """The layer. ``q_gain`` scales random weights so that logits distinguish tokens."""

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
        self.index_q = weight(s.index_heads * s.index_dim, s.q_lora)
        self.index_k = weight(s.index_dim, s.hidden)
        self.index_weights = weight(s.index_heads, s.hidden)

    def query_latent(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden @ self.q_down.T, (self.sizes.q_lora,))

    def queries(self, hidden: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [tokens, heads, nope] and [tokens, heads, rope]."""
        s = self.sizes
        nope, rope = (self.query_latent(hidden) @ self.q_up.T).unflatten(-1, (s.heads, -1)).split([s.nope, s.rope], -1)
        return nope, rotated(rope, position)

    def latent_rows(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return [tokens, kv_lora + rope]: the cache's row of each token."""
        latent, rope = (hidden @ self.kv_down.T).split([self.sizes.kv_lora, self.sizes.rope], -1)
        return torch.cat([rms_norm(latent, (self.sizes.kv_lora,)), rotated(rope, position)], -1)

    def up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W_k [heads, nope, kv_lora] and W_v [heads, v, kv_lora]."""
        return self.kv_up.unflatten(0, (self.sizes.heads, -1)).split([self.sizes.nope, self.sizes.v], 1)

    def put(self, hidden: torch.Tensor, cache: LatentCache, request: torch.Tensor, position: torch.Tensor) -> None:
        """Put tokens [tokens, hidden] into the cache."""
        slots = cache.slots(request, position)
        cache.append(self.latent_rows(hidden, position), slots)
        cache.index_keys[slots.long()] = (hidden @ self.index_k.T).to(cache.index_keys.dtype)

    def choose(
        self, hidden: torch.Tensor, cache: LatentCache, request: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """Return the positions [tokens, top_k] that each new token attends to.

        A new token attends to itself and the most important tokens before it. Missing entries at the end are -1.
        """
        s, every = self.sizes, torch.arange(cache.capacity, device=hidden.device)
        keys = cache.index_keys[cache.slots(request[:, None], every).long()]
        query = (self.query_latent(hidden) @ self.index_q.T).unflatten(-1, (s.index_heads, s.index_dim))
        agreement = torch.einsum("thd,tkd->thk", query, keys).relu()
        scores = torch.einsum("th,thk->tk", hidden @ self.index_weights.T, agreement).float()
        scores.masked_fill_(every > position[:, None], -torch.inf)
        best = scores.topk(min(s.top_k, cache.capacity))
        found = torch.where(best.values > -torch.inf, best.indices, -1)
        return torch.nn.functional.pad(found, (0, s.top_k - found.shape[1]), value=-1)

    def decode(self, hidden: torch.Tensor, cache: LatentCache, workspace: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for new tokens [batch, q_len, hidden], which are added to the cache."""
        s, (batch, q_len, _) = self.sizes, hidden.shape
        position = (cache.seq_lens[:, None] + torch.arange(q_len, device=hidden.device)).flatten()
        request = torch.arange(batch, device=hidden.device).repeat_interleave(q_len)
        hidden = hidden.flatten(0, 1)
        self.put(hidden, cache, request, position)
        cache.seq_lens += q_len

        tables = cache.block_tables
        if s.top_k:
            chosen = self.choose(hidden, cache, request, position)
            slots = cache.slots(request[:, None], chosen.clamp(min=0))
            tables = torch.where(chosen < 0, -1, slots).to(torch.int32).unflatten(0, (batch, q_len))
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
            block_tables=tables,
            seq_lens=cache.seq_lens,
            max_seq_len=cache.capacity,
            sparse_mla_top_k=s.top_k,
            bmm1_scale=cache.scaled(s.scale),
            bmm2_scale=cache.scaled(1.0),
        )
        values = torch.einsum("bqhl,hvl->bqhv", summed, w_v)
        return values.flatten(2) @ self.project.T


def generate(
    layer: LatentAttention, prompts: list[torch.Tensor], steps: torch.Tensor, page_size: int = 64, kind: str = "bf16"
) -> tuple[list[torch.Tensor], LatentCache]:
    """Decode each of ``steps`` [steps, batch, q_len, hidden] after the prompts.

    Returns the outputs [batch, q_len, hidden] and the final cache.
    """
    count, batch, q_len, _ = steps.shape
    device, longest = steps.device.type, max(len(prompt) for prompt in prompts)
    cache = LatentCache(kind, batch, longest + count * q_len, layer.sizes, page_size, device)
    for request, prompt in enumerate(prompts):
        position = torch.arange(len(prompt), device=device)
        layer.put(prompt, cache, torch.full_like(position, request), position)
        cache.seq_lens[request] = len(prompt)
    most_keys = layer.sizes.top_k or cache.capacity
    size = mla_workspace_bytes(layer.sizes.heads, most_keys, q_len, device=device)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    return [layer.decode(hidden, cache, workspace) for hidden in steps], cache


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    full = Sizes() if on_gpu else Sizes(hidden=256, heads=8, q_lora=128, index_heads=4)  # the emulator is slow
    sparse = replace(full, top_k=256 if on_gpu else 64)
    lengths, count = ([1000, 1, 4096, 317], 64) if on_gpu else ([100, 1], 2)
    for kind, sizes in (("bf16", full), ("e4m3", full), ("fp8_ds_mla", sparse)):
        torch.manual_seed(0)
        layer = LatentAttention(sizes, device).bfloat16()
        prompts = [torch.randn(n, sizes.hidden, device=device).bfloat16() for n in lengths]
        steps = torch.randn(count, len(lengths), 1, sizes.hidden, device=device).bfloat16()
        outputs, _ = generate(layer, prompts, steps, kind=kind)
        seen = f"{sizes.top_k} tokens of" if sizes.top_k else "all of"
        print(f"{len(outputs)} steps of {len(lengths)} requests, {sizes.heads} heads, {seen} a cache of {kind}")
        print(f"output of a token: {list(outputs[-1][0, 0].shape)}, of size {outputs[-1].float().std():.3f}")


if __name__ == "__main__":
    main()
