"""``xqa_batch_decode_with_kv_cache``: the problem of a call, the shape of its result, and its refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    BF16,
    DIM,
    FP8,
    FP16,
    FUNCTIONS,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    TABLE,
    U8,
    XQA,
    data,
    form,
    ints,
    misaligned,
    odd_stride,
    refused,
    stacked,
)

from hopwell.decode import xqa_workspace_bytes
from hopwell.kernels.config.decode import resolve_decode
from hopwell.kernels.config.splitting import ALIGNMENT, STATISTICS, LaunchSizes, node_bytes, scratch_bytes
from hopwell.kernels.launch import geometry
from hopwell.kernels.launch.geometry import decode_geometry
from hopwell.kernels.problem import AttentionProblem, Mask, MaskKind

Problems = list[AttentionProblem]

CAPACITY = len(TABLE[0]) * PAGE
Q_LEN = 3  # of the form with drafts


def xqa(name: str = "stacked-NHD", **changes: Any) -> torch.Tensor:
    return FUNCTIONS[XQA](**{**form(XQA, name), **changes})


def needed(q_len: int = 1) -> int:
    return xqa_workspace_bytes(HEADS, KV_HEADS, DIM, CAPACITY, q_len, device="cpu")


class TestProblem:
    def test_scales_of_each_head_stay_on_the_device(self, launched: Problems) -> None:
        k_scales, v_scales = torch.rand(KV_HEADS), torch.rand(KV_HEADS)
        for name in ("fp8-HND", "nvfp4"):
            xqa(name, bmm1_scale=k_scales, bmm2_scale=v_scales)
        assert [problem.softmax_scale.data_ptr() for problem in launched] == [k_scales.data_ptr()] * 2
        assert [problem.output_scale.data_ptr() for problem in launched] == [v_scales.data_ptr()] * 2

    def test_one_token_per_request(self, launched: Problems) -> None:
        arguments = form(XQA, "stacked-NHD")
        FUNCTIONS[XQA](**arguments)
        (problem,) = launched
        assert (problem.batch, problem.max_q_len) == (BATCH, 1)
        assert problem.mask == Mask(MaskKind.FULL)
        assert (problem.softmax_scale, problem.output_scale, problem.output_factor) == (1.0, 1.0, 1.0)
        assert problem.kv_lens.data_ptr() == arguments["seq_lens"].data_ptr()
        assert problem.page_table.key is problem.page_table.value is arguments["block_tables"]
        assert problem.scratch.data_ptr() == arguments["workspace_buffer"].data_ptr()
        absent = ("out", "q_offsets", "q_lens", "o_offsets", "k_offsets", "v_offsets", "sinks", "lse", "draft_mask")
        assert [name for name in absent if getattr(problem, name) is not None] == []
        assert problem.programmatic_launch is True

    def test_drafts(self, launched: Problems) -> None:
        arguments = form(XQA, "drafts")
        FUNCTIONS[XQA](**arguments)
        (problem,) = launched
        assert (problem.batch, problem.max_q_len) == (BATCH, Q_LEN)
        assert problem.mask == Mask(MaskKind.DRAFT)
        assert problem.draft_mask is arguments["mask"]

    @pytest.mark.parametrize("left", [0, 5, 2**31 - 1])
    def test_window(self, left: int, launched: Problems) -> None:
        xqa(window_left=left)
        xqa("drafts", window_left=left)
        assert [p.mask for p in launched] == [Mask(MaskKind.SLIDING_WINDOW, left), Mask(MaskKind.DRAFT, left)]

    def test_host_scales(self, launched: Problems) -> None:
        """A 16-bit output is scaled by bmm2_scale and o_scale."""
        xqa(bmm1_scale=0.125, bmm2_scale=3, o_scale=0.5)
        xqa(o_scale=None)
        scales = [(p.softmax_scale, p.output_scale, p.output_factor) for p in launched]
        assert scales == [(0.125, 3.0, 0.5), (1.0, 1.0, 1.0)]
        assert {type(scale) for three in scales for scale in three} == {float}

    def test_an_fp8_output_has_one_factor(self, launched: Problems) -> None:
        """An fp8 output is scaled by bmm2_scale alone, regardless of the caller's other scales."""
        out = data(BATCH, HEADS, DIM, dtype=FP8)
        assert xqa("fp8-HND", out=out, bmm2_scale=3.0, o_scale=0.5) is out
        xqa("fp8-HND", bmm2_scale=3.0, o_scale=0.5)
        assert [(p.output_scale, p.output_factor) for p in launched] == [(3.0, 1.0), (3.0, 0.5)]

    def test_tensor_scales_stay_on_the_device(self, launched: Problems) -> None:
        scales = torch.tensor(0.5), torch.tensor([2.0]), torch.tensor([[0.25]])
        xqa(bmm1_scale=scales[0], bmm2_scale=scales[1], o_scale=scales[2])
        (problem,) = launched
        found = (problem.softmax_scale, problem.output_scale, problem.output_factor)
        assert all(one is other for one, other in zip(found, scales, strict=True))

    @pytest.mark.parametrize("mask", [torch.zeros(3), torch.zeros(0, dtype=torch.uint16)])
    def test_a_mask_for_single_tokens_is_ignored(self, mask: torch.Tensor, launched: Problems) -> None:
        """The mask has no effect with any content, because callers pass one with every call."""
        for q_len in (1, None):
            xqa(q_len_per_req=q_len, mask=mask)
        assert all(problem.draft_mask is None and problem.mask == Mask(MaskKind.FULL) for problem in launched)

    def test_one_tensor_for_k_and_v(self, launched: Problems) -> None:
        xqa(kv_cache=stacked("NHD")[:, :1])
        (problem,) = launched
        assert problem.key.data_ptr() == problem.value.data_ptr()

    def test_no_requests(self, launched: Problems) -> None:
        nothing = dict(query=data(0, HEADS, DIM), block_tables=ints(*TABLE)[:0], seq_lens=ints(1)[:0])
        assert xqa(**nothing).shape == (0, HEADS, DIM)
        mask = torch.zeros(0, Q_LEN, 2, dtype=torch.uint16)
        assert xqa("drafts", mask=mask, **nothing).shape == (0, Q_LEN, HEADS, DIM)
        assert [problem.batch for problem in launched] == [0, 0]


