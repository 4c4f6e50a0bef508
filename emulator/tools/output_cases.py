"""Small calls of the prefill entry points whose inputs are the same on every machine, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import hopwell

HEADS, KV_HEADS = 4, 2
Q_LENS, KV_LENS = (5, 0, 1, 131), (9, 3, 0, 261)  # up to two tiles of queries and three of keys
DIMS = (32, 40, 48, 64, 80, 96, 104, 128, 160, 192, (192, 128), 256, 512)


@dataclass(frozen=True)
class Case:
    """One call. ``layout``: fmha_v2's input layout, context's KV layout, and for cudnn "ragged" or a KV layout.

    ``arguments`` are further ones of the entry point, tuples stand for float32 tensors. Contiguous layouts have no
    ``page_size``.
    """

    group: str
    entry: str  # context, fmha_v2, cudnn
    layout: str
    dims: int | tuple[int, int] = 128
    page_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the unique name that a recording knows the case by."""
        dims = self.dims if isinstance(self.dims, int) else "-".join(map(str, self.dims))
        pages = [f"page{self.page_size}"] if self.page_size else []
        more = [f"{key}={value}" for key, value in self.arguments.items()]
        return " ".join((self.entry, self.layout, f"d{dims}", str(self.dtype).removeprefix("torch."), *pages, *more))

    def run(self, device: str) -> tuple[dict[str, torch.Tensor], str]:
        """Return the results by name, ``out`` and perhaps ``statistics`` (those of fmha_v2 or the log-sum-exp), and the
        digest of the inputs."""
        inputs = Inputs(self, device)
        return {"context": context, "fmha_v2": fmha_v2, "cudnn": cudnn}[self.entry](self, inputs), inputs.digest


