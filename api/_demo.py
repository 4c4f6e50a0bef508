"""``python -m hopwell demo``: prefill and decode over a paged cache, checked against float64."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.kernels import support

PAGE_SIZE = 16
HEAD_DIM = 128
MAX_ERROR = 8e-3  # relative to the largest output; one key too many or too few among few hundred costs more
CHECKED_ROWS = 64  # of each request, the last ones
LISTED = 5  # requests


@dataclass
class Prefill:
    """Requests with new tokens and a paged cache that holds the keys and values of all their tokens."""

    ENTRY: ClassVar[str] = "trtllm_batch_context_with_kv_cache"

    q_lens: list[int]
    kv_lens: list[int]
    heads: int
    kv_heads: int
    device: str

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device).bfloat16()

        pages = [math.ceil(n / PAGE_SIZE) for n in self.kv_lens]
        self.query = normal(sum(self.q_lens), self.heads, HEAD_DIM)
        self.kv_cache = normal(sum(pages), 2, self.kv_heads, PAGE_SIZE, HEAD_DIM)
        order = torch.randperm(sum(pages), dtype=torch.int32)
        table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
        for row, ids in zip(table, order.split(pages), strict=True):
            row[: len(ids)] = ids
        self.block_tables = table.to(self.device)
        self.seq_lens = torch.tensor(self.kv_lens, dtype=torch.int32, device=self.device)
        ends = torch.tensor([0, *self.q_lens]).cumsum(0)
        self.starts = ends.to(torch.int32).to(self.device)
        self.workspace = torch.empty(self.workspace_bytes(), dtype=torch.uint8, device=self.device)

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
            bmm1_scale=HEAD_DIM**-0.5,
            bmm2_scale=1.0,
            batch_size=len(self.q_lens),
            cum_seq_lens_q=self.starts,
            cum_seq_lens_kv=self.starts,
            out=out,
        )
        assert isinstance(result, torch.Tensor)  # no NVFP4 output was asked for
        return result

    def error(self, out: torch.Tensor) -> float:
        """Largest difference from float64 in the last rows of each request, relative to the largest output."""
        worst = largest = 0.0
        for index, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            rows = min(q_len, CHECKED_ROWS)
            end = int(self.starts[index + 1])
            used = self.block_tables[index, : math.ceil(kv_len / PAGE_SIZE)].long()
            # [pages, 2, kv_heads, page, dim] -> [2, kv_heads, tokens, dim]
            tokens = self.kv_cache[used].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]
            key, value = tokens.double().repeat_interleave(self.heads // self.kv_heads, 1)
            query = self.query[end - rows : end].double().transpose(0, 1)
            logits = query @ key.transpose(1, 2) * HEAD_DIM**-0.5
            hidden = torch.ones(rows, kv_len, dtype=torch.bool, device=self.device).triu(kv_len - rows + 1)
            want = logits.masked_fill(hidden, -math.inf).softmax(2) @ value
            got = out[end - rows : end].double().transpose(0, 1)
            worst = max(worst, float((got - want).abs().max()))
            largest = max(largest, float(want.abs().max()))
        return worst / largest

    def rate(self, milliseconds: float) -> str:
        """Multiplications and additions of both matrix products in a second, visible keys only."""
        visible = sum(q * (kv - q) + q * (q + 1) / 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return f"{4.0 * self.heads * HEAD_DIM * visible / milliseconds / 1e9:.0f} TFLOP/s"

    def describe(self) -> str:
        requests = [f"{q} of {kv}" for q, kv in zip(self.q_lens, self.kv_lens, strict=True)]
        more = f", ... {requests[-1]}" if len(requests) > LISTED else ""
        return (
            f"{self.ENTRY}\n"
            f"  {len(requests)} requests (new tokens of all): {', '.join(requests[:LISTED])}{more}\n"
            f"  {self.heads} query heads, {self.kv_heads} KV heads, head_dim {HEAD_DIM}, bf16, causal\n"
            f"  cache {list(self.kv_cache.shape)}: [pages, K and V, kv_heads, page_size, head_dim]\n"
            "  (a kernel that is not in the cache yet is compiled first: a few seconds)"
        )


class Decode(Prefill):
    """Requests with one new token each."""

    ENTRY = "xqa_batch_decode_with_kv_cache"

    def __init__(self, kv_lens: list[int], heads: int, kv_heads: int, device: str):
        super().__init__([1] * len(kv_lens), kv_lens, heads, kv_heads, device)

    def capacity(self) -> int:
        """Tokens that a row of the page table has room for."""
        return PAGE_SIZE * self.block_tables.shape[1]

    def workspace_bytes(self) -> int:
        return xqa_workspace_bytes(self.heads, self.kv_heads, HEAD_DIM, self.capacity(), device=self.device)

    def attend(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return hopwell.xqa_batch_decode_with_kv_cache(
            query=self.query,
            kv_cache=self.kv_cache,
            workspace_buffer=self.workspace,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            max_seq_len=self.capacity(),
            bmm1_scale=HEAD_DIM**-0.5,
            out=out,
            kv_layout="HND",
        )

    def rate(self, milliseconds: float) -> str:
        """Bytes of keys and values in a second."""
        octets = sum(self.kv_lens) * self.kv_heads * HEAD_DIM * 2 * self.kv_cache.element_size()
        return f"{octets / milliseconds / 1e6:.0f} GB/s of keys and values"


def run(device: str | None) -> int:
    """Run the demonstration on ``device`` ("cuda", "cpu", None for what there is); returns the exit status."""
    on_gpu = _gpu_has_kernels() if device is None else device == "cuda"
    return _on_gpu() if on_gpu else _on_emulator()


def _gpu_has_kernels() -> bool:
    """Whether there is a GPU of an architecture that any kernel is for."""
    if not torch.cuda.is_available():
        return False
    try:
        return support.arch_of(torch.device("cuda")) in (*support.HOPPER, *support.BLACKWELL)
    except NotImplementedError:
        return False


def _on_gpu() -> int:
    print(torch.cuda.get_device_name(), flush=True)
    # The attention of a Llama-3-8B layer: prompts, and one that continues after a cached prefix; then steps.
    prompts = Prefill([8192, 4096, 4096, 2000, 1000], [8192, 4096, 4096, 2000, 9000], 32, 8, "cuda")
    return _show(_time, prompts, Decode([*range(1000, 9000, 125)], 32, 8, "cuda"))


def _show(show: Callable[[Prefill], int], *batches: Prefill) -> int:
    """Show each batch; one that no kernel serves on this architecture is no failure. Returns the exit status."""
    status = 0
    for batch in batches:
        print(batch.describe(), flush=True)
        try:
            status = show(batch) or status
        except NotImplementedError as missing:
            print(f"  {missing}", flush=True)
    return status


def _time(batch: Prefill) -> int:
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
    return _show(_emulate, Prefill([5, 130], [37, 300], 4, 2, "cpu"), Decode([38, 301, 1100], 4, 2, "cpu"))


def _emulate(batch: Prefill) -> int:
    from hopwell import emulator

    begin = time.perf_counter()
    out = batch.attend()
    seconds = time.perf_counter() - begin
    status = _report(batch, out)
    launched = emulator.report()
    print(f"  {launched.instructions:,} warp instructions, {seconds:.1f} s with compiling and loading the kernel")
    return status


def _report(batch: Prefill, out: torch.Tensor) -> int:
    error = batch.error(out)
    verdict = "right" if error < MAX_ERROR else "WRONG"
    print(f"  error against float64: {error:.1e} of the largest output: {verdict}", flush=True)
    return 0 if error < MAX_ERROR else 1
