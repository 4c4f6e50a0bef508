"""Decode calls of serving engines, copied from their sources, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.decode import DRAFT, FULL, NVFP4, DecodeBatch
from helpers.batches.prefill import starts
from helpers.calls.entries import repeated
from helpers.cases.decode import draft_bits

from hopwell import decode
from hopwell.kernels.problem import Mask, MaskKind

KV_LENS = [70, 0, 3, 330, 17]
ROOM = 48 << 20


def batch(device: str, q_lens: list[int], kind: str = "linear", **options: Any) -> DecodeBatch:
    bits = [draft_bits(kind, q_len, seed) for seed, q_len in enumerate(q_lens)]
    return DecodeBatch(q_lens, KV_LENS, device=device, drafts=bits, **options)


def split_cache(data: DecodeBatch, problem: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as halves of the rows of one cache [pages, heads, page_size, 2 * head_dim], vLLM's layout."""
    return tuple(torch.cat((problem.key, problem.value), -1).split(data.head_dim, -1))


def common(data: DecodeBatch, problem: Any, **more: Any) -> dict[str, Any]:
    return (
        dict(
            query=data.q,
            kv_cache=split_cache(data, problem),
            workspace_buffer=torch.zeros(ROOM, dtype=torch.uint8, device=data.device),
            block_tables=problem.page_table.key,
            seq_lens=problem.kv_lens,
            max_seq_len=max(KV_LENS),
            bmm1_scale=data.scale,
            bmm2_scale=1.0,
            window_left=-1,
            sinks=None,
            kv_layout="HND",
            o_scale=1.0,
            kv_cache_sf=None,
        )
        | more
    )


def test_vllm_xqa_of_one_token(device: str) -> None:
    """The output is the front of a tensor that a full graph has padded."""
    data = batch(device, [1] * 5)
    room = torch.full((8, 4, 128), 7.0, dtype=data.dtype, device=device)
    options = dict(q_len_per_req=1, mask=None, q_cu_seq_lens=None, out=room[: data.tokens])
    out = repeated(decode.xqa_batch_decode_with_kv_cache, data, common(data, data.decode(16), **options))
    data.expected_decode().check(out)
    assert (room[data.tokens :] == 7).all()


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, NVFP4], ids=["wide", "e4m3", "nvfp4"])
@pytest.mark.parametrize("heads", [4, 16])
def test_vllm_xqa_of_uneven_drafts(kv_dtype: torch.dtype | None, heads: int, device: str) -> None:
    """Lengths come from the device; rows after the last request keep their contents, and are not read."""
    data = batch(device, [3, 0, 5, 1, 6], "tree", heads=heads, kv_heads=2, kv_dtype=kv_dtype)
    problem = data.decode(16, DRAFT, ragged=True)
    padding = data.q.new_full((4, heads, 128), torch.nan)
    out = torch.full((data.tokens + 4, heads, 128), 7.0, dtype=data.dtype, device=device)
    mask = torch.cat((problem.draft_mask, problem.draft_mask[:4]))
    options = dict(query=torch.cat((data.q, padding)), out=out, mask=mask, q_len_per_req=6)
    options |= dict(q_cu_seq_lens=data.ints(starts(data.q_lens)), return_lse=True, return_lse_base="basee")
    if (scales := problem.kv_scales) is not None:
        options |= dict(kv_cache=(problem.key, problem.value), kv_cache_sf=(scales.key, scales.value))
    given, lse = repeated(decode.xqa_batch_decode_with_kv_cache, data, common(data, problem, **options))
    expected = data.expected_decode(DRAFT)
    assert given is out
    expected.check(out[: data.tokens])
    expected.check_lse(lse[: data.tokens], natural=True)
    assert (out[data.tokens :] == 7).all()


