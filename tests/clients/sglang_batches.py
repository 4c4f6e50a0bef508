"""Batches of SGLang for hopwell's backends: a runner with pools and tables, and the float64 results."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from helpers.oracles import reference
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hopwell.integrations.sglang import backend
from hopwell.kernels.masks import MaskKind
from hopwell.kernels.problem import Mask, Score

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES, CONTEXT = 4, 2, 64, 16, 14, 64
DRAFT = 3
FP8 = torch.float8_e4m3fn
# (keys, new tokens) of each request.
REQUESTS = {
    "mixed": [(23, 9), (40, 1), (5, 5)],
    "decode": [(23, 1), (40, 1), (5, 1)],
    "verify": [(23, DRAFT), (40, DRAFT), (5, DRAFT)],
    "tree": [(23, DRAFT), (40, DRAFT), (5, DRAFT)],
}
VERIFIES = ("verify", "tree")
MODES = {"mixed": ForwardMode.MIXED, "decode": ForwardMode.DECODE} | dict.fromkeys(VERIFIES, ForwardMode.TARGET_VERIFY)
# The drafts that each draft of a request sees. In a fork, drafts 1 and 2 both follow draft 0.
CHAIN = torch.ones(DRAFT, DRAFT, dtype=torch.bool).tril()
FORK = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
TREES = torch.stack([FORK, CHAIN, FORK])
K_SCALE, V_SCALE = 0.25, 0.5


class Pool:
    """Slots of keys and values of one layer, with head dims ``dims``."""

    def __init__(self, dtype: torch.dtype, dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)) -> None:
        # One allocation, V behind K.
        rows = torch.full((PAGES * PAGE * KV_HEADS * sum(dims),), float("nan")).to(dtype)
        parts = rows.split([PAGES * PAGE * KV_HEADS * dim for dim in dims])
        self.k, self.v = (part.view(-1, KV_HEADS, dim) for part, dim in zip(parts, dims, strict=True))

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        self.store(where.loc, k, v, *scales)

    def store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scale: Any, v_scale: Any) -> None:
        self.k[slots] = (k.float() / (k_scale or 1.0)).to(self.k.dtype)
        self.v[slots] = (v.float() / (v_scale or 1.0)).to(self.v.dtype)


class WindowPool(Pool, SWAKVPool):
    """The same for a layer with a sliding window, which has slots of its own: its pages are in reverse order."""

    layers_mapping: ClassVar[dict[int, tuple[int, bool]]] = {0: (0, True)}

    def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
        return (PAGES - 1 - slots // PAGE) * PAGE + slots % PAGE

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any) -> None:
        self.store(where.swa_loc, k, v, *scales)


def layer(window: int = -1, cap: float = 0.0, scales: bool = False, **given: Any) -> RadixAttention:
    """Return a layer of SGLang. Its window counts the keys to the left of a row's own key."""
    sizes: dict[str, Any] = dict(num_heads=HEADS, head_dim=HEAD_DIM, scaling=HEAD_DIM**-0.5, num_kv_heads=KV_HEADS)
    one = RadixAttention(**(sizes | given), layer_id=0, logit_cap=cap, sliding_window_size=window)
    if scales:
        one.k_scale = one.k_scale_float = K_SCALE
        one.v_scale = one.v_scale_float = V_SCALE
    return one


def table() -> torch.Tensor:
    """Return SGLang's table of slots. Its rows 1, 3 and 4 have the pages of requests, in a random order."""
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[:12].view(3, 4)
    slots = torch.zeros(5, CONTEXT, dtype=torch.int32)
    slots[[3, 1, 4]] = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    return slots


