"""``trtllm_batch_decode_with_kv_cache_mla``: the problem of a call, its result, and its refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    BF16,
    FP16,
    FUNCTIONS,
    HEADS,
    MLA,
    PAGE,
    PAGES,
    TABLE,
    U8,
    data,
    form,
    ints,
    misaligned,
    odd_stride,
    refused,
)

from hopwell.kernels.config.mla import resolve_mla
from hopwell.kernels.config.splitting import ALIGNMENT, LaunchSizes, node_bytes, scratch_bytes, slot_bytes
from hopwell.kernels.launch.geometry import decode_geometry
from hopwell.kernels.problem import AttentionProblem, Mask, MaskKind
from hopwell.mla import mla_workspace_bytes

Problems = list[AttentionProblem]

CAPACITY = len(TABLE[0]) * PAGE
Q_LEN, RANK = 3, 256  # of the form with several tokens
BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl")


def mla(name: str = "dense", **changes: Any) -> torch.Tensor:
    return FUNCTIONS[MLA](**{**form(MLA, name), **changes})


class TestProblem:
    def test_one_token_per_request(self, launched: Problems) -> None:
        arguments = form(MLA, "dense")
        FUNCTIONS[MLA](**arguments)
        (problem,) = launched
        assert (problem.batch, problem.max_q_len, problem.max_kv_len) == (BATCH, 1, CAPACITY)
        assert problem.mask == Mask(MaskKind.CAUSAL)
        assert problem.is_latent
        assert problem.key.shape == (PAGES, 1, PAGE, 576)
        assert problem.value.shape == (PAGES, 1, PAGE, 512)
        assert (problem.softmax_scale, problem.output_scale, problem.output_factor) == (1.0, 1.0, 1.0)
        assert problem.kv_lens.data_ptr() == arguments["seq_lens"].data_ptr()
        assert problem.page_table.key is problem.page_table.value is arguments["block_tables"]
        assert problem.scratch.data_ptr() == arguments["workspace_buffer"].data_ptr()
        absent = ("out", "q_offsets", "q_lens", "o_offsets", "k_offsets", "v_offsets", "sinks", "lse", "draft_mask")
        assert [name for name in absent if getattr(problem, name) is not None] == []
        assert problem.programmatic_launch is True

    def test_several_tokens(self, launched: Problems) -> None:
        mla("several-tokens")
        (problem,) = launched
        assert (problem.batch, problem.max_q_len) == (BATCH, Q_LEN)
        assert problem.query.shape == (BATCH * Q_LEN, HEADS, RANK + 64)
        assert problem.value.shape[3] == RANK
        assert problem.mask == Mask(MaskKind.CAUSAL)

    def test_scales(self, launched: Problems) -> None:
        scales = torch.tensor(0.5), torch.tensor([2.0])
        mla(bmm1_scale=0.125, bmm2_scale=3)
        mla(bmm1_scale=scales[0], bmm2_scale=scales[1])
        host, device = launched
        assert (host.softmax_scale, host.output_scale) == (0.125, 3.0)
        assert device.softmax_scale is scales[0]
        assert device.output_scale is scales[1]

    @pytest.mark.parametrize("container", [lambda t: t, lambda t: [t], lambda t: (t,)])
    def test_sinks(self, container: Any, recorded: Any) -> None:
        sinks = torch.zeros(HEADS)
        for _ in range(3):
            mla(sinks=container(sinks))
            assert recorded.addresses[-1][14] == sinks.data_ptr()
        assert [problem.sinks for problem in recorded.problems] == [sinks]

    def test_names_and_dimensions_without_a_meaning(self, launched: Problems) -> None:
        for backend, nope in itertools.product(BACKENDS, (64, 128, 192)):
            mla(backend=backend, qk_nope_head_dim=nope)
        assert len(launched) == 12
        assert len({(p.mask, p.max_kv_len, p.softmax_scale, p.query.shape) for p in launched}) == 1

    @pytest.mark.parametrize("page_size", [1, 4, 64, 1024])
    def test_page_sizes_and_caches(self, page_size: int, launched: Problems) -> None:
        """The cache may have a dimension for its only KV head or none, and room between pages."""
        room = data(4, 2, page_size, 576)
        workspace = torch.empty(mla_workspace_bytes(HEADS, 4 * page_size, device="cpu"), dtype=U8)
        for cache in (room[:, 0], room[:, :1]):
            mla(kv_cache=cache, workspace_buffer=workspace)
            key = launched.pop().key
            assert key.data_ptr() == room.data_ptr()
            assert key.shape == (4, 1, page_size, 576)
            assert key.stride(0) == room.stride(0)

    @pytest.mark.parametrize(("batch", "q_len"), [(0, 1), (0, 4), (2, 0)])
    def test_no_tokens(self, batch: int, q_len: int, launched: Problems) -> None:
        query, table = data(batch, q_len, HEADS, 576), ints(*TABLE)[:batch]
        out = mla(query=query, block_tables=table, seq_lens=ints(1, 1)[:batch])
        assert out.shape == (batch, q_len, HEADS, 512)
        assert launched[0].query.shape == (0, HEADS, 576)


class TestResult:
    def test_allocated(self) -> None:
        for _ in range(3):  # a checked call, and two kinds of repeated ones
            for name, shape in (("dense", (BATCH, 1, HEADS, 512)), ("several-tokens", (BATCH, Q_LEN, HEADS, RANK))):
                out = mla(name)
                assert (out.shape, out.dtype, out.is_contiguous()) == (shape, BF16, True)

    @pytest.mark.parametrize("wide", [False, True])
    @pytest.mark.parametrize(("name", "q_len", "rank"), [("dense", 1, 512), ("several-tokens", Q_LEN, RANK)])
    def test_out_is_returned_as_it_was_given(self, name: str, q_len: int, rank: int, wide: bool, recorded: Any) -> None:
        """The output is the caller's tensor; rows may have room between them."""
        room = data(BATCH, q_len, HEADS + wide, rank + 8 * wide)
        out = room[:, :, wide:, 8 * wide :]
        for _ in range(3):
            assert mla(name, out=out) is out
            assert recorded.addresses[-1][3] == out.data_ptr()
        (problem,) = recorded.problems
        assert problem.out.shape == (BATCH * q_len, HEADS, rank)
        assert problem.out.stride() == out.stride()[1:] if q_len > 1 else out.stride()[::2]

    def test_requests_apart_for_single_tokens(self, launched: Problems) -> None:
        """A request has one row, so requests may be any distance apart."""
        query, out = data(BATCH, 4, HEADS, 576)[:, :1], data(BATCH, 2, HEADS, 512)[:, 1:]
        assert mla(query=query, out=out) is out
        assert launched[0].query.stride() == (4 * HEADS * 576, 576, 1)
        assert launched[0].out.stride() == (2 * HEADS * 512, 512, 1)


