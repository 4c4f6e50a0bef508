"""``trtllm_batch_decode_with_kv_cache_mla`` in every input form, on the GPU and in the emulator, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.mla import MlaBatch, with_topk
from helpers.calls.entries import LATENT_CAPACITY, mla, mla_arguments
from helpers.cases.mla import ARCH, BOTH_ROWS, FEW_HEADS, MANY_HEADS, TOP_K

from hopwell.kernels.config.mla import resolve_mla
from hopwell.kernels.config.splitting import LATENT_SWAP_AB_ROWS, ROWS

KV_LENS, LONG = [70, 0, 3, 330], [70, 0, 2100]
LONG_TOP_K = 2060
KINDS = pytest.mark.parametrize("top_k", [0, TOP_K], ids=["dense", "sparse"])


def batch(
    device: str, q_len: int = 1, top_k: int = 0, kind: str = "any", kv_lens: list[int] = KV_LENS, **options: Any
) -> MlaBatch:
    q_lens = [q_len] * len(kv_lens)
    return with_topk(MlaBatch, q_lens, kv_lens, top_k, kind, device=device, **({"heads": 8} | options))


@pytest.mark.parametrize(("heads", "top_k"), [(FEW_HEADS, 0), (MANY_HEADS, TOP_K)])
def test_float16(heads: int, top_k: int, device: str) -> None:
    data = batch(device, 1, top_k, heads=heads, dtype=torch.float16)
    out = mla(data, data.decode(64))
    assert out.dtype == torch.float16
    data.expected_mla().check(out.flatten(0, 1))


@pytest.mark.parametrize(
    ("page_size", "heads", "top_k"), [(5, FEW_HEADS, 0), (24, MANY_HEADS, 0), (5, FEW_HEADS, TOP_K)]
)
def test_pages_of_any_size(page_size: int, heads: int, top_k: int, device: str) -> None:
    data = batch(device, 1, top_k, heads=heads)
    assert torch.equal(mla(data, data.decode(page_size)), mla(data, data.decode(64)))


@KINDS
@BOTH_ROWS
def test_index_types(heads: int, top_k: int, device: str) -> None:
    """64-bit lengths, page ids and top-k indices give the bits of 32-bit ones."""
    data = batch(device, 2, top_k, heads=heads)
    problem = data.decode(64)
    given = mla_arguments(data, problem)
    wide = {name: given[name].long() for name in ("block_tables", "seq_lens")}
    assert torch.equal(mla(data, problem), mla(data, problem, **wide))


@KINDS
@BOTH_ROWS
@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_heads_of_both_kernels(q_len: int, heads: int, top_k: int) -> None:
    """Tests with swap-AB and without rely on these numbers of heads."""
    rows = resolve_mla(batch("cpu", q_len, top_k, heads=heads).decode(64), ARCH).rows
    assert rows == (LATENT_SWAP_AB_ROWS if heads == FEW_HEADS else ROWS)


@KINDS
@pytest.mark.parametrize("page_size", [1, 64])
def test_caches_and_names(page_size: int, top_k: int, device: str) -> None:
    """Every form of the cache and every name of the implementation gives the same bits."""
    data = batch(device, top_k=top_k)
    problem = data.decode(page_size)
    out = mla(data, problem)
    assert out.shape == (data.size, 1, data.heads, data.v_head_dim)
    data.expected_mla().check(out.flatten(0, 1))
    forms: list[dict[str, Any]] = [dict(kv_cache=problem.key[:, 0]), dict(max_seq_len=10**6)]
    forms += [dict(backend=name) for name in ("auto", "xqa", "trtllm-gen", "cute-dsl")]
    forms += [dict(enable_pdl=pdl) for pdl in (True, False)]
    forms += [dict(qk_nope_head_dim=192), dict(seq_lens=problem.kv_lens.view(torch.uint32))]
    assert all(torch.equal(out, mla(data, problem, **form)) for form in forms)


@pytest.mark.parametrize("width", [1, 33])
def test_width_of_tables(width: int, device: str) -> None:
    """Memory after the last page is not read, and a table may have any width that holds the pages."""
    data = batch(device)
    problem = data.decode(512)
    table = problem.page_table.key.new_full((data.size, width), -1)
    table[:, 0] = problem.page_table.key[:, 0]
    assert torch.equal(mla(data, problem), mla(data, problem, block_tables=table))


@pytest.mark.parametrize(("dims", "top_k"), [((320, 256), 0), ((320, 256), TOP_K), ((512, 512), TOP_K)])
def test_dims(dims: tuple[int, int], top_k: int, device: str) -> None:
    data = batch(device, 2, top_k, head_dim=dims[0], v_head_dim=dims[1])
    data.expected_mla().check(mla(data, data.decode(64)).flatten(0, 1))


@KINDS
@pytest.mark.parametrize(("q_len", "heads"), [(4, 3), (2, 65)])
def test_new_tokens(q_len: int, heads: int, top_k: int, device: str) -> None:
    """Row t of q_len sees the keys before it; requests with fewer keys than new tokens have rows that see none."""
    data = batch(device, q_len, top_k, heads=heads)
    data.expected_mla().check(mla(data, data.decode(64)).flatten(0, 1))


@pytest.mark.parametrize("kind", ["distinct", "one", "twice", "none"])
def test_topk_indices(kind: str, device: str) -> None:
    data = batch(device, 2, 12, kind)
    data.expected_mla().check(mla(data, data.decode(16)).flatten(0, 1))


@KINDS
@BOTH_ROWS
def test_given_output(heads: int, top_k: int, device: str) -> None:
    """The call returns the given tensor, and rows between the output's rows keep their contents."""
    data = batch(device, 2, top_k, heads=heads)
    problem = data.decode(64)
    out = mla(data, problem)
    data.expected_mla().check(out.flatten(0, 1))
    room = torch.full((data.size, 2, data.heads + 1, 520), 7.0, dtype=data.dtype, device=device)
    for given in (torch.empty_like(out), room[:, :, 1:, :512]):
        assert mla(data, problem, out=given) is given
        assert torch.equal(given, out)
    assert (room[:, :, 0] == 7).all()
    assert (room[..., 512:] == 7).all()