class TestResult:
    def test_shape(self) -> None:
        for _ in range(3):  # a checked call, and two kinds of repeated ones
            assert xqa().shape == xqa(q_len_per_req=None).shape == (BATCH, HEADS, DIM)
            assert xqa("drafts").shape == (BATCH, Q_LEN, HEADS, DIM)

    @pytest.mark.parametrize("wide", [False, True])
    @pytest.mark.parametrize(("name", "q_len"), [("stacked-NHD", 1), ("drafts", Q_LEN)])
    def test_out_is_returned_as_it_was_given(self, name: str, q_len: int, wide: bool, recorded: Any) -> None:
        """Tokens may be side by side or request by request, and rows may have room between them."""
        room = data(BATCH * q_len, HEADS + wide, DIM + 8 * wide)
        flat = room[:, wide:, 8 * wide :]
        for out in (flat, flat.unflatten(0, (BATCH, q_len))):
            recorded.problems.clear()
            for _ in range(3):
                assert xqa(name, out=out) is out
                assert recorded.addresses[-1][3] == flat.data_ptr()
            (problem,) = recorded.problems
            assert problem.out.shape == flat.shape
            assert problem.out.stride() == flat.stride()

    def test_requests_apart_for_single_tokens(self, launched: Problems) -> None:
        """A request has one row, so requests may be any distance apart."""
        out = data(BATCH, 4, HEADS, DIM)[:, :1]
        assert xqa(out=out) is out
        assert launched[0].out.stride() == (4 * HEADS * DIM, DIM, 1)