class TestWorkspace:
    @pytest.mark.parametrize("rank", [256, 512])
    @pytest.mark.parametrize("heads", [1, 16, 33, 128])
    def test_holds_what_the_kernel_puts_there(self, heads: int, rank: int, launched: Problems) -> None:
        """The workspace holds the slots of the largest table and any number of requests, at any start of the buffer."""
        for q_len, width, batch in itertools.product((1, 4), (1, 100, 10_000), (1, 300)):
            size = mla_workspace_bytes(heads, 64 * width, q_len, rank, "cpu")
            workspace = torch.empty(size, dtype=U8)
            changes = dict(
                query=torch.empty(batch, q_len, heads, rank + 64, dtype=BF16),
                kv_cache=torch.empty(1, 64, rank + 64, dtype=BF16),
                block_tables=torch.empty(batch, width, dtype=torch.int32),
                seq_lens=torch.empty(batch, dtype=torch.int32),
                kv_lora_rank=rank,
            )
            mla(**changes, workspace_buffer=workspace)
            problem = launched.pop()
            config = resolve_mla(problem, "sm_90a")
            g = decode_geometry(problem, config)
            needed = g.slots * slot_bytes(g.slot_rows, rank, latent=True)
            if config.has_tree:
                needed = (g.slots + g.gmem_levels * g.grid) * node_bytes(config.tile.m, rank)
            assert needed + ALIGNMENT - 1 <= size
            assert problem.scratch.nbytes == size

    def test_size_is_what_the_docs_say(self) -> None:
        """Documented sizes are in MiB, for 132 SMs and up to 256 rows; narrow outputs need less."""
        for rows, (rank, said) in itertools.product((1, 16, 128, 256), ((256, [54, 60]), (512, [72, 84]))):
            sizes = [scratch_bytes(LaunchSizes(rows, 1, rank, keys, 132, latent=True)) for keys in (131072, 1 << 20)]
            assert [math.ceil(size / 2**20) for size in sizes] == said

    @pytest.mark.parametrize("by_cta_parts", [True, False])
    def test_many_rows_take_little(self, by_cta_parts: bool) -> None:
        """128 heads and eight new tokens fit the 128 MiB that serving engines give."""
        sizes = LaunchSizes(128 * 8, 1, 512, 131072, 132, latent=True, by_cta_parts=by_cta_parts)
        assert scratch_bytes(sizes) <= 128 << 20

    def test_size_hardly_grows_with_keys(self) -> None:
        million = mla_workspace_bytes(128, 1 << 20, device="cpu")
        assert million == mla_workspace_bytes(128, 2**31 - 1, device="cpu") < 96 << 20


