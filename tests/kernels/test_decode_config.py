"""Decode kernel selection for each problem, and the resource needs of the shipped kernels."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers.cases.decode import cut_tokens
from helpers.cases.kernel_problems import CACHES, cache, empty, paged
from helpers.covering.configs import COVERING_DECODE

from hopwell.kernels.config.base import DTYPES, KvFetch, KvType, paged_fetches
from hopwell.kernels.config.decode import (
    COMPILED_HEAD_DIMS,
    DRAFT_MASKS,
    HEAD_DIMS,
    KV_TYPES,
    MASKS,
    MOST_COLUMNS_IN_REGISTERS,
    MOST_ROWS_IN_REGISTERS,
    DecodeConfig,
    resolve_decode,
    shipped_decode_configs,
)
from hopwell.kernels.config.splitting import ROWS, SWAP_AB_ROWS
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, WARPGROUP
from hopwell.kernels.problem import (
    AttentionProblem,
    Family,
    LogSumExp,
    LseLayout,
    Mask,
    MaskKind,
    Score,
    ScoreKind,
    TokenOffsets,
)
from hopwell.kernels.registry import build, resolve, shipped_configs
from hopwell.kernels.sm90.decode.base import DecodeKernel
from hopwell.kernels.support import DECODE_NVFP4_HEAD_DIMS
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig, Sm120MlaConfig

SHARED_BYTES = ARCHITECTURES["sm_90a"].shared_bytes

ARCH = "sm_90a"
SHIPPED = list(shipped_decode_configs())
PAGE_SIZES = [1 << i for i in range(12)]


def problem(form: str = "tuple-HND", page_size: int = 16, dim: int = 128, **changes: Any) -> AttentionProblem:
    dtype = changes.pop("dtype", torch.bfloat16)
    changes = dict(mask=Mask(MaskKind.FULL), q_offsets=None, scratch=empty(1, dtype=torch.uint8)) | changes
    changes = dict(family=Family.DECODE) | changes
    return paged(*cache(form, page_size, (dim, dim), dtype=dtype), **changes)


# Features of prefill, with their words in a refusal.
LSE = empty(60, 4, dtype=torch.float32)
UNSEEN: dict[str, dict[str, Any]] = {
    "lengths from offsets": dict(kv_lens=None),
    "offsets in elements": dict(q_offsets=TokenOffsets(empty(4, dtype=torch.int32), 512)),
    "q_lens": dict(q_lens=empty(3, dtype=torch.int32)),
    "o_offsets": dict(o_offsets=TokenOffsets(empty(4, dtype=torch.int32))),
    "contiguous keys": dict(page_table=None),
    "soft_cap scores": dict(score=Score(ScoreKind.SOFT_CAP, 30.0)),
    "statistics": dict(statistics=empty(60, 4, 2, dtype=torch.float32)),
    "skip_softmax": dict(skip_softmax=1.0),
    "a log-sum-exp that is not ragged": dict(lse=LogSumExp(LSE, LseLayout.PADDED, natural=False)),
}


def rows_of(dim: int, kv_type: KvType) -> list[int]:
    """Return the rows of the tiles of a head dim."""
    return sorted({DecodeConfig.rows_for(rows, dim, kv_type) for rows in (*SWAP_AB_ROWS, ROWS)})


def of_rows(dim: int | tuple[int, int], kv_type: KvType, rows: int) -> list[DecodeConfig]:
    """Return every kernel of a head dim, or (QK, V), and this number of rows with bf16 queries, shipped or not."""
    common = (ARCH, "bf16", "bf16", *(dim if isinstance(dim, tuple) else (dim, dim)))
    tile_n = DecodeConfig(*common, MaskKind.FULL, *paged_fetches(1)[0], kv_type, rows).tile.n
    return [DecodeConfig(*common, mask, *fetch, kv_type, rows) for mask in MASKS for fetch in paged_fetches(tile_n)]


def of_dim(dim: int | tuple[int, int], kv_type: KvType = KvType.WIDE) -> list[DecodeConfig]:
    """Return the configs of a head dim, or (QK, V), with tiles of any rows."""
    qk = dim[0] if isinstance(dim, tuple) else dim
    return [config for rows in rows_of(qk, kv_type) for config in of_rows(dim, kv_type, rows)]


def kernel_of(config: DecodeConfig) -> DecodeKernel:
    return build(config)[0]


EVERY_DIM = [(dims, kv_type) for kv_type in KV_TYPES for dims in HEAD_DIMS]
NVFP4_DIMS = [(dims, KvType.NVFP4) for dims in DECODE_NVFP4_HEAD_DIMS]
EQUAL_DIMS = [qk for qk, v in HEAD_DIMS if qk == v]


class TestShipped:
    def test_names(self) -> None:
        names = [config.name for config in SHIPPED]
        assert len(set(names)) == len(set(SHIPPED)) == len(names)
        assert all(re.fullmatch(r"decode_[a-z0-9_]{1,90}", name) for name in names)
        config = DecodeConfig(ARCH, "bf16", "fp16", 128, 128, MaskKind.DRAFT, KvFetch.PAGE_BOXES, 32)
        assert config.name == "decode_sm_90a_bf16_to_fp16_d128_draft_pages32"
        assert replace(config, rows=8).name == "decode_sm_90a_bf16_to_fp16_d128_draft_rows8_pages32"

    def test_every_field_is_in_the_name(self) -> None:
        """The name is the key of the compiled kernel: two configs that differ must not share it."""
        base = DecodeConfig(ARCH, "bf16", "bf16", 128, 128, MaskKind.FULL, KvFetch.PAGE_BOXES, 8)
        others = dict(
            arch="sm_100a",
            dtype="fp16",
            out_dtype="fp16",
            head_dim_qk=64,
            head_dim_v=64,
            mask=MaskKind.DRAFT,
            kv_fetch=KvFetch.PAGE_ROWS,
            box_rows=16,
            compiled_for="sm_100a",
            kv_type=KvType.INT8,
            rows=SWAP_AB_ROWS[0],
            uneven_pages=True,
            short_leaves=True,
            k_head_scales=True,
            v_head_scales=True,
        )
        assert set(others) == {field.name for field in fields(DecodeConfig)}
        for field, value in others.items():
            changed = object.__new__(DecodeConfig)
            changed.__dict__.update(base.__dict__ | {field: value})
            assert changed.name != base.name, field

    def test_all_combinations(self) -> None:
        found = {(c.dtype, c.mask, c.head_dim_qk, c.kv_type, c.rows) for c in SHIPPED}
        combinations = itertools.product(DTYPES.values(), MASKS, COMPILED_HEAD_DIMS, KV_TYPES)
        assert found == {
            (*rest, dim, kv_type, rows) for *rest, dim, kv_type in combinations for rows in rows_of(dim, kv_type)
        }
        assert all(c.out_dtype == c.dtype and c.head_dim_v == c.head_dim_qk for c in SHIPPED)

    def test_blackwell_ships_the_kinds_of_sm120(self) -> None:
        """The numbers of rows of a tile differ: tcgen05 kernels have up to 64."""
        here, there = (
            {(c.dtype, c.head_dim_qk, c.mask, c.kv_type) for c in shipped_configs(arch, Family.DECODE)}
            for arch in ("sm_100a", "sm_120a")
        )
        assert here == there
        assert list(shipped_configs("sm_80", Family.DECODE)) == []

    def test_what_is_compiled_in_tests_stands_for_all(self) -> None:
        """Coverage has every head dim with every mask and with every fetch, and every dtype; swap-AB
        comes with each.
        """
        for facts in (
            lambda c: (c.head_dim_qk, c.rows, c.kv_bytes),
            lambda c: (c.dtype, c.rows),
            lambda c: (c.mask, c.rows),
            lambda c: (c.head_dim_qk, c.dtype, c.kv_type),
            lambda c: (c.head_dim_qk, c.mask, c.kv_bytes),
            lambda c: (c.has_tree or c.head_dim_qk, c.kv_fetch, c.box_rows, c.kv_bytes),
        ):
            assert set(map(facts, SHIPPED)) <= set(map(facts, COVERING_DECODE))


class TestResources:
    @pytest.mark.parametrize(("dim", "kv_type"), EVERY_DIM + NVFP4_DIMS)
    def test_every_head_dim_fits(self, dim: tuple[int, int], kv_type: KvType) -> None:
        """Shared memory, launch registers, and rows of one tile suffice."""
        for config in of_dim(dim, kv_type):
            assert kernel_of(config).shared_bytes * config.ctas_per_sm <= SHARED_BYTES
            assert config.tile.m == config.rows
            assert WARPGROUP * sum(config.registers) * config.ctas_per_sm <= REGISTERS
            assert len(config.registers) == 1 + config.consumer_warpgroups + config.converts + config.has_combine_role
            assert all(registers % 8 == 0 and 24 <= registers <= 256 for registers in config.registers)

    @pytest.mark.parametrize("dim", COMPILED_HEAD_DIMS)
    def test_enough_is_in_flight(self, dim: int) -> None:
        """128 KiB of K and V per SM, or of their dequantized form in place, keep memory busy."""
        for config in (config for kv_type in KV_TYPES for config in of_dim(dim, kv_type)):
            stages = config.tile.kv_stages * config.ctas_per_sm
            assert stages * config.tile.n * sum(config.layout.stage_columns) * 2 >= 128 << 10

    @pytest.mark.parametrize(("dim", "kv_type"), EVERY_DIM)
    def test_chunks_are_whole_tiles(self, dim: tuple[int, int], kv_type: KvType) -> None:
        for config in of_dim(dim, kv_type):
            assert cut_tokens(config) % config.tile.n == 0

    def test_edges_are_in_the_docstring(self) -> None:
        for dim, kv_type in ((128, KvType.WIDE), (128, KvType.INT8), (512, KvType.WIDE)):
            for rows in rows_of(dim, kv_type):
                kernel = kernel_of(of_rows(dim, kv_type, rows)[0])
                for edge in kernel.edges:
                    assert re.search(rf"\b{edge.name}\b", type(kernel).__doc__ or "")
                    assert re.search(rf"\b{edge.producer}\b.* -> ", type(kernel).__doc__ or "")


class TestResolve:
    Q_LENS = (1, 8, 16, 20)  # of two query heads each: packed rows for every kernel

    @pytest.mark.parametrize("q_len", Q_LENS)
    @pytest.mark.parametrize("dim", COMPILED_HEAD_DIMS)
    def test_every_cache_has_a_shipped_kernel(self, dim: int, q_len: int) -> None:
        shipped = set(SHIPPED)
        for dtype, form, page_size, mask in itertools.product(DTYPES, CACHES, PAGE_SIZES, MASKS):
            tokens, heads = (q_len, 4) if mask in DRAFT_MASKS else (1, 4 * q_len)
            rows = dict(max_q_len=tokens, query=empty(60, heads, dim, dtype=dtype))
            config = resolve_decode(problem(form, page_size, dim, dtype=dtype, mask=Mask(mask), **rows), ARCH)
            assert config in shipped, (form, page_size)
            assert (config.dtype, config.head_dim_qk, config.mask) == (DTYPES[dtype], dim, mask)
            assert (config.kv_fetch is KvFetch.PAGE_ROWS) == (page_size < 8)

    @pytest.mark.parametrize("q_len", Q_LENS)
    def test_narrower_values(self, q_len: int) -> None:
        key, value = cache("tuple-HND", 16, (192, 128))
        one = replace(problem(max_q_len=q_len), key=key, value=value, query=empty(600, 4, 192))
        config = resolve_decode(one, ARCH)
        assert config in of_rows((192, 128), KvType.WIDE, config.rows)
        assert config.name.startswith("decode_sm_90a_bf16_d192_128_full_")

    @pytest.mark.parametrize("dim", EQUAL_DIMS)
    def test_other_head_dims(self, dim: int) -> None:
        for page_size, q_len in itertools.product(PAGE_SIZES, self.Q_LENS):
            config = resolve_decode(problem(page_size=page_size, dim=dim, max_q_len=q_len), ARCH)
            assert config in of_rows(dim, KvType.WIDE, config.rows)

    @pytest.mark.parametrize(
        ("dim", "rows", "want"),
        [
            *((128, 1, 8), (128, 8, 8), (128, 9, 16), (128, 16, 16), (128, 17, 32), (128, 32, 32)),
            *((128, 33, 64), (128, 64, 64), (128, 65, 64), (128, 2048, 64)),
            *((16, 1, 8), (64, 32, 32), (80, 32, 32), (80, 33, 64)),
            # Q of wider heads takes too much shared memory, and K and V of the widest have too few stages.
            *((144, 16, 16), (144, 17, 64), (256, 8, 8), (256, 16, 16), (256, 17, 64), (512, 1, 64), (512, 8, 64)),
        ],
    )
    def test_swap_ab_rows(self, dim: int, rows: int, want: int) -> None:
        """Only the rows of a request and KV head count, from query heads or new tokens."""
        for group, q_len in {(rows, 1), (1, rows)}:
            shape = dict(page_size=16, dim=dim, query=empty(60, 2 * group, dim), max_q_len=q_len)
            assert resolve_decode(problem(**shape), ARCH).rows == want
            # Over 8-bit caches, tiles of few rows have other head dims.
            narrow = ((8, 512), (16, 128), (MOST_ROWS_IN_REGISTERS, MOST_COLUMNS_IN_REGISTERS))
            few = [m for m, most in narrow if rows <= m and dim <= most]
            assert resolve_decode(problem(**shape, dtype=torch.int8), ARCH).rows == min(few, default=ROWS)

    @pytest.mark.parametrize("q_lens", [(3, 1), (20, 17)], ids=["few-rows", "many-rows"])
    def test_run_time_facts_do_not_make_other_kernels(self, q_lens: tuple[int, int]) -> None:
        base = problem(max_q_len=q_lens[0])
        want = resolve_decode(base, ARCH)
        changes = dict(
            batch=1,
            max_q_len=q_lens[1],
            max_kv_len=1 << 20,
            softmax_scale=empty(1, dtype=torch.float32),
            output_factor=2.0,
            sinks=empty(4, dtype=torch.float32),
            programmatic_launch=True,
            out=empty(60, 4, 128),
        )
        for field, value in changes.items():
            assert resolve_decode(replace(base, **{field: value}), ARCH) == want, field
        windows = [replace(base, mask=Mask(MaskKind.SLIDING_WINDOW, left), max_q_len=1) for left in (0, 4096)]
        assert len({resolve_decode(window, ARCH) for window in windows}) == 1
        drafts = [replace(base, mask=Mask(MaskKind.DRAFT, left)) for left in (-1, 0, 4096)]
        assert len({resolve_decode(draft, ARCH) for draft in drafts}) == 1

    @pytest.mark.parametrize("kv_type", [KvType.E4M3, KvType.INT8])
    def test_caches_of_8_bits(self, kv_type: KvType) -> None:
        dtype = {KvType.E4M3: torch.float8_e4m3fn, KvType.INT8: torch.int8}[kv_type]
        for dim, page_size, out in itertools.product(EQUAL_DIMS, PAGE_SIZES, (None, torch.float8_e4m3fn)):
            query = empty(60, 4, dim)
            given = None if out is None else empty(60, 4, dim, dtype=out)
            config = resolve_decode(problem(page_size=page_size, dim=dim, dtype=dtype, query=query, out=given), ARCH)
            assert replace(config, out_dtype="bf16") in of_dim(dim, kv_type)
            assert config.out_dtype == ("bf16" if out is None else "e4m3")

    def test_scales_of_each_head(self) -> None:
        one, two = (empty(count, dtype=torch.float32) for count in (1, 2))
        for k_scale, v_scale in itertools.product((0.5, one, two), repeat=2):
            options = dict(dtype=torch.float8_e4m3fn, query=empty(60, 4, 128))
            config = resolve_decode(problem(softmax_scale=k_scale, output_scale=v_scale, **options), ARCH)
            assert (config.k_head_scales, config.v_head_scales) == (k_scale is two, v_scale is two)

    def test_output_of_the_other_dtype(self) -> None:
        config = resolve_decode(problem(out=empty(60, 4, 128, dtype=torch.float16)), ARCH)
        assert (config.dtype, config.out_dtype) == ("bf16", "fp16")


class TestRefusals:
    @staticmethod
    def refusal(of: AttentionProblem, arch: str = ARCH) -> str:
        with pytest.raises(NotImplementedError) as caught:
            resolve(of, arch)
        return str(caught.value)

    @pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
    def test_other_archs(self, arch: str) -> None:
        message = self.refusal(problem(), arch)
        assert arch in message
        assert "supported: sm_90a" in message

    @pytest.mark.parametrize("dim", [8, 24, 40, 272, 320, 496, 528, 1024])
    def test_other_head_dims(self, dim: int) -> None:
        assert f"(QK/V) {dim} have no decode kernel on sm_90a; supported: 16, 32, " in self.refusal(problem(dim=dim))

    def test_v_of_another_width(self) -> None:
        key, value = cache("tuple-HND", 16, (192, 64))
        refusal = self.refusal(replace(problem(), key=key, value=value, query=empty(600, 4, 192)))
        assert "192/64 have no decode kernel" in refusal
        assert "192/128" in refusal

    @pytest.mark.parametrize(("name", "change"), UNSEEN.items(), ids=str)
    def test_what_kernels_do_not_look_at(self, name: str, change: dict[str, Any]) -> None:
        assert f"no decode kernel with {name}" in self.refusal(problem(**change))

    def test_masks_of_one_position(self) -> None:
        for kind, q_len in ((MaskKind.CAUSAL, 1), (MaskKind.CHUNKED, 1), (MaskKind.SLIDING_WINDOW, 2)):
            message = self.refusal(problem(mask=Mask(kind, 7), max_q_len=q_len))
            assert (
                f"mask {kind.value} has no decode kernel on sm_90a for up to {q_len} new tokens; supported" in message
            )

    def test_scales_of_each_head_of_a_16_bit_cache(self) -> None:
        scales = empty(2, dtype=torch.float32)
        for name in ("softmax_scale", "output_scale"):
            message = self.refusal(problem(**{name: scales}))
            assert message == "scales of each KV head have no decode kernel on sm_90a with a 16-bit cache"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        assert f"query dtype {dtype}" in self.refusal(problem(query=empty(60, 4, 128, dtype=dtype)))
        assert f"output dtype {dtype}" in self.refusal(problem(out=empty(60, 4, 128, dtype=dtype)))


@pytest.mark.parametrize(
    ("arch", "kind", "dims", "kv_type", "expected"),
    [
        ("sm_120a", Sm120DecodeConfig, 64, KvType.WIDE, (64, 4)),
        ("sm_100a", Sm120DecodeConfig, 64, KvType.WIDE, (64, 8)),
        ("sm_120a", Sm120DecodeConfig, 128, KvType.WIDE, (64, 2)),
        ("sm_103a", Sm120DecodeConfig, 128, KvType.WIDE, (64, 4)),
        ("sm_120a", Sm120DecodeConfig, 512, KvType.WIDE, (32, 1)),
        ("sm_100a", Sm120DecodeConfig, 512, KvType.WIDE, (64, 1)),
        ("sm_120a", Sm120DecodeConfig, 64, KvType.NVFP4, (64, 16)),
        ("sm_100a", Sm120DecodeConfig, 64, KvType.NVFP4, (64, 16)),
        ("sm_120a", Sm120MlaConfig, (576, 512), KvType.WIDE, (64, 1)),
        ("sm_120a", Sm120MlaConfig, (320, 256), KvType.WIDE, (64, 2)),
    ],
)
def test_warps_have_the_tiles_that_shared_memory_holds(
    arch: str, kind: Any, dims: Any, kv_type: KvType, expected: tuple[int, int]
) -> None:
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    rows = 16 if kind is Sm120MlaConfig else 8
    config = kind(arch, "bf16", "bf16", *dims, MaskKind.CAUSAL, KvFetch.PAGE_ROWS, 0, kv_type, rows)
    assert (config.tile.n, config.tile.kv_stages) == expected
    assert 0 < config.smem_levels <= 24
    kernel, _ = build(config)
    assert kernel.shared_bytes <= ARCHITECTURES[arch].shared_bytes