def runner(
    monkeypatch: Any,
    pool: Any,
    one: RadixAttention,
    kv_dtype: torch.dtype,
    *,
    topk: int = 1,
    algorithm: str = "EAGLE",
    deterministic: bool = False,
    **given: Any,
) -> Any:
    """Return the parts of a ModelRunner that backends read."""
    parallel = types.SimpleNamespace(dcp_enabled=False, attn_cp_size=1)
    spec = types.SimpleNamespace(
        speculative_num_draft_tokens=DRAFT, speculative_eagle_topk=topk, speculative_algorithm=algorithm
    )
    monkeypatch.setattr(backend, "get_parallel", lambda: parallel)
    monkeypatch.setattr(backend, "get_spec", lambda: spec)
    config: dict[str, Any] = dict(context_len=CONTEXT, is_encoder_decoder=False)
    return types.SimpleNamespace(
        device="cpu",
        dtype=torch.bfloat16,
        kv_cache_dtype=kv_dtype,
        page_size=PAGE,
        token_to_kv_pool=pool,
        req_to_token_pool=types.SimpleNamespace(req_to_token=table()),
        server_args=types.SimpleNamespace(enable_deterministic_inference=deterministic, enable_unified_memory=False),
        model_config=types.SimpleNamespace(**(config | given)),
        model=torch.nn.ModuleList([one]),
    )


@dataclass
class Batch:
    """A batch with random keys.

    Attributes:
        kind: of :data:`REQUESTS`.
        table: slots of each request's tokens.
        dims: head dims of keys and values.
    """

    kind: str
    table: torch.Tensor
    seed: int = 0
    dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)

    def __post_init__(self) -> None:
        self.requests = REQUESTS[self.kind]
        self.rows = torch.tensor([3, 1, 4])
        generator = torch.Generator().manual_seed(self.seed)
        self.new = [n for _, n in self.requests]

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        self.query = random(sum(self.new), HEADS, self.dims[0])
        self.key, self.value = ([random(n, KV_HEADS, dim) for n, _ in self.requests] for dim in self.dims)
        self.slots = [self.table[row, :n].long() for row, (n, _) in zip(self.rows, self.requests, strict=True)]

    def tokens(self, of_requests: list[torch.Tensor], new: bool) -> torch.Tensor:
        """Return the new tokens of all requests, or the tokens in front of them."""
        parts = [x[len(x) - n :] if new else x[: len(x) - n] for x, n in zip(of_requests, self.new, strict=True)]
        return torch.cat(parts)

    def forward_batch(self) -> Any:
        """Return the parts of a ForwardBatch that backends read."""
        verify = self.kind in VERIFIES
        lens = torch.tensor([n - (new if verify else 0) for n, new in self.requests])
        return types.SimpleNamespace(
            forward_mode=MODES[self.kind],
            batch_size=len(self.requests),
            seq_lens=lens,
            seq_lens_cpu=None,
            req_pool_indices=self.rows,
            out_cache_loc=self.tokens(self.slots, new=True),
            out_cache_loc_is_physical=True,
            extend_seq_lens=torch.tensor(self.new),
            extend_seq_lens_cpu=self.new,
            extend_prefix_lens_cpu=[n - new for n, new in self.requests],
            spec_info=types.SimpleNamespace(
                draft_token_num=DRAFT, is_draft_input=lambda: False, custom_mask=TREES.flatten()
            )
            if verify
            else None,
            attn_attend_prefix_cache=None,
            mha_return_lse=None,
        )

    def expected(self, one: RadixAttention, pool: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output in float64, with keys and values as a cache of the pool's dtype has them."""
        results, first = [], 0
        for key, value, (n, new), tree in zip(self.key, self.value, self.requests, TREES, strict=True):
            key, value = self.stored(key, one.k_scale, pool), self.stored(value, one.v_scale, pool)
            window = one.sliding_window_size
            mask = Mask(MaskKind.CAUSAL if window < 0 else MaskKind.SLIDING_WINDOW, max(window, 0))
            seen = reference.visible(new, n, mask, torch.device("cpu"))
            if self.kind == "tree":
                seen[:, n - new :] = tree
            rows = self.query[first : first + new].double()
            score = Score.capped(one.logit_cap)
            results.append(reference.attention(rows, key, value, one.scaling, seen, sinks, score=score)[0])
            first += new
        return torch.cat(results).flatten(1)

    @staticmethod
    def stored(tokens: torch.Tensor, scale: float | None, pool: Any) -> torch.Tensor:
        scale = scale or 1.0
        return (tokens.float() / scale).to(pool.k.dtype).double() * scale
