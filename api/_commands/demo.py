"""``python -m hopwell demo``: prefill, decode and MLA decode over a paged cache, checked against float64."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.kernels import support
from hopwell.mla import mla_workspace_bytes

MAX_ERROR = 8e-3  # relative to the largest output; one wrong key among a few hundred causes a larger error
CHECKED_ROWS = 64  # last rows of each request
TOPK = 5  # requests listed in the description


class Batch(ABC):
    """Requests with new tokens, one each unless ``q_lens`` is given, and a paged cache that holds all their tokens."""

    ENTRY: ClassVar[str]
    PAGE_SIZE: ClassVar[int]
    HEAD_DIM: ClassVar[int]  # of queries and keys
    V_HEAD_DIM: ClassVar[int]
    SCALE: ClassVar[float]  # of the logits
    STACKED: ClassVar[tuple[int, ...]]  # sizes of the cache between pages and KV heads
    CACHE: ClassVar[str]  # names of the cache's sizes

    def __init__(self, device: str, kv_lens: list[int], heads: int, kv_heads: int = 1, q_lens: list[int] | None = None):
        self.device, self.kv_lens, self.heads, self.kv_heads = device, kv_lens, heads, kv_heads
        self.q_lens = q_lens or [1] * len(kv_lens)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        pages = [math.ceil(n / self.PAGE_SIZE) for n in kv_lens]
        self.query = normal(sum(self.q_lens), heads, self.HEAD_DIM)
        self.kv_cache = normal(sum(pages), *self.STACKED, kv_heads, self.PAGE_SIZE, self.HEAD_DIM)
        order = torch.randperm(sum(pages), generator=generator, device=device).int().cpu()
        table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
        for row, ids in zip(table, order.split(pages), strict=True):
            row[: len(ids)] = ids
        self.block_tables = table.to(device)
        self.seq_lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        ends = torch.tensor([0, *self.q_lens]).cumsum(0)
        self.starts = ends.to(torch.int32).to(device)
        self.workspace = torch.empty(self.workspace_bytes(), dtype=torch.uint8, device=device)

    def capacity(self) -> int:
        """Return the most tokens that a row of the page table has room for."""
        return self.PAGE_SIZE * self.block_tables.shape[1]

    @abstractmethod
    def workspace_bytes(self) -> int: ...

    @abstractmethod
    def attend(self, out: torch.Tensor | None = None) -> torch.Tensor: ...

    @abstractmethod
    def key_and_value(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as [kv_heads, tokens, dim], from a request's part of the cache [..., kv_heads, tokens,
        dim]."""

    def error(self, out: torch.Tensor) -> float:
        """Return the largest difference from float64 in each request's last rows, relative to the largest output."""
        out = out.view(-1, self.heads, self.V_HEAD_DIM)  # MLA outputs have one more dimension
        worst = largest = 0.0
        for index, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            rows = min(q_len, CHECKED_ROWS)
            end = int(self.starts[index + 1])
            used = self.block_tables[index, : math.ceil(kv_len / self.PAGE_SIZE)].long()
            # [pages, ..., kv_heads, page, dim] -> [..., kv_heads, tokens, dim]
            cached = self.kv_cache[used].movedim(0, -3).flatten(-3, -2)[..., :kv_len, :]
            key, value = self.key_and_value(cached.double())
            query = self.query[end - rows : end].double().unflatten(1, (self.kv_heads, -1))
            logits = torch.einsum("rhgd,hkd->hgrk", query, key) * self.SCALE
            hidden = torch.ones(rows, kv_len, dtype=torch.bool, device=self.device).triu(kv_len - rows + 1)
            weights = logits.masked_fill(hidden, -math.inf).softmax(3)
            want = torch.einsum("hgrk,hkd->rhgd", weights, value).flatten(1, 2)
            got = out[end - rows : end].double()
            worst = max(worst, float((got - want).abs().max()))
            largest = max(largest, float(want.abs().max()))
        return worst / largest

    def rate(self, milliseconds: float) -> str:
        """Return the multiplications and additions per second of both matrix products, counting visible keys only."""
        visible = sum(q * (kv - q) + q * (q + 1) / 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return f"{2.0 * self.heads * (self.HEAD_DIM + self.V_HEAD_DIM) * visible / milliseconds / 1e9:.0f} TFLOP/s"

    def describe(self) -> str:
        requests = [f"{q} of {kv}" for q, kv in zip(self.q_lens, self.kv_lens, strict=True)]
        heads = f"heads {self.heads}/{self.kv_heads}"
        dims = f"head dims {self.HEAD_DIM}/{self.V_HEAD_DIM}"
        more = f", ... {requests[-1]}" if len(requests) > TOPK else ""
        return (
            f"{self.ENTRY}\n"
            f"  {len(requests)} requests (new tokens of all): {', '.join(requests[:TOPK])}{more}\n"
            f"  {heads} (Q/KV), {dims} (QK/V), bf16, causal\n"
            f"  cache {list(self.kv_cache.shape)}: {self.CACHE}"
        )


class KeysAndValues(Batch):
    """A cache that holds keys and values side by side."""

    PAGE_SIZE = 16
    HEAD_DIM = V_HEAD_DIM = 128
    SCALE = HEAD_DIM**-0.5
    STACKED = (2,)
    CACHE = "[pages, K and V, kv_heads, page_size, head_dim]"

    def key_and_value(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = cached
        return key, value


class Prefill(KeysAndValues):
    ENTRY = "trtllm_batch_context_with_kv_cache"

    def workspace_bytes(self) -> int:
        return 0

    def attend(self, out: torch.Tensor | None = None) -> torch.Tensor:
        result = hopwell.trtllm_batch_context_with_kv_cache(
            query=self.query,
            kv_cache=self.kv_cache,
            workspace_buffer=self.workspace,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            max_q_len=max(self.q_lens),
            max_kv_len=max(self.kv_lens),
            bmm1_scale=self.SCALE,
            bmm2_scale=1.0,
            batch_size=len(self.q_lens),
            cum_seq_lens_q=self.starts,
            cum_seq_lens_kv=self.starts,
            out=out,
        )
        assert isinstance(result, torch.Tensor)  # the call requests no NVFP4 output
        return result


class Decode(KeysAndValues):
    ENTRY = "xqa_batch_decode_with_kv_cache"

    def workspace_bytes(self) -> int:
        return xqa_workspace_bytes(self.heads, self.kv_heads, self.HEAD_DIM, self.capacity(), device=self.device)

    def attend(self, out: torch.Tensor | None = None) -> torch.Tensor:
        result = hopwell.xqa_batch_decode_with_kv_cache(
            query=self.query,
            kv_cache=self.kv_cache,
            workspace_buffer=self.workspace,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            max_seq_len=self.capacity(),
            bmm1_scale=self.SCALE,
            out=out,
            kv_layout="HND",
        )
        assert isinstance(result, torch.Tensor)  # the call requests no log-sum-exp
        return result

    def rate(self, milliseconds: float) -> str:
        """Return the bytes of keys and values per second."""
        octets = sum(self.kv_lens) * self.kv_heads * (self.HEAD_DIM + self.V_HEAD_DIM) * self.kv_cache.element_size()
        return f"{octets / milliseconds / 1e6:.0f} GB/s of keys and values"


class MlaDecode(Batch):
    """MLA decode: all heads share the key of a token, whose first columns are its value."""

    ENTRY = "trtllm_batch_decode_with_kv_cache_mla"
    PAGE_SIZE = 64
    NOPE_HEAD_DIM, ROPE_HEAD_DIM = 128, 64
    V_HEAD_DIM = 512  # kv_lora_rank
    HEAD_DIM = V_HEAD_DIM + ROPE_HEAD_DIM
    SCALE = (NOPE_HEAD_DIM + ROPE_HEAD_DIM) ** -0.5  # of keys before compression
    STACKED = ()
    CACHE = "[pages, kv_heads, page_size, kv_lora_rank + qk_rope_head_dim]"

    def key_and_value(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cached, cached[..., : self.V_HEAD_DIM]

    def workspace_bytes(self) -> int:
        return mla_workspace_bytes(self.heads, self.capacity(), kv_lora_rank=self.V_HEAD_DIM, device=self.device)

    def attend(self, out: torch.Tensor | None = None) -> torch.Tensor:
        result = hopwell.trtllm_batch_decode_with_kv_cache_mla(
            query=self.query.unsqueeze(1),
            kv_cache=self.kv_cache,
            workspace_buffer=self.workspace,
            qk_nope_head_dim=self.NOPE_HEAD_DIM,
            kv_lora_rank=self.V_HEAD_DIM,
            qk_rope_head_dim=self.ROPE_HEAD_DIM,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            max_seq_len=self.capacity(),
            out=out,
            bmm1_scale=self.SCALE,
        )
        assert isinstance(result, torch.Tensor)  # the call requests no log-sum-exp
        return result


def run(device: str | None) -> int:
    """Run the demonstration on ``device`` ("cuda", "cpu", None for whichever exists) and return the exit status."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("--device cuda needs a GPU, and torch finds none; --device cpu runs on the emulator")
    on_gpu = _gpu_has_kernels() if device is None else device == "cuda"
    return _on_gpu() if on_gpu else _on_emulator()


def _gpu_has_kernels() -> bool:
    """Return whether there is a GPU whose architecture has kernels."""
    if not torch.cuda.is_available():
        return False
    try:
        support.arch_of(torch.device("cuda"))
    except NotImplementedError:
        return False
    return True


def _on_gpu() -> int:
    print(torch.cuda.get_device_name(), flush=True)
    # A Llama-3-8B layer: prompts, one of which continues after a cached prefix, and then decode steps. A DeepSeek-V3
    # layer: decode steps.
    prompts = Prefill("cuda", [8192, 4096, 4096, 2000, 9000], 32, 8, q_lens=[8192, 4096, 4096, 2000, 1000])
    kv_lens = [*range(1000, 9000, 125)]
    return _show(_time, prompts, Decode("cuda", kv_lens, 32, 8), MlaDecode("cuda", kv_lens, 128))


def _show(show: Callable[[Batch], int], *batches: Batch) -> int:
    """Show each batch and return the exit status. A batch without a kernel on this architecture does not fail."""
    status = 0
    for batch in batches:
        print(batch.describe(), flush=True)
        try:
            status = show(batch) or status
        except NotImplementedError as missing:
            print(f"  {missing}", flush=True)
    return status


def _time(batch: Batch) -> int:
    out = batch.attend()
    status = _report(batch, out)
    for _ in range(20):
        batch.attend(out)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repeats = 50
    begin.record()
    for _ in range(repeats):
        batch.attend(out)
    end.record()
    torch.cuda.synchronize()
    milliseconds = begin.elapsed_time(end) / repeats
    print(f"  {milliseconds:.3f} ms, {batch.rate(milliseconds)}")
    return status


def _on_emulator() -> int:
    from hopwell import emulator

    print(f"emulated {emulator.options().arch}, no GPU is used", flush=True)
    prompts = Prefill("cpu", [37, 300], 4, 2, q_lens=[5, 130])
    kv_lens = [38, 301, 1100]
    return _show(_emulate, prompts, Decode("cpu", kv_lens, 4, 2), MlaDecode("cpu", kv_lens, 16))


def _emulate(batch: Batch) -> int:
    from hopwell import emulator

    begin = time.perf_counter()
    out = batch.attend()
    seconds = time.perf_counter() - begin
    status = _report(batch, out)
    launched = emulator.report()
    print(f"  {launched.instructions:,} warp instructions; the whole call took {seconds:.1f} s", flush=True)
    return status


def _report(batch: Batch, out: torch.Tensor) -> int:
    error = batch.error(out)
    verdict = "right" if error < MAX_ERROR else "WRONG"
    print(
        f"  error against float64, right below {MAX_ERROR:.0e}: {error:.1e} of the largest output: {verdict}",
        flush=True,
    )
    return 0 if error < MAX_ERROR else 1