def test_sglang_decode(device: str) -> None:
    """The call has every argument of SGLang's backend; the workspace is for other kernels and too small for
    this one.
    """
    data = batch(device, [1] * 5)
    problem, mask = data.decode(16, Mask(MaskKind.SLIDING_WINDOW, 50)), Mask(MaskKind.SLIDING_WINDOW, 50)
    options: dict[str, Any] = dict(out_dtype=data.dtype, skip_softmax_threshold_scale_factor=None, window_left=50)
    options |= dict(multi_ctas_kv_counter_buffer=torch.zeros(64, dtype=torch.uint8, device=device), mask=None)
    options |= dict(workspace_buffer=torch.zeros(1024, dtype=torch.uint8, device=device))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(device)
    out = repeated(decode.trtllm_batch_decode_with_kv_cache, data, common(data, problem, sinks=sinks, **options))
    data.expected_decode(mask, sinks=sinks).check(out)


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_several_tokens_without_a_mask_are_causal(ragged: bool, device: str) -> None:
    """A missing mask means causal, as in trtllm-gen; the log-sum-exp is to base 2.

    More than 32 tokens take more than a word of bits.
    """
    q_lens = [3, 0, 40, 1, 6] if ragged else [3] * 5
    data = batch(device, q_lens)
    problem = data.decode(16, DRAFT, ragged=True)
    lse = torch.full((data.tokens, data.heads), torch.nan, device=device)
    options: dict[str, Any] = dict(q_len_per_req=3, lse=lse, return_lse=True)
    if ragged:
        options |= dict(q_len_per_req=None, max_q_len=40, cum_seq_lens_q=data.ints(starts(q_lens)))
    out, found = repeated(decode.trtllm_batch_decode_with_kv_cache, data, common(data, problem, **options))
    expected = data.expected_decode(DRAFT)
    expected.check(out)
    assert found is lse
    expected.check_lse(lse, natural=False)


def test_other_new_tokens_in_the_same_memory(device: str) -> None:
    """Under a graph on the GPU, only the bounds are fixed: the kernel reads the number of new tokens on the device."""
    batches = [batch(device, q_lens, heads=16, kv_heads=2) for q_lens in ([3, 0, 5, 1, 6], [6, 1, 0, 5, 3], [1] * 5)]
    given: list[dict[str, Any]] = []
    for data in batches:
        room = 15 - data.tokens
        options = dict(query=torch.cat((data.q, data.q.new_full((room, 16, 128), torch.nan))), q_len_per_req=None)
        options |= dict(
            max_q_len=6, cum_seq_lens_q=data.ints(starts(data.q_lens)), out=torch.empty_like(options["query"])
        )
        given.append(common(data, data.decode(16, DRAFT, ragged=True), **options))
    arguments = given[0]

    def run() -> None:
        decode.trtllm_batch_decode_with_kv_cache(**arguments)

    run()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    for data, new in zip(batches, given, strict=True):
        for name in ("query", "block_tables", "seq_lens", "cum_seq_lens_q"):
            arguments[name].copy_(new[name].clone())
        for part, value in zip(arguments["kv_cache"], new["kv_cache"], strict=True):
            part.copy_(value.clone())
        arguments["out"].fill_(7)
        run()
        data.expected_decode(DRAFT).check(arguments["out"][: data.tokens])
        assert (arguments["out"][data.tokens :] == 7).all()


@pytest.mark.parametrize("heads", [4, 16])
def test_more_new_tokens_than_their_bound(heads: int, device: str) -> None:
    """A request above the bound is computed as if it had the bound, and nothing is written after its tokens."""
    bound, q_lens = 2, [3, 0, 5, 1, 6]
    data = batch(device, q_lens, heads=heads, kv_heads=2)
    problem, begins = data.decode(16, DRAFT, ragged=True), starts(q_lens)
    out, lse = torch.full_like(data.q, 7.0), torch.full((data.tokens, heads), 7.0, device=device)
    options: dict[str, Any] = dict(out=out, lse=lse, return_lse=True, max_q_len=bound, q_len_per_req=None)
    decode.trtllm_batch_decode_with_kv_cache(**common(data, problem, cum_seq_lens_q=data.ints(begins), **options))
    for request, (begin, q_len) in enumerate(zip(begins, q_lens, strict=False)):
        end, computed = begin + q_len, begin + min(q_len, bound)
        few = dict(query=data.q[begin:computed], block_tables=problem.page_table.key[request : request + 1])
        few |= dict(seq_lens=problem.kv_lens[request : request + 1], q_len_per_req=bound if q_len > 1 else 1)
        if q_len:
            alone = decode.trtllm_batch_decode_with_kv_cache(**common(data, problem, **few))
            assert torch.allclose(out[begin:computed].float(), alone.float(), atol=0.02)
        assert (out[computed:end] == 7).all()
        assert (lse[computed:end] == 7).all()