class TestWorkspace:
    @pytest.mark.parametrize("head_dim", [16, 64, 128, 208, 256, 512])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (12, 4), (64, 1), (128, 2)])
    def test_holds_what_the_kernel_puts_there(
        self, heads: int, kv_heads: int, head_dim: int, launched: Problems, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The workspace holds the slots of the largest table and any number of requests, at any start of the buffer.

        The number of SMs is large enough that few rows need more than the minimum.
        """
        monkeypatch.setattr(geometry, "EMULATED_SMS", 132)
        kinds = itertools.product((1, 5, 33), (1, 100, 10_000), (1, 300), (BF16, FP8))
        for q_len, width, batch, kv_dtype in kinds:
            size = xqa_workspace_bytes(heads, kv_heads, head_dim, 64 * width, q_len, "cpu")
            workspace = torch.empty(size, dtype=U8)
            arguments = dict(
                query=torch.empty(batch * q_len, heads, head_dim, dtype=BF16),
                kv_cache=torch.empty(1, 2, kv_heads, 64, head_dim, dtype=kv_dtype),
                block_tables=torch.empty(batch, width, dtype=torch.int32),
                seq_lens=torch.empty(batch, dtype=torch.int32),
                kv_layout="HND",
                q_len_per_req=q_len,
                mask=torch.empty(batch, q_len, 2 * -(-q_len // 32), dtype=torch.uint16),
                max_seq_len=1,
            )
            FUNCTIONS[XQA](**arguments, workspace_buffer=workspace)
            problem = launched.pop()
            config = resolve_decode(problem, "sm_90a")
            g = decode_geometry(problem, config)
            needed = g.slots * g.slot_rows * (head_dim + STATISTICS) * 4
            if config.has_tree:
                needed = (g.slots + g.gmem_levels * g.grid) * node_bytes(config.tile.m, head_dim)
            assert needed + ALIGNMENT - 1 <= size
            assert problem.scratch.nbytes == size

    def test_size_is_what_the_docs_say(self) -> None:
        """Documented sizes are for 132 SMs."""
        for rows, most in ((8, 24), (32, 56), (64, 101)):
            assert scratch_bytes(LaunchSizes(rows, 8, 128, 131072, 132)) <= most * 2**20

    def test_size_does_not_grow_with_requests_and_hardly_with_keys(self) -> None:
        assert needed() < 9 << 20
        million = xqa_workspace_bytes(64, 8, 128, 1 << 20, device="cpu")
        assert million == xqa_workspace_bytes(64, 8, 128, 2**31 - 1, device="cpu") < 10 << 20


class TestRefusals:
    def test_scales_of_each_head(self) -> None:
        """A tensor has one element, or one for each KV head of a dequantized cache; ``o_scale`` has one."""
        for name in ("bmm1_scale", "bmm2_scale"):
            text = rf"^{name} as a tensor must have one element, or the shape \(num_kv_heads,\) = \({KV_HEADS},\), got"
            for scale in (torch.ones(KV_HEADS + 1), torch.ones(1, KV_HEADS), torch.ones(HEADS)):
                refused(XQA, ValueError, text, "fp8-HND", **{name: scale})
            refused(XQA, ValueError, f"^{name} must be contiguous", "fp8-HND", **{name: torch.ones(2 * KV_HEADS)[::2]})
            refused(XQA, TypeError, f"^{name} as a tensor must be torch.float32", "fp8-HND", **{name: data(KV_HEADS)})
            refused(XQA, ValueError, f"^{name} as a tensor must have one element, got", **{name: torch.ones(KV_HEADS)})
        refused(XQA, ValueError, "^o_scale as a tensor must have one element", "fp8-HND", o_scale=torch.ones(KV_HEADS))

    def test_head_dims(self) -> None:
        text = r"^query must have a head_dim that is a multiple of 16 up to 256, or 512, got "
        for dim in (0, 8, 40, 528):
            refused(XQA, ValueError, f"{text}{dim}$", query=data(BATCH, HEADS, dim))
            with pytest.raises(ValueError, match=f"^head_dim must be a multiple of 16 up to 256, or 512, got {dim}$"):
                xqa_workspace_bytes(HEADS, KV_HEADS, dim, 1024, device="cpu")
        for dim in (272, 320, 496):
            changes = dict(query=data(BATCH, HEADS, dim), kv_cache=data(PAGES, 2, PAGE, KV_HEADS, dim))
            refused(
                XQA, NotImplementedError, f"^{FUNCTIONS[XQA].__name__} on sm_90a supports .*head_dim={dim}", **changes
            )
        halves = data(PAGES, PAGE, KV_HEADS, DIM), data(PAGES, PAGE, KV_HEADS, DIM // 2)
        text = f"^kv_cache must have the head_dim of query, {DIM}, for V as well, got {DIM // 2} .*: 192/128.$"
        refused(XQA, ValueError, text, kv_cache=halves)

    def test_tokens_per_request(self) -> None:
        refused(XQA, ValueError, f"^q_len_per_req must divide the {BATCH} rows of query, got 2$", q_len_per_req=2)
        refused(XQA, ValueError, r"^q_len_per_req must be in \[1, ", q_len_per_req=0)
        refused(XQA, TypeError, "^q_len_per_req must be an int", q_len_per_req=1.0)

    def test_mask(self) -> None:
        mask = form(XQA, "drafts")["mask"]
        text = f"^mask must be given for q_len_per_req > 1, got None with q_len_per_req={Q_LEN}$"
        refused(XQA, ValueError, text, "drafts", mask=None)
        refused(XQA, TypeError, "^mask must be a torch.Tensor or None, got int 3$", mask=3)
        text = "^mask must be torch.uint16, got torch.int32$"
        refused(XQA, ValueError, text, "drafts", mask=mask.to(torch.int32))
        text = r"^mask must have shape \[batch=3, q_len_per_req=3, 2 \* ceil\(q_len_per_req / 32\)=2\], got "
        for wrong in (mask[..., :1], mask[:, :2], mask[:2], mask.flatten(0, 1)):
            refused(XQA, ValueError, text, "drafts", mask=wrong)
        refused(
            XQA, ValueError, "^mask must be on cpu, the device of the query, got meta$", "drafts", mask=mask.to("meta")
        )
        strided = torch.zeros(BATCH, Q_LEN, 4, dtype=torch.uint16)[..., ::2]
        refused(XQA, ValueError, r"^mask must be contiguous, got strides \(12, 4, 2\)$", "drafts", mask=strided)

    def test_out(self) -> None:
        good = data(BATCH, HEADS, DIM)
        refused(XQA, TypeError, "^out must be a torch.Tensor or None, got int 3$", out=3)
        for dtype in (FP16, FP8):
            text = "^out must be torch.bfloat16 for a query of torch.bfloat16 and a kv_cache of torch.bfloat16, got "
            refused(XQA, ValueError, f"{text}{dtype}$", out=good.to(dtype))
        refused(XQA, ValueError, "^out must be on cpu", out=good.to("meta"))
        text = r"^out must have shape \[tokens=3, heads=4, head_dim=64\], got "
        for wrong in (good[:-1], good[:, :-1], good[..., :32], good.flatten(1)):
            refused(XQA, ValueError, text, out=wrong)
        text = r"^out must have shape \[batch=3, q_len=3, num_heads=4, head_dim=64\], got "
        for shape in ((BATCH, 2), (9, 1), (1, 9)):
            refused(XQA, ValueError, text, "drafts", out=data(*shape, HEADS, DIM))
        spread = data(BATCH, 2 * Q_LEN, HEADS, DIM)[:, :Q_LEN]
        text = r"^out must be dense in its first two dimensions, got strides \(1536, 256, 64, 1\)$"
        refused(XQA, ValueError, text, "drafts", out=spread)
        refused(XQA, ValueError, "^out starts at address", out=misaligned(good))
        refused(XQA, ValueError, "^out has stride", out=odd_stride(BATCH, HEADS, DIM))
        refused(XQA, ValueError, "^out must not overlap itself", out=good[:1].expand(BATCH, -1, -1))

    def test_out_shares_no_memory_with_inputs(self) -> None:
        query, cache = data(BATCH, HEADS, DIM), stacked("NHD")
        refused(XQA, ValueError, "^out must not share memory with query", query=query, out=query)
        inside = cache.view(-1, HEADS, DIM)[-BATCH:]
        refused(XQA, ValueError, "^out must not share memory with kv_cache", kv_cache=cache, out=inside)
        drafts = data(BATCH * Q_LEN, HEADS, DIM)
        mask = drafts.view(torch.uint16).flatten()[: BATCH * Q_LEN * 2].view(BATCH, Q_LEN, 2)
        refused(XQA, ValueError, "^out must not share memory with mask", "drafts", out=drafts, mask=mask)

    def test_scales(self) -> None:
        for name in ("bmm1_scale", "bmm2_scale", "o_scale"):
            refused(XQA, TypeError, f"^{name} must be a float", **{name: "1"})
            refused(XQA, TypeError, f"^{name} as a tensor must be torch.float32", **{name: torch.tensor(1)})
            refused(XQA, ValueError, f"^{name} as a tensor must have one element", **{name: torch.ones(2)})
            refused(XQA, ValueError, f"^{name} must be finite", **{name: float("nan")})
        refused(XQA, ValueError, "^bmm1_scale must be at least 0.0", bmm1_scale=-1.0)
        refused(XQA, ValueError, r"^window_left must be in \[-1, ", window_left=-2)

    def test_block_scales(self) -> None:
        scales = form(XQA, "nvfp4")["kv_cache_sf"]
        refused(XQA, ValueError, "^kv_cache_sf must be provided", "nvfp4", kv_cache_sf=None)
        refused(XQA, ValueError, "^kv_cache_sf must be None unless", kv_cache_sf=scales)
        refused(XQA, ValueError, r"^kv_cache_sf \(key\) must be .* got", "nvfp4", kv_cache_sf=scales[..., :1])
        refused(XQA, ValueError, "^kv_cache_sf must be torch.float8_e4m3fn or", "nvfp4", kv_cache_sf=scales.float())
        refused(XQA, ValueError, "^kv_cache_sf must have 2 as dimension 1", "nvfp4", kv_cache_sf=scales[:, :1])
        apart = scales.view(U8).new_zeros(*scales.shape[:-1], 2 * scales.shape[-1])[..., ::2].view(FP8)
        refused(XQA, ValueError, "kv_cache_sf", "nvfp4", kv_cache_sf=apart)
        shifted = torch.zeros(scales.numel() + 1, dtype=U8)[1:].view(scales.shape).view(FP8)
        refused(XQA, ValueError, "^kv_cache_sf must begin at a multiple of 4 bytes", "nvfp4", kv_cache_sf=shifted)
        out = scales.view(U8).flatten()[: BATCH * HEADS * DIM].view(FP8).view(BATCH, HEADS, DIM)
        refused(XQA, ValueError, "^out must not share memory with kv_cache_sf", "nvfp4", kv_cache_sf=scales, out=out)

    def test_block_scales_of_other_head_dims(self) -> None:
        cache, scales = data(PAGES, 2, PAGE, KV_HEADS, 112, dtype=U8), data(PAGES, 2, PAGE, KV_HEADS, 16, dtype=FP8)
        changes = dict(query=data(BATCH, HEADS, 224), kv_cache=cache, kv_cache_sf=scales[..., :14])
        served = "64, 80, 96, 128, 160, 192/128, 192, 256"
        message = f"on sm_90a supports these head dims: .*with NVFP4 caches: {served}; got head_dim=224 for Q and K"
        refused(XQA, NotImplementedError, message, "nvfp4", **changes)
        refused(XQA, ValueError, "^out must be torch.bfloat16 or", "nvfp4", out=data(BATCH, HEADS, DIM, dtype=FP16))