@KINDS
@BOTH_ROWS
def test_inputs_of_other_strides(heads: int, top_k: int, device: str) -> None:
    """Query rows at equal distances, which TMA can fetch, and at other distances."""
    data = batch(device, 2, top_k, heads=heads)
    problem = data.decode(16)
    out = mla(data, problem)
    query = mla_arguments(data, problem)["query"]

    def room(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=data.dtype, device=device)

    wide_rows = room(*query.shape[:3], 640)[..., 8:584]
    packed = room(*query.shape[:2], 3, *query.shape[2:])[:, :, 1]
    heads_first = room(heads, *query.shape[:2], 576).movedim(0, 2)
    for other in (wide_rows, packed, heads_first):
        other.copy_(query)
        assert torch.equal(out, mla(data, problem, query=other))
    pages, _, page_size, width = problem.key.shape
    wide = room(pages, 2, page_size, width + 8)[:, 1:, :, :width]
    wide.copy_(problem.key)
    assert torch.equal(out, mla(data, problem, kv_cache=wide))


@KINDS
def test_scales_and_sinks(top_k: int, device: str) -> None:
    """Scales come as floats and as tensors, sinks as a tensor and as a list of one."""
    data = batch(device, 2, top_k)
    problem = data.decode(64)
    sinks = torch.randn(data.heads, generator=torch.Generator().manual_seed(1)).to(device)
    scales = dict(bmm1_scale=data.scale, bmm2_scale=-0.75)
    out = mla(data, problem, sinks=sinks, **scales)
    data.expected_mla(sinks=sinks).check(out.flatten(0, 1), factor=-0.75)
    tensors = {name: torch.tensor([value], device=device) for name, value in scales.items()}
    assert torch.equal(out, mla(data, problem, sinks=[sinks], **tensors))


@BOTH_ROWS
@pytest.mark.parametrize("top_k", [0, LONG_TOP_K], ids=["dense", "sparse"])
def test_content_of_workspace_does_not_matter(top_k: int, heads: int, device: str) -> None:
    """The keys are long enough that several SMs share them."""
    data = batch(device, 2, top_k, kv_lens=LONG, heads=heads)
    problem = data.decode(64)
    workspace, outs = data.workspace(LATENT_CAPACITY), []
    for value in (0, 0x7F, 0xFF):
        outs.append(mla(data, problem, workspace_buffer=workspace.fill_(value).view(torch.int8)))
        assert (workspace != value).any(), "nothing was written there"
    data.expected_mla().check(outs[0].flatten(0, 1))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@KINDS
def test_repeated_with_other_tensors(top_k: int, device: str) -> None:
    """Repeated calls take a short path; they must see every new address, length and value."""
    calls = []
    for seed in range(3):
        data = batch(device, 1, top_k, seed=seed)
        calls.append((data, data.decode(64)))
    for data, problem in calls * 2:
        data.expected_mla().check(mla(data, problem).flatten(0, 1))


def refused(data: MlaBatch, text: str, error: type[Exception] = ValueError, **changes: Any) -> None:
    with pytest.raises(error, match=text):
        mla(data, data.decode(64), **changes)


def test_refusals_name_the_argument() -> None:
    data = batch("cpu", 2)
    out = torch.empty(data.size, 2, data.heads, 512, dtype=data.dtype)
    refused(data, "kv_lora_rank and qk_rope_head_dim", kv_lora_rank=576, qk_rope_head_dim=0)
    refused(data, "kv_lora_rank and qk_rope_head_dim", kv_lora_rank=512, qk_rope_head_dim=0)
    refused(data, "^query must have kv_lora_rank", kv_lora_rank=256)
    refused(data, "^kv_cache must be torch.bfloat16 or", kv_cache=data.decode(64).key.to(torch.float16))
    refused(data, "^block_tables must", block_tables=torch.zeros(data.size + 1, 9, dtype=torch.int32))
    refused(data, "^seq_lens must", seq_lens=torch.zeros(data.size + 1, dtype=torch.int32))
    refused(data, "^out must have shape", out=out[:, :1])
    refused(data, "^out must be torch.bfloat16", out=out.to(torch.float16))
    refused(data, "^bmm1_scale", TypeError, bmm1_scale=torch.ones(1, dtype=torch.float64))
    refused(data, "^sinks must have shape", sinks=torch.zeros(data.heads + 1))
    refused(data, "^backend must be one of", backend="fa2")


def test_refusals_of_topk_indices_name_the_argument() -> None:
    data = batch("cpu", 2, TOP_K)
    refused(data, "^block_tables must have shape", sparse_mla_top_k=TOP_K + 4)
    refused(data, "^block_tables must have shape", block_tables=torch.zeros(data.size, TOP_K, dtype=torch.int32))
    refused(data, "^sparse_mla_top_k must be a multiple of 4", sparse_mla_top_k=TOP_K + 2)


@KINDS
def test_workspace_must_be_contiguous_and_apart(top_k: int) -> None:
    data = batch("cpu", 2, top_k)
    workspace = data.workspace(LATENT_CAPACITY)
    refused(data, "^workspace_buffer must be contiguous", workspace_buffer=workspace[::2])
    room = workspace.view(data.dtype)[: data.tokens * data.heads * 512]
    refused(data, "must not share memory", workspace_buffer=workspace, out=room.view(data.size, 2, data.heads, 512))
