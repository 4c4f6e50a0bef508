"""MLA kernel selection for each problem, and the resource needs of the shipped kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases.decode import cut_tokens
from helpers.cases.kernel_problems import empty, paged
from helpers.covering.configs import COVERING_MLA
from helpers.covering.shipped import all_shipped

from hopwell.kernels.config import mla as mla_config
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.config.mla import MlaConfig, resolve_mla
from hopwell.kernels.config.splitting import LATENT_SWAP_AB_ROWS, ROWS
from hopwell.kernels.hardware import ARCHITECTURES
from hopwell.kernels.problem import AttentionProblem, Family, Mask, MaskKind
from hopwell.kernels.registry import build, query_dtype, resolve
from hopwell.kernels.sm90.decode.swap_ab import SwapABDecodeSm90
from hopwell.kernels.sm90.mla.swap_ab import SwapABMlaSm90
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig, Sm100SwapABMlaConfig
from hopwell.kernels.support import MLA_HEAD_DIMS, SPARSE_MLA_HEAD_DIMS
from hopwell.layouts import mla_kv_views

SHARED_BYTES = ARCHITECTURES["sm_90a"].shared_bytes

ARCH = "sm_90a"
FP8 = torch.float8_e4m3fn
SHIPPED = all_shipped(ARCH, Family.MLA)
PAGE_SIZES = [1 << i for i in range(12)]


def problem(dims: tuple[int, int] = MLA_HEAD_DIMS[0], page_size: int = 64, **changes: Any) -> AttentionProblem:
    key, value = mla_kv_views(empty(5, page_size, dims[0], dtype=changes.pop("dtype", torch.bfloat16)), dims[1])
    changes = dict(query=empty(60, 16, dims[0], dtype=key.dtype), q_offsets=None) | changes
    return paged(key, value, **(dict(scratch=empty(1, dtype=torch.uint8), family=Family.MLA) | changes))


def refusal(of: AttentionProblem, arch: str = ARCH) -> str:
    with pytest.raises(NotImplementedError) as caught:
        resolve(of, arch)
    return str(caught.value)


def test_names_are_those_of_no_other_kernel() -> None:
    names = [config.name for config in SHIPPED]
    assert len(set(names)) == len(set(SHIPPED)) == len(names)
    assert all(re.fullmatch(r"mla_[a-z0-9_]{1,90}", name) for name in names)
    assert {"mla_sm_90a_bf16_d576_512_causal_pages64", "mla_sm_90a_e4m3_to_bf16_d576_512_causal_topk"} <= set(names)


def test_blackwell_has_none_of_sm120() -> None:
    for arch in ("sm_100a", "sm_103a"):
        kinds = {type(config) for config in all_shipped(arch, Family.MLA)}
        assert kinds == {Sm100MlaConfig, Sm100SwapABMlaConfig}
    assert all_shipped("sm_80", Family.MLA) == []


def test_what_is_compiled_in_tests_is_shipped() -> None:
    assert set(COVERING_MLA) <= set(SHIPPED)
    assert {(c.head_dim_qk, c.head_dim_v) for c in COVERING_MLA} == set(SPARSE_MLA_HEAD_DIMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("dims", MLA_HEAD_DIMS)
def test_every_cache_has_a_shipped_kernel(dims: tuple[int, int], dtype: torch.dtype) -> None:
    for page_size in PAGE_SIZES:
        config = resolve_mla(problem(dims, page_size, dtype=dtype), ARCH)
        assert config in SHIPPED
        assert config.uses_fp8_mma == (dtype == FP8)
        assert (config.head_dim_qk, config.head_dim_v) == dims
        assert (config.kv_fetch is KvFetch.PAGE_ROWS) == (page_size < 8)


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_every_kernel_fits(config: MlaConfig) -> None:
    kernel, _ = build(config)
    assert isinstance(kernel, SwapABMlaSm90) == (config.rows == LATENT_SWAP_AB_ROWS)
    assert kernel.shared_bytes <= SHARED_BYTES
    assert cut_tokens(config) % (config.tile.n * kernel.step_tiles) == 0
    assert 2 * sum(config.layout.kv_dims) == config.head_dim_qk * config.q_bytes
    # The kernel for few rows has the work queue and Q of the decode kernel for few rows.
    docs = (type(kernel).__doc__ or "") + (SwapABDecodeSm90.__doc__ or "") * config.has_tree
    for edge in kernel.edges:
        assert re.search(rf"\b{edge.name}\b", docs)


def test_fp8_queries() -> None:
    """fp8 queries over fp8 caches are multiplied unchanged, with a bfloat16 output by default."""
    base = problem(dtype=FP8)
    config = resolve_mla(base, ARCH)
    assert (config.dtype, config.out_dtype, config.kv_type) == ("e4m3", "bf16", KvType.WIDE)
    assert resolve_mla(replace(base, out=empty(60, 16, 512)), ARCH) == config
    assert "key dtype torch.bfloat16 has no kernel" in refusal(problem(query=empty(60, 16, 576, dtype=FP8)))
    assert "output dtype torch.float8_e4m3fn" in refusal(replace(base, out=empty(60, 16, 512, dtype=FP8)))
    assert resolve_mla(replace(base, query=empty(60, 16, 576)), ARCH).kv_type is KvType.E4M3
    assert "query dtype torch.float8_e4m3fn" in refusal(base, "sm_120a")
    assert not any(config.uses_fp8_mma for config in all_shipped("sm_120a", Family.MLA))
    taken = {arch: query_dtype(Family.MLA, arch, FP8, FP8) for arch in ("sm_90a", "sm_100a", "sm_120a", "sm_80")}
    assert taken == {"sm_90a": FP8, "sm_100a": FP8, "sm_120a": torch.bfloat16, "sm_80": FP8}


def test_run_time_facts_do_not_make_other_kernels() -> None:
    base = problem()
    changes = dict(
        batch=1,
        max_q_len=100,
        max_kv_len=1 << 20,
        query=empty(3, 128, 576),
        softmax_scale=empty(1, dtype=torch.float32),
        sinks=empty(16, dtype=torch.float32),
        programmatic_launch=True,
        out=empty(60, 16, 512),
    )
    for field, value in changes.items():
        assert resolve_mla(replace(base, **{field: value}), ARCH) == resolve_mla(base, ARCH), field


@pytest.mark.parametrize(
    ("heads", "q_len", "rows", "with_topk"),
    [(16, 1, 16, 16), (8, 2, 16, 16), (1, 1, 16, 16), (17, 1, ROWS, ROWS), (16, 2, ROWS, 16), (3, 6, ROWS, 16)],
)
def test_swap_ab_has_kernels_of_its_own(heads: int, q_len: int, rows: int, with_topk: int) -> None:
    """Rows of all new tokens count together; with top-k indices, the rows of each token count alone."""
    dense = problem(query=empty(60, heads, 576), max_q_len=q_len)
    sparse = replace(dense, page_table=None, token_table=empty(60, 64, dtype=torch.int32))
    assert [resolve_mla(of, ARCH).rows for of in (dense, sparse)] == [rows, with_topk]


def test_the_family_is_what_tells_mla_from_decode() -> None:
    of = problem()
    assert resolve(of, ARCH).family is Family.MLA
    assert refusal(replace(of, family=Family.DECODE)).startswith("head dims (QK/V) 576/512 have no decode kernel")


def test_refusals() -> None:
    assert "no MLA decode kernel for sm_80; supported: sm_90a, sm_100a" in refusal(problem(), "sm_80")
    for dims in ((512, 512), (576, 256), (192, 128)):
        assert f"{dims[0]}/{dims[1]} have no MLA kernel on sm_90a; supported: 576/512, 320/256" in refusal(
            problem(dims)
        )
    assert "mask full has no MLA decode kernel" in refusal(problem(mask=Mask(MaskKind.FULL)))
    assert "no MLA decode kernel with statistics" in refusal(problem(statistics=empty(60, 16, 2, dtype=torch.float32)))
    assert "output dtype torch.float32" in refusal(problem(out=empty(60, 16, 512, dtype=torch.float32)))


@pytest.mark.parametrize("dims", SPARSE_MLA_HEAD_DIMS)
def test_topk_has_a_kernel(dims: tuple[int, int]) -> None:
    with_topk = replace(problem(dims), page_table=None, token_table=empty(60, 64, dtype=torch.int32))
    config = resolve_mla(with_topk, ARCH)
    assert config in SHIPPED
    assert config.sparse


def test_only_topk_goes_without_a_rotary_part() -> None:
    assert "(QK/V) 512/512 have no MLA kernel" in refusal(problem((512, 512)))


def test_so_many_keys_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fractions of all steps have to fit 32 bits, unless requests are split by their own lengths alone."""
    base = replace(problem(query=empty(60, 128, 576)), batch=60, max_q_len=1)
    table = base.page_table
    assert table is not None
    for most in (0, -1):
        monkeypatch.setattr(mla_config, "MOST_CTA_PART_KEYS", table.key.numel() * base.key.shape[2] + most)
        assert resolve_mla(base, ARCH).batch_invariant == (most < 0)


@pytest.mark.parametrize(("tokens", "heads", "is_cut_by_length"), [(90, 128, False), (89, 128, True), (60, 32, False)])
def test_uneven_numbers_of_new_tokens_have_no_cta_parts(tokens: int, heads: int, is_cut_by_length: bool) -> None:
    """With fewer than three quarters of the maximum new tokens, row tiles have unequal work, unless there
    is only one.
    """
    ragged = replace(problem(query=empty(tokens, heads, 576)), batch=60, max_q_len=2)
    config = resolve_mla(ragged, ARCH)
    assert config.batch_invariant == is_cut_by_length
    assert config in SHIPPED