class Inputs:
    """Queries, keys and values of a case on a device, drawn from integers: float generators differ between CPUs."""

    def __init__(self, case: Case, device: str) -> None:
        self.device, self._hash = device, hashlib.sha256()
        self.more: dict[str, Any] = {
            key: torch.tensor(value, device=device) if isinstance(value, tuple) else value
            for key, value in case.arguments.items()
        }
        self._random = np.random.default_rng(list(case.name.encode()))
        self.dim, self.v_dim = (case.dims, case.dims) if isinstance(case.dims, int) else case.dims
        packed = case.layout == "PACKED_QKV"
        self.kv_heads = HEADS if packed else KV_HEADS
        self.q_lens, self.kv_lens = (KV_LENS if packed else Q_LENS), KV_LENS
        self.q = self._draw(case.dtype, sum(self.q_lens), HEADS, self.dim)
        places: tuple[int, ...] = (sum(KV_LENS), self.kv_heads)
        if case.page_size:
            counts = [-(-n // case.page_size) for n in KV_LENS]
            pages = self._random.permutation(sum(counts)).tolist()
            rows = [[pages.pop() if i < n else -1 for i in range(max(counts))] for n in counts]
            self.table = torch.tensor(rows, dtype=torch.int32, device=device)
            places = (sum(counts), self.kv_heads, case.page_size)
        self.k = self._draw(case.dtype, *places, self.dim)
        self.v = self._draw(case.dtype, *places, self.v_dim)

    def _draw(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Draw numbers that are about normally distributed, and exact in float32."""
        values = self._random.integers(-128, 128, (4, *shape)).sum(0).astype(np.float32) / 128
        drawn = torch.from_numpy(values).to(dtype)
        self._hash.update(drawn.view(torch.uint8).numpy().tobytes())
        return drawn.to(self.device)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def ints(self, values: Iterator[int] | tuple[int, ...] | list[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def starts(self, lengths: tuple[int, ...], unit: int = 1) -> torch.Tensor:
        return self.ints([unit * n for n in itertools.accumulate(lengths, initial=0)])

    def common(self) -> dict[str, Any]:
        """Return the arguments that context and fmha_v2 both take."""
        return dict(
            workspace_buffer=torch.empty(0, dtype=torch.uint8, device=self.device),
            seq_lens=self.ints(self.kv_lens),
            max_q_len=max(self.q_lens),
            max_kv_len=max(self.kv_lens),
            bmm1_scale=1 / math.sqrt(self.dim),
            bmm2_scale=1.0,
            batch_size=len(self.q_lens),
            cum_seq_lens_q=self.starts(self.q_lens),
            cum_seq_lens_kv=self.starts(self.kv_lens),
        )


def context(case: Case, x: Inputs) -> dict[str, Any]:
    cache = (x.k, x.v) if case.layout == "HND" else tuple(pool.transpose(1, 2).contiguous() for pool in (x.k, x.v))
    arguments = x.common() | dict(query=x.q, kv_cache=cache, block_tables=x.table, kv_layout=case.layout)
    return {"out": hopwell.trtllm_batch_context_with_kv_cache(**(arguments | x.more))}


def fmha_v2(case: Case, x: Inputs) -> dict[str, Any]:
    arguments = x.common() | dict(input_layout=case.layout, save_softmax_stats=not case.page_size)
    if case.layout == "PACKED_QKV":
        arguments["qkv"] = torch.stack([x.q, x.k, x.v], 1)
    elif case.layout == "CONTIGUOUS_Q_KV":
        arguments["qkv"] = (x.q, torch.stack([x.k, x.v], 1))
    elif case.layout == "SEPARATE_Q_K_V":
        arguments["qkv"] = (x.q, x.k, x.v)
    else:
        pool = torch.stack([x.k, x.v], 1)
        arguments["qkv"] = (x.q, pool if case.layout.endswith("HND") else pool.transpose(2, 3).contiguous())
        arguments["block_tables"] = x.table
    result = hopwell.trtllm_fmha_v2_prefill(**(arguments | x.more))
    return {"out": result} if case.page_size else {"out": result[0], "statistics": result[1]}


def cudnn(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    rows = dict(q=HEADS * x.dim, o=HEADS * x.v_dim)
    places: dict[str, Any] = {f"batch_offsets_{key}": x.starts(Q_LENS, unit) for key, unit in rows.items()}
    if case.page_size:
        places["block_tables"] = x.table
    else:
        columns = dict(k=KV_HEADS * x.dim, v=KV_HEADS * x.v_dim)
        places |= {f"batch_offsets_{key}": x.starts(KV_LENS, unit) for key, unit in columns.items()}
    out, lse = hopwell.cudnn_batch_prefill_with_kv_cache(
        x.q,
        x.k,
        x.v,
        1 / math.sqrt(x.dim),
        torch.empty(0, dtype=torch.uint8, device=x.device),
        max_token_per_sequence=max(Q_LENS),
        max_sequence_kv=max(KV_LENS),
        actual_seq_lens_q=x.ints(Q_LENS),
        actual_seq_lens_kv=x.ints(KV_LENS),
        return_lse=True,
        lse=torch.zeros(len(Q_LENS), max(Q_LENS), HEADS, device=x.device),
        **places,
        **x.more,
    )
    assert lse is not None
    return {"out": out, "statistics": lse}


MASKS: dict[str, dict[str, Any]] = {
    "full": {"mask_mode": "padding"},
    "causal": {},
    "sliding window": {"window_left": 70},
    "chunked": {"chunked_attention_size": 64},
}
SCORES: dict[str, dict[str, Any]] = {
    "soft cap": {"logits_soft_cap_scale": 2.0},
    "ALiBi": {"pos_encoding_mode": "alibi"},
    "skipped tiles": {"skip_softmax_threshold_scale_factor": 1000.0, "bmm1_scale": 0.3},
}


def cases() -> Iterator[Case]:
    """Yield cases of every head dim, mask, way to fetch, score and dtype, and of every entry point and layout."""
    for dims in DIMS:
        yield Case("head dims", "fmha_v2", "SEPARATE_Q_K_V", dims)
    for dims in (64, 128, (192, 128), 256):
        yield Case("head dims", "context", "HND", dims, 64)
        yield Case("float16", "context", "HND", dims, 16, torch.float16)
        yield Case("float16", "fmha_v2", "SEPARATE_Q_K_V", dims, 0, torch.float16, MASKS["sliding window"])
    for mask, arguments in MASKS.items():
        for layout, page_size in (("CONTIGUOUS_Q_KV", 0), ("Q_PAGED_KV_HND", 16), ("Q_PAGED_KV_HND", 2)):
            yield Case(f"mask: {mask}", "fmha_v2", layout, page_size=page_size, arguments=arguments)
    for page_size in (1, 8, 16, 32, 128):
        yield Case("pages", "context", "NHD", page_size=page_size)
    for score, arguments in SCORES.items():
        for layout, dims, page_size in (("CONTIGUOUS_Q_KV", 64, 0), ("Q_PAGED_KV_NHD", 128, 16)):
            yield Case(f"score: {score}", "fmha_v2", layout, dims, page_size, arguments=arguments)
    yield Case("layouts", "fmha_v2", "PACKED_QKV")
    yield Case("layouts", "context", "HND", page_size=16, arguments={"sinks": (-1.0, 0.0, 0.5, 2.0)})
    for layout, page_size in (("ragged", 0), ("HND", 16)):
        for causal in (False, True):
            yield Case("cuDNN", "cudnn", layout, page_size=page_size, arguments={"causal": causal})