class TestRefusals:
    def test_dims(self) -> None:
        refused(MLA, ValueError, r"must be one of .*got \(512, 0\)", qk_rope_head_dim=0)
        refused(MLA, ValueError, "kv_lora_rank and qk_rope_head_dim", kv_lora_rank=128)
        refused(MLA, ValueError, "^query must have kv_lora_rank", kv_lora_rank=256)
        refused(MLA, ValueError, "^query must have at least one head", query=data(BATCH, 1, 0, 576))

    def test_query_has_no_gap_between_requests(self) -> None:
        spread = data(BATCH, 2 * Q_LEN, HEADS, RANK + 64)[:, :Q_LEN]
        text = r"^query must be dense in its first two dimensions, got strides \(7680, 1280, 320, 1\)$"
        refused(MLA, ValueError, text, "several-tokens", query=spread)

    def test_cache(self) -> None:
        cache = form(MLA, "dense")["kv_cache"]
        refused(MLA, ValueError, "^kv_cache must have kv_lora_rank", kv_cache=cache[..., :512])
        refused(MLA, ValueError, "^kv_cache must be torch.bfloat16 or .*, got", kv_cache=cache.to(FP16))
        refused(MLA, ValueError, "^kv_cache must be torch.float8_e4m3fn for", "fp8", kv_cache=cache)
        refused(MLA, ValueError, "^kv_cache must be on cpu", kv_cache=cache.to("meta"))
        refused(MLA, ValueError, "^kv_cache must be", kv_cache=cache[0])
        refused(MLA, ValueError, "^kv_cache must be", kv_cache=cache[:, None].repeat(1, 2, 1, 1))
        refused(MLA, ValueError, "^kv_cache has stride", kv_cache=odd_stride(PAGES, PAGE, 576))
        refused(MLA, ValueError, "kv_cache must have a page size of at least 1", kv_cache=cache[:, :0])

    def test_sparse(self) -> None:
        refused(MLA, ValueError, "^sparse_mla_top_k must be a multiple of 4", sparse_mla_top_k=6)
        refused(MLA, ValueError, "^block_tables must have shape", sparse_mla_top_k=8)
        refused(MLA, ValueError, "block_tables must be 2-D", "sparse", sparse_mla_top_k=0)
        tokens = form(MLA, "sparse")["block_tables"].repeat_interleave(2, -1)[..., ::2]
        refused(MLA, ValueError, "^block_tables must have stride 1", "sparse", block_tables=tokens)

    def test_sparse_without_a_rotary_part(self, launched: Problems) -> None:
        only_latent = dict(query=data(BATCH, 2, HEADS, 512), kv_cache=data(PAGES, PAGE, 512), qk_rope_head_dim=0)
        mla("sparse", **only_latent)
        (problem,) = launched
        assert problem.key.shape == problem.value.shape == (PAGES, 1, PAGE, 512)
        assert problem.page_table is None
        assert problem.token_table is not None
        assert problem.max_kv_len == problem.token_table.shape[1] == 8

    def test_out(self) -> None:
        good = data(BATCH, 1, HEADS, 512)
        refused(MLA, TypeError, "^out must be a torch.Tensor or None, got int 3$", out=3)
        text = r"^out must have shape \[batch=3, q_len=1, num_heads=4, kv_lora_rank=512\], got "
        for wrong in (good[:, 0], good[:-1], good[..., :256], good.transpose(1, 2)):
            refused(MLA, ValueError, text, out=wrong)
        refused(MLA, ValueError, "^out must be torch.bfloat16", out=good.to(FP16))
        refused(MLA, ValueError, "^out must be on cpu", out=good.to("meta"))
        refused(MLA, ValueError, "^out starts at address", out=misaligned(good))
        refused(MLA, ValueError, "^out has stride", out=odd_stride(*good.shape))
        refused(MLA, ValueError, "^out must not overlap itself", out=good[:1].expand(BATCH, -1, -1, -1))
        spread = data(BATCH, 2 * Q_LEN, HEADS, RANK)[:, :Q_LEN]
        text = "^out must be dense in its first two dimensions, got strides"
        refused(MLA, ValueError, text, "several-tokens", out=spread)

    def test_out_shares_no_memory_with_inputs(self) -> None:
        query, cache = data(BATCH, 1, HEADS, 576), data(PAGES, PAGE, 576)
        refused(MLA, ValueError, "^out must not share memory with query", query=query, out=query[..., :512])
        inside = cache[:BATCH, None, :HEADS, :512]
        refused(MLA, ValueError, "^out must not share memory with kv_cache", kv_cache=cache, out=inside)