@pytest.mark.parametrize(
    ("q_lens", "heads", "kv_dtype"),
    [([1] * 5, 4, None), ([3] * 5, 32, None), ([3, 0, 7, 1, 6], 4, torch.float8_e4m3fn)],
    ids=["one", "rows", "ragged-e4m3"],
)
def test_context_parallel_ranks(q_lens: list[int], heads: int, kv_dtype: torch.dtype | None, device: str) -> None:
    """DCP ranks mask by the keys' global positions, and are combined by log-sum-exps, as in MLA."""
    data = batch(device, q_lens, heads=heads, kv_heads=1, kv_dtype=kv_dtype)
    options: dict[str, Any] = dict(cp_world=2, causal_seqlens_kv_global=data.ints(KV_LENS), return_lse=True)
    if len(set(q_lens)) > 1:
        options |= dict(max_q_len=max(q_lens), cum_seq_lens_q=data.ints(starts(q_lens)))
    else:
        options |= dict(q_len_per_req=q_lens[0])
    parts = []
    for rank in range(2):
        arguments = common(data, data.dcp_rank(2, rank).decode(16), cp_rank=rank, **options)
        parts.append(repeated(decode.trtllm_batch_decode_with_kv_cache, data, arguments))
    data.expected_decode(DRAFT).check_merged(parts, natural=False)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, NVFP4], ids=["wide", "e4m3", "nvfp4"])
