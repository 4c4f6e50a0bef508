"""The three prefill entry points, called as users call them, in every input form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import CAUSAL, FULL, Batch, starts, window
from entry_calls import WORKSPACE, context, fmha_v2

import hopwell
from hopwell.kernels.problem import Mask

pytestmark = pytest.mark.gpu

Q_LENS, KV_LENS = [5, 0, 130, 257, 9, 1, 64], [77, 3, 130, 700, 4, 300, 0]
MASKS = {"causal": CAUSAL, "window": window(40)}


def cache_forms(key: torch.Tensor, value: torch.Tensor) -> dict[str, tuple[Any, str]]:
    """The pages in every form that the context entry takes, with the name of its layout."""
    nhd = [pool.transpose(1, 2).contiguous() for pool in (key, value)]
    return {
        "pair HND": ((key, value), "HND"),
        "pair NHD": (tuple(nhd), "NHD"),
        "stacked HND": (torch.stack((key, value), 1), "HND"),
        "stacked NHD": (torch.stack(nhd, 1), "NHD"),
    }


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_context_caches(page_size: int, dims: tuple[int, int]) -> None:
    data = Batch(Q_LENS, KV_LENS, 8, 2, *dims)
    key, value, table = data.pages(page_size)
    results = []
    if dims[0] == dims[1]:
        forms = cache_forms(key, value)
    else:
        forms = {"pair HND": ((key, value), "HND")}
    for cache, layout in forms.values():
        for left, mask in ((-1, CAUSAL), (40, window(40))):
            out = context(data, cache, table, kv_layout=layout, window_left=left)
            results.append((mask, out))
    for mask in MASKS.values():
        outs = [out for its_mask, out in results if its_mask == mask]
        data.expected(mask).check(outs[0])
        assert all(torch.equal(outs[0], out) for out in outs)


def test_context_with_separate_page_ids() -> None:
    data = Batch(Q_LENS, KV_LENS)
    key, value, table = data.pages(16)
    pool = torch.stack((key, value), 1).flatten(0, 1)  # K and V pages alternate
    tables = torch.stack((2 * table, 2 * table + 1), 1)
    out = context(data, (pool, pool), tables, uses_shared_paged_kv_idx=False)
    assert torch.equal(out, context(data, (key, value), table))


def test_context_with_one_tensor_for_both() -> None:
    data = Batch(Q_LENS, KV_LENS)
    data.v = data.k
    key, _, table = data.pages(16)
    data.expected().check(context(data, key[:, None], table))


def test_context_options() -> None:
    data = Batch(Q_LENS, KV_LENS)
    key, value, table = data.pages(16)
    plain = context(data, (key, value), table)
    assert plain.dtype == data.dtype
    assert plain.is_contiguous()
    out = torch.empty(data.tokens, 8, 128, dtype=data.dtype, device="cuda")[:, ::2]
    assert context(data, (key, value), table, out=out) is out
    assert torch.equal(plain, out)
    for pdl in (True, False, None):
        assert torch.equal(plain, context(data, (key, value), table, enable_pdl=pdl))
    half = context(data, (key, value), table, out_dtype=torch.float16)
    assert half.dtype == torch.float16
    data.expected().check(half.to(data.dtype))
    sinks = torch.randn(4, device="cuda")
    with_sinks = context(data, (key, value), table, sinks=[sinks])
    data.expected(sinks=sinks).check(with_sinks)
    assert torch.equal(with_sinks, context(data, (key, value), table, sinks=sinks))
    scales = {"bmm1_scale": torch.full((1,), data.scale, device="cuda"), "bmm2_scale": torch.ones(1, device="cuda")}
    assert torch.equal(plain, context(data, (key, value), table, **scales))
    on_host = {name: scale.cpu() for name, scale in scales.items()}
    assert torch.equal(plain, context(data, (key, value), table, **on_host))
    unsigned = {name: data.ints(values, torch.uint32) for name, values in (("seq_lens", data.kv_lens),)}
    assert torch.equal(plain, context(data, (key, value), table.view(torch.uint32), **unsigned))


def test_context_repeated_with_other_tensors() -> None:
    """Calls after the first take a short way; they must see every new address, length and value."""
    outs = []
    for seed in range(4):
        data = Batch(Q_LENS, KV_LENS[::-1] if seed % 2 else KV_LENS, seed=seed)
        key, value, table = data.pages(16)
        table = torch.nn.functional.pad(table, (0, 60 - table.shape[1]), value=-1)
        pools = [torch.cat([p, p.new_zeros(120 - p.shape[0], *p.shape[1:])]) for p in (key, value)]
        data.expected().check(context(data, tuple(pools), table))
        outs.append((data, pools, table))
    for data, pools, table in outs:
        data.expected().check(context(data, tuple(pools), table))


FMHA_V2_MASKS = [
    ("causal", -1, CAUSAL),
    ("sliding_window", 40, window(40)),
    ("sliding_window", 0, window(0)),
    ("sliding_window", -1, CAUSAL),
    ("padding", -1, FULL),
]


@pytest.mark.parametrize(("mode", "left", "mask"), FMHA_V2_MASKS)
def test_fmha_v2_layouts(mode: str, left: int, mask: Mask) -> None:
    data = Batch(Q_LENS, KV_LENS)
    expected = data.expected(mask)
    options = dict(mask_mode=mode, window_left=left)
    key, value, _ = data.ragged()
    outs = [
        fmha_v2(data, (data.q, key, value), "SEPARATE_Q_K_V", **options),
        fmha_v2(data, (data.q, torch.stack((key, value), 1)), "CONTIGUOUS_Q_KV", **options),
    ]
    for page_size in (4, 32):
        key, value, table = data.pages(page_size)
        for layout in ("HND", "NHD"):
            pools = [p if layout == "HND" else p.transpose(1, 2).contiguous() for p in (key, value)]
            name = f"Q_PAGED_KV_{layout}"
            outs.append(fmha_v2(data, (data.q, torch.stack(pools, 1)), name, block_tables=table, **options))
            pool = torch.stack(pools)
            tables = torch.stack((table, torch.where(table < 0, table, table + pools[0].shape[0])), 1)
            outs.append(fmha_v2(data, (data.q, (pool[0], pool[1])), name, block_tables=tables, **options))
    expected.check(outs[0])
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize(("mode", "left", "mask"), FMHA_V2_MASKS)
def test_fmha_v2_packed(mode: str, left: int, mask: Mask) -> None:
    data = Batch(Q_LENS, Q_LENS, 4, 4)
    key, value, _ = data.ragged()
    out = fmha_v2(data, torch.stack((data.q, key, value), 1), "PACKED_QKV", mask_mode=mode, window_left=left)
    data.expected(mask).check(out)


def test_fmha_v2_options() -> None:
    data = Batch(Q_LENS, KV_LENS, head_dim=192, v_head_dim=128)
    key, value, _ = data.ragged()
    sinks = torch.randn(4, device="cuda")
    out = fmha_v2(data, (data.q, key, value), "SEPARATE_Q_K_V", bmm1_scale=0, bmm2_scale=0.5, sinks=sinks)
    data.expected(sinks=sinks).check(out, factor=0.5)


def cudnn(data: Batch, k_cache: torch.Tensor, v_cache: torch.Tensor, **more: Any) -> tuple[torch.Tensor, ...]:
    q_starts = starts(data.q_lens)
    arguments: dict[str, Any] = dict(
        q=data.q,
        k_cache=k_cache,
        v_cache=v_cache,
        scale=data.scale,
        workspace_buffer=WORKSPACE,
        max_token_per_sequence=max(data.q_lens),
        max_sequence_kv=max(data.kv_lens),
        actual_seq_lens_q=data.ints(data.q_lens).view(-1, 1, 1, 1),
        actual_seq_lens_kv=data.ints(data.kv_lens).view(-1, 1, 1, 1),
        causal=True,
        return_lse=True,
        batch_offsets_q=data.ints(q_starts) * data.heads * data.head_dim,
        batch_offsets_o=data.ints(q_starts) * data.heads * data.v_head_dim,
    )
    return hopwell.cudnn_batch_prefill_with_kv_cache(**(arguments | more))


def ragged_offsets(data: Batch) -> dict[str, torch.Tensor]:
    begins = data.ints(starts(data.kv_lens)) * data.kv_heads
    return dict(batch_offsets_k=begins * data.head_dim, batch_offsets_v=begins * data.v_head_dim)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_cudnn_caches(dims: tuple[int, int], causal: bool) -> None:
    data = Batch(Q_LENS, KV_LENS, 4, 2, *dims)
    expected = data.expected(CAUSAL if causal else FULL)
    key, value, _ = data.ragged()
    out, lse = cudnn(data, key, value, causal=causal, **ragged_offsets(data))
    expected.check(out)
    assert lse.shape == (data.size, max(data.q_lens), data.heads)
    rows = torch.cat([lse[i, :n] for i, n in enumerate(data.q_lens)])
    expected.check_lse(rows)
    for page_size in (2, 16, 64):
        key, value, table = data.pages(page_size)
        paged, paged_lse = cudnn(data, key, value, causal=causal, block_tables=table)
        assert torch.equal(out, paged)
        assert torch.equal(rows, torch.cat([paged_lse[i, :n] for i, n in enumerate(data.q_lens)]))


def test_cudnn_options() -> None:
    data = Batch(Q_LENS, KV_LENS)
    key, value, table = data.pages(16)
    plain, _ = cudnn(data, key, value, block_tables=table)
    out = torch.empty_like(plain)
    lse = torch.full((data.size, max(data.q_lens), 4), 7.0, device="cuda")
    stats = data.ints(starts(data.q_lens)) * 4
    given = cudnn(data, key, value, block_tables=table, out=out, lse=lse, batch_offsets_stats=stats)
    assert given[0] is out
    assert torch.equal(plain, out)
    data.expected().check_lse(lse.view(-1, 4)[: data.tokens])
    assert (lse.view(-1, 4)[data.tokens :] == 7).all()
    on_host = {
        f"actual_seq_lens_{name}": torch.tensor(lengths, dtype=torch.int32)
        for name, lengths in (("q", data.q_lens), ("kv", data.kv_lens))
    }
    assert torch.equal(plain, cudnn(data, key, value, block_tables=table, **on_host)[0])
    out_only = cudnn(data, key, value, block_tables=table, return_lse=False)[0]
    assert torch.equal(plain, out_only)


def test_cudnn_single_request_without_offsets() -> None:
    data = Batch([130], [300])
    key, value, _ = data.ragged()
    out, _ = cudnn(data, key, value, batch_offsets_q=None, batch_offsets_o=None)
    data.expected().check(out)
