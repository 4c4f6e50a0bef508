"""Merged states equal float64 attention over all keys, in one process and over ranks."""

from __future__ import annotations

import doctest
import itertools
import math
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import hopwell
from hopwell import cascade

INF, NAN = math.inf, math.nan
BASES = {"base2": 2.0, "log2": 2.0, "basee": math.e, "ln": math.e}


def states(rows: int, keys: list[int], heads: int = 3, dim: int = 8, size: float = 3.0) -> tuple[torch.Tensor, ...]:
    """Return (outputs, natural LSE) of disjoint ranges of keys, and output and LSE of all keys, all in float64."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, heads, sum(keys), generator=generator, dtype=torch.float64) * size
    values = torch.randn(rows, heads, sum(keys), dim, generator=generator, dtype=torch.float64)

    def attend(chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part, value = logits[..., chosen], values[..., chosen, :]
        lse = part.logsumexp(-1)
        return ((part - lse[..., None]).exp()[..., None] * value).sum(-2), lse

    ends = [0, *torch.tensor(keys).cumsum(0).tolist()]
    parts = [attend(slice(a, b)) for a, b in itertools.pairwise(ends)]
    outputs, lses = (torch.stack(one, 1) for one in zip(*parts, strict=True))
    return outputs.nan_to_num(), lses, *attend(slice(None))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [0.0, 3.0, 300.0])
def test_chunks(base: str, dtype: torch.dtype, size: float) -> None:
    """Empty chunks, short ones, and chunks of which one outweighs the others by hundreds of binary orders."""
    outputs, lses, want, want_lse = states(5, [7, 0, 1, 40], size=size)
    accurate = dtype == torch.float64
    narrow, scale = outputs.to(dtype), math.log(BASES[base])
    s = lses / scale
    out, lse = hopwell.merge_states(narrow, s if accurate else s.float(), lse_base=base)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if accurate else torch.float32)
    step = 1e-12 if accurate else max(torch.finfo(dtype).eps, 2e-5)
    assert (out.double() - want).abs().max() <= step * want.abs().max()
    assert (lse.double() * scale - want_lse).abs().max() <= (1e-12 if accurate else 1e-6) * want_lse.abs().max()


def test_two_states_and_in_place() -> None:
    outputs, lses, want, _ = states(4, [5, 9])
    v, s = outputs.float(), lses.float()
    out, lse = cascade.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1], lse_base="basee")
    torch.testing.assert_close(out, want.float())
    mine, own = v[:, 0].clone(), s[:, 0].clone()
    cascade.merge_state_in_place(
        mine, own, v[:, 1], s[:, 1], torch.tensor([True, False, True, False]), lse_base="basee"
    )
    assert torch.equal(mine[::2], out[::2])
    assert torch.equal(own[::2], lse[::2])
    assert torch.equal(mine[1::2], v[1::2, 0])
    assert torch.equal(own[1::2], s[1::2, 0])


class TestExtremes:
    @staticmethod
    def merge(outputs: list[float], lses: list[float]) -> tuple[float, float]:
        v, s = torch.tensor(outputs).view(-1, 1, 1), torch.tensor(lses).view(-1, 1)
        out, lse = hopwell.merge_states(v, s)
        return out.item(), lse.item()

    def test_empty_states_do_not_count(self) -> None:
        assert self.merge([2.0, NAN], [1.0, -INF]) == (2.0, 1.0)
        assert self.merge([INF, 2.0], [-INF, -3e38]) == (2.0, pytest.approx(-3e38))

    def test_only_empty_states(self) -> None:
        assert self.merge([NAN, 5.0], [-INF, -INF]) == (0.0, -INF)

    def test_infinite_sinks(self) -> None:
        assert self.merge([0.0, 5.0], [INF, 7.0]) == (0.0, INF)

    def test_nan_stays(self) -> None:
        assert all(map(math.isnan, self.merge([1.0, 5.0], [NAN, 7.0])))
        assert math.isnan(self.merge([NAN, 5.0], [-900.0, 7.0])[0]), "a state with keys counts, whatever its weight"

    def test_large_exponents(self) -> None:
        assert self.merge([1.0, 3.0], [3e38, 3e38]) == (2.0, pytest.approx(3e38))

    def test_sinks_are_a_state(self) -> None:
        outputs, lses, _, _ = states(2, [6])
        sinks = torch.randn(3, dtype=torch.float64)
        v = torch.cat((outputs, torch.zeros_like(outputs)), 1)
        out, _ = hopwell.merge_states(v, torch.cat((lses, sinks.expand(2, 1, 3)), 1), lse_base="ln")
        torch.testing.assert_close(out, outputs[:, 0] * torch.sigmoid(lses[:, 0] - sinks)[..., None])


def test_compiled() -> None:
    outputs, lses, _, _ = states(5, [7, 0, 1])
    v, s = outputs.bfloat16(), lses.float()
    compiled = torch.compile(hopwell.merge_states, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(v, s), hopwell.merge_states(v, s), strict=True):
        assert torch.equal(got, want)


def test_docstrings() -> None:
    assert doctest.testmod(cascade, extraglobs={"torch": torch}).failed == 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (dict(lse_base="base10"), ValueError, "lse_base must be one of 'base2', 'log2', 'basee', 'ln', got str"),
        (dict(s=torch.zeros(4, 3, 2)), ValueError, r"s must have the shape of v without head_dim, \(4, 2, 3\), got"),
        (dict(v=torch.zeros(4, 2, 3, 8).int()), ValueError, "v must have a floating-point dtype, got torch.int32"),
        (dict(s=torch.zeros(4, 2, 3).half()), ValueError, "s must be torch.float32, got torch.float16"),
        (dict(v=None), TypeError, "v must be a torch.Tensor, got None"),
        (dict(v=torch.zeros(3, 8), s=torch.zeros(3)), ValueError, r"v must have shape \[..., num_states, num_heads"),
        (dict(v=torch.zeros(4, 0, 3, 8), s=torch.zeros(4, 0, 3)), ValueError, "v must have at least one state"),
        (dict(s=torch.zeros(4, 2, 3, device="meta")), ValueError, "s must be on cpu, the device of v, got meta"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hopwell.merge_states(**{"v": torch.zeros(4, 2, 3, 8), "s": torch.zeros(4, 2, 3), **given})


def test_ranks_need_a_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        cascade.merge_ranks(torch.zeros(2, 4, 8), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"lse must have shape \(2, 4\) or \(2, 4\) for an out of \(2, 4, 8\), got"):
        cascade.merge_ranks(torch.zeros(2, 4, 8), torch.zeros(4, 2))


def spawn(work: Any, folder: pathlib.Path, world: int = 2) -> None:
    """Run ``work(rank, world)`` in processes of a gloo group."""
    mp.spawn(_process, (world, str(folder / "store"), work), nprocs=world)


def _process(rank: int, world: int, store: str, work: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    work(rank, world)
    dist.destroy_process_group()


def merge_everything(rank: int, world: int) -> None:
    """Merge states of several shapes and dtypes, with all heads and with a part of them on each rank."""
    outputs, lses, want, want_lse = states(6, [5, 12], heads=4)
    lses[2, rank] = -INF  # no keys of one row on any rank
    want[2], want_lse[2] = 0.0, -INF
    for dtype, base in ((torch.bfloat16, "basee"), (torch.float32, "base2"), (torch.float8_e4m3fn, "ln")):
        scale = math.log(BASES[base])
        mine, own = outputs[:, rank].to(dtype), (lses[:, rank] / scale).float()
        lses_of = lses.clone()
        lses_of[2] = -INF
        step = max(torch.finfo(dtype).eps, 2e-6) * want.abs().max()
        for out, lse in ((mine, own), (mine.view(2, 3, 4, 8), own), (mine.view(2, 3, 4, 8), own.view(2, 3, 4))):
            got, got_lse = cascade.merge_ranks(out, lse, lse_base=base)
            assert (got.shape, got_lse.shape, got.dtype) == (out.shape, lse.shape, dtype)
            assert (got.view(6, 4, 8).double() - want).abs().max() <= step
            torch.testing.assert_close(got_lse.view(6, 4).double() * scale, want_lse, atol=1e-5, rtol=1e-6)
            heads = slice(4 // world * rank, 4 // world * (rank + 1))
            part, part_lse = cascade.merge_ranks(out, lse, lse_base=base, scatter_heads=True)
            assert torch.equal(part.double(), got[..., heads, :].double())
            assert torch.equal(part_lse, got_lse[..., heads])
    with pytest.raises(ValueError, match="out must have a multiple of 2 heads, the ranks of the group, got 3"):
        cascade.merge_ranks(torch.zeros(2, 3, 8), torch.zeros(2, 3), scatter_heads=True)


def test_ranks(tmp_path: pathlib.Path) -> None:
    spawn(merge_everything, tmp_path)


def decode_over_ranks(rank: int, world: int) -> None:
    """Decode three new tokens of each request, whose keys lie on the ranks in turns, and compare with float64."""
    heads, kv_heads, dim, page_size, q_len = 2, 1, 64, 16, 3
    lengths = [21, 3]  # the second request has new tokens only, so rows of it see no key of a rank
    generator = torch.Generator().manual_seed(0)
    query, *tokens = (
        torch.randn(n, count, dim, generator=generator).bfloat16()
        for n, count in ((2 * q_len, heads), *[(n, kv_heads) for n in lengths for _ in "kv"])
    )
    keys, values = tokens[::2], tokens[1::2]
    cache = torch.zeros(2, 2, page_size, kv_heads, dim, dtype=torch.bfloat16)  # K and V, NHD, one page a request
    for pages, of in zip(cache, (keys, values), strict=True):
        for page, each in zip(pages, of, strict=True):
            page[: len(each[rank::world])] = each[rank::world]
    out, lse = hopwell.trtllm_batch_decode_with_kv_cache(
        query=query,
        kv_cache=(cache[0], cache[1]),
        workspace_buffer=torch.empty(1 << 26, dtype=torch.uint8),
        block_tables=torch.tensor([[0], [1]], dtype=torch.int32),
        seq_lens=torch.tensor([len(key[rank::world]) for key in keys], dtype=torch.int32),
        max_seq_len=page_size,
        bmm1_scale=dim**-0.5,
        kv_layout="NHD",
        q_len_per_req=q_len,
        cp_world=world,
        cp_rank=rank,
        causal_seqlens_kv_global=torch.tensor(lengths, dtype=torch.int32),
        return_lse=True,
        return_lse_base="basee",
    )
    merged, merged_lse = cascade.merge_ranks(out, lse, lse_base="basee")
    for request, (key, value) in enumerate(zip(keys, values, strict=True)):
        for token in range(q_len):
            row, seen = request * q_len + token, lengths[request] - q_len + token + 1
            logits = query[row].double() @ key[:seen, 0].double().T * dim**-0.5
            want = logits.softmax(-1) @ value[:seen, 0].double()
            assert (merged[row].double() - want).abs().max() <= 1e-2 * want.abs().max()
            torch.testing.assert_close(merged_lse[row].double(), logits.logsumexp(-1), atol=1e-3, rtol=1e-3)


@pytest.mark.emulator
def test_kernels_over_ranks(tmp_path: pathlib.Path) -> None:
    spawn(decode_over_ranks, tmp_path)