@pytest.mark.parametrize("pages", [-2, 3])
def test_pages_of_k_and_v(pages: int, kv_dtype: torch.dtype | None, layout: str, device: str) -> None:
    """K and V have separate page ids, and V's pool has fewer or more pages than K's."""
    data = batch(device, [1] * 5, kv_dtype=kv_dtype)
    problem = data.decode(16)
    used = problem.page_table.key[problem.page_table.key >= 0].unique().long()
    count = len(problem.value) + pages
    moved = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(device)[: len(used)]
    ids = torch.full((len(problem.value),), -1, device=device)
    ids[used] = moved
    table = problem.page_table.key
    values = torch.where(table < 0, table, ids[table.long()].int())

    def value_pool(pool: torch.Tensor) -> torch.Tensor:
        larger = pool.new_empty((count, *pool.shape[1:])).view(torch.uint8).fill_(0xFF).view(pool.dtype)
        larger.view(torch.uint8)[moved] = pool.view(torch.uint8)[used]
        return larger

    def in_layout(pool: torch.Tensor) -> torch.Tensor:
        return pool if layout == "HND" else pool.transpose(1, 2).contiguous()

    options = dict(
        kv_cache=(in_layout(problem.key), in_layout(value_pool(problem.value))),
        kv_layout=layout,
        block_tables=torch.stack((table, values), 1),
        uses_shared_paged_kv_idx=False,
    )
    if problem.kv_scales is not None:
        scales = problem.kv_scales
        options |= dict(kv_cache_sf=(in_layout(scales.key), in_layout(value_pool(scales.value))))
    data.expected_decode(FULL).check(
        repeated(decode.trtllm_batch_decode_with_kv_cache, data, common(data, problem, **options))
    )
    shared = options | dict(block_tables=table, uses_shared_paged_kv_idx=True)
    with pytest.raises(ValueError, match="must have the same number of pages"):
        decode.trtllm_batch_decode_with_kv_cache(**common(data, problem, **shared))


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_e4m3_queries(out_dtype: torch.dtype | None, device: str) -> None:
    """Queries give the bits of the same values in 16 bits; the output is e4m3 by default."""
    fp8 = torch.float8_e4m3fn
    data = batch(device, [1] * 5, kv_dtype=fp8)
    data.q = data.q.to(fp8)
    arguments = common(data, data.decode(16), out_dtype=out_dtype)
    out = repeated(decode.trtllm_batch_decode_with_kv_cache, data, arguments)
    assert out.dtype == (out_dtype or fp8)
    wide = data.q.to(torch.float16 if out_dtype == torch.float16 else torch.bfloat16)
    more = dict(query=wide, out_dtype=out_dtype or fp8)
    assert torch.equal(out, decode.trtllm_batch_decode_with_kv_cache(**arguments | more))


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [4, 20])
def test_e4m3_queries_over_nvfp4(group: int, out_dtype: torch.dtype | None, device: str) -> None:
    """Scales are linear, as for other queries; the output is e4m3 by default, or has the given dtype or tensor."""
    fp8 = torch.float8_e4m3fn
    data = batch(device, [1] * 5, heads=2 * group, kv_dtype=NVFP4)
    data.q = data.q.to(fp8)
    problem = data.decode(16)
    scales = (problem.kv_scales.key, problem.kv_scales.value)
    more: dict[str, Any] = dict(kv_cache=(problem.key, problem.value), kv_cache_sf=scales)
    out = repeated(decode.trtllm_batch_decode_with_kv_cache, data, common(data, problem, out_dtype=out_dtype, **more))
    assert out.dtype == (out_dtype or fp8)
    data.expected_decode(out_dtype=out.dtype).check(out)
    given = torch.empty_like(out)
    arguments = common(data, problem, out=given, backend="xqa", **more)
    assert decode.trtllm_batch_decode_with_kv_cache(**arguments) is given
    assert torch.equal(given.float(), out.float())
    arguments["query"] = data.q.to(torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float16)
    assert torch.equal(given.float(), decode.trtllm_batch_decode_with_kv_cache(**arguments).float())
    with pytest.raises(NotImplementedError, match="backend='trtllm-gen' with kv_cache_sf"):
        decode.trtllm_batch_decode_with_kv_cache(**arguments | dict(query=data.q, backend="trtllm-gen"))
    with pytest.raises(ValueError, match="kv_cache_sf"):
        decode.trtllm_batch_decode_with_kv_cache(**arguments | dict(query=data.q, kv_cache_sf=None))


@pytest.mark.parametrize("kv_dtype", [None, torch.float16, torch.int8], ids=str)
def test_e4m3_queries_need_an_e4m3_or_nvfp4_cache(kv_dtype: torch.dtype | None) -> None:
    data = batch("cpu", [1] * 5, kv_dtype=kv_dtype)
    data.q = data.q.to(torch.float8_e4m3fn)
    allowed = (
        r"^kv_cache\[0\] must be torch.float8_e4m3fn or torch.uint8 \(NVFP4\) for a query of torch.float8_e4m3fn, got"
    )
    with pytest.raises(ValueError, match=allowed):
        decode.trtllm_batch_decode_with_kv_cache(**common(data, data.decode(16)))


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["wide", "e4m3"])
def test_uneven_drafts_do_not_change_a_request(kv_dtype: torch.dtype | None, device: str) -> None:
    """A request with one new token has the same bits beside a request with four.

    Over 16-bit caches this holds for any bound that keeps rows within a tile of the tree.
    """
    data = batch(device, [1, 0, 4, 0, 0], heads=16, kv_heads=2, kv_dtype=kv_dtype)

    def out(one: DecodeBatch, bound: int) -> torch.Tensor:
        options = common(one, one.decode(16), cum_seq_lens_q=one.ints(starts(one.q_lens)), max_q_len=bound)
        del options["o_scale"]
        options["kv_cache"] = options["kv_cache"] if kv_dtype is None else tuple(one.pages(16)[:2])
        return decode.trtllm_batch_decode_with_kv_cache(**options)

    together = out(data, 4)
    for bound in (4,) if kv_dtype is not None else (1, 2, 4):
        assert torch.equal(out(data.request(0), bound), together[:1]), f"max_q_len={bound}"
