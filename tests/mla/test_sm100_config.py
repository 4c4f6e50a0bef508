"""MLA decode of Blackwell by pairs of CTAs and of few rows: selection, scratch, and the constraints of tiles, registers
and edges."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases.kernel_problems import empty, paged
from helpers.covering.shipped import all_shipped
from helpers.covering.sm100_swap_ab_mla import COVERING_SWAP_AB_MLA

from hopwell.kernels.config import splitting
from hopwell.kernels.config.base import QUERY_DTYPES, KvFetch, KvType, paged_fetches
from hopwell.kernels.config.mla import resolve_mla
from hopwell.kernels.config.splitting import LATENT_SWAP_AB_ROWS, LaunchSizes
from hopwell.kernels.hardware import ARCHITECTURES, LANES, REGISTERS, WARPGROUP
from hopwell.kernels.jit import settings
from hopwell.kernels.launch.geometry import decode_geometry
from hopwell.kernels.parts.core.kernel import work_queue_stride
from hopwell.kernels.parts.partition.split_kv import SplitTile
from hopwell.kernels.problem import AttentionProblem, Family
from hopwell.kernels.registry import build, resolve, scratch_bytes
from hopwell.kernels.sm90.mla.swap_ab import SwapABMlaSm90
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig, Sm100SwapABMlaConfig
from hopwell.kernels.sm100.mla.kernel import MlaSm100
from hopwell.kernels.support import BLACKWELL, MLA_HEAD_DIMS, SPARSE_MLA_HEAD_DIMS
from hopwell.layouts import FP8_DS_MLA_BYTES, mla_kv_views

pytestmark = pytest.mark.traced

WIDE, NARROW = MLA_HEAD_DIMS
SHIPPED = {arch: [c for c in all_shipped(arch, Family.MLA) if isinstance(c, Sm100MlaConfig)] for arch in BLACKWELL}
SWAP_AB = {
    arch: [c for c in all_shipped(arch, Family.MLA) if isinstance(c, Sm100SwapABMlaConfig)] for arch in BLACKWELL
}
FP8 = torch.float8_e4m3fn
# Types of queries and of the cache. Rows of 656 bytes are uint8.
OPERANDS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (FP8, FP8),
    (torch.bfloat16, FP8),
    (torch.float16, FP8),
    (torch.bfloat16, torch.uint8),
]


def problem(
    dims: tuple[int, int] = WIDE, page_size: int = 64, heads: int = 128, q_len: int = 1, **changes: Any
) -> AttentionProblem:
    dtype, kv_dtype = changes.pop("dtype", torch.bfloat16), changes.pop("kv_dtype", None)
    key, value = mla_kv_views(empty(5, page_size, dims[0], dtype=kv_dtype or dtype), dims[1])
    query = empty(60 * q_len, heads, dims[0], dtype=dtype)
    common = dict(query=query, q_offsets=None, max_q_len=q_len, batch=60, scratch=empty(1, dtype=torch.uint8))
    return paged(key, value, **(common | dict(family=Family.MLA) | changes))


def operands(query: torch.dtype, cache: torch.dtype, heads: int) -> AttentionProblem:
    """Return a problem with types of queries and of the cache."""
    if cache != torch.uint8:
        return problem(heads=heads, dtype=query, kv_dtype=cache)
    key, value = mla_kv_views(empty(5, 64, FP8_DS_MLA_BYTES, dtype=torch.uint8), 512)
    return replace(problem(heads=heads), key=key, value=value)


@pytest.mark.parametrize("arch", BLACKWELL)
class TestResolve:
    def test_many_rows_have_a_shipped_kernel(self, arch: str) -> None:
        for dims, page_size in itertools.product(MLA_HEAD_DIMS, (1, 4, 8, 16, 32, 64, 128, 192)):
            found = resolve(problem(dims, page_size), arch)
            assert found == resolve_mla(problem(dims, page_size), arch, Sm100MlaConfig)
            assert (found in SHIPPED[arch]) == (page_size != 192)  # uneven pages are compiled on demand
            assert isinstance(build(found)[0], MlaSm100)
            box_rows = min(page_size, 64) if page_size >= 8 else 0
            assert (found.rows, found.box_rows, found.is_cooperative) == (128, box_rows, True)

    def test_types(self, arch: str) -> None:
        """Queries and cache have one type; an output of e4m3 queries is bfloat16 by default."""
        for dtype, name in (QUERY_DTYPES).items():
            found = resolve(problem(dtype=dtype), arch)
            assert (type(found), found.dtype) == (Sm100MlaConfig, name)
            assert found.out_dtype == ("bf16" if dtype == FP8 else name)
            assert found.uses_fp8_mma == (dtype == FP8)

    def test_topk_indices(self, arch: str) -> None:
        """Each token has keys of its own, so new tokens do not add to the rows of a tile."""
        for dims, heads, own in itertools.product(SPARSE_MLA_HEAD_DIMS, (16, 17, 128), (True, False)):
            if own == (heads == 16):
                continue
            lists = dict(page_table=None, token_table=torch.zeros(120, 256, dtype=torch.int32))
            found = resolve(problem(dims, heads=heads, q_len=2, **lists), arch)
            assert isinstance(found, Sm100MlaConfig) == own
            assert found.kv_fetch is KvFetch.TOPK_ROWS
            assert not own or found in SHIPPED[arch]

    def test_rows_are_heads_times_new_tokens(self, arch: str) -> None:
        for heads, q_len, own in ((16, 1, False), (17, 1, True), (8, 2, False), (16, 2, True), (128, 4, True)):
            found = resolve(problem(heads=heads, q_len=q_len), arch)
            assert isinstance(found, Sm100MlaConfig) == own, (heads, q_len)

    def test_pairs_refuse_few_rows(self, arch: str) -> None:
        with pytest.raises(NotImplementedError, match=f"no MLA decode kernel of CTA pairs for {arch} with 16 packed"):
            resolve_mla(problem(heads=16), arch, Sm100MlaConfig)

    @pytest.mark.parametrize("kinds", OPERANDS, ids=str)
    def test_rows_of_each_kernel(self, kinds: tuple[torch.dtype, torch.dtype], arch: str) -> None:
        """Up to 16 rows have the kernel of few rows, and more have pairs of CTAs."""
        query, cache = kinds
        for rows in range(1, 130):
            found = resolve(operands(query, cache, heads=rows), arch)
            assert type(found) is (Sm100SwapABMlaConfig if rows <= 16 else Sm100MlaConfig), rows
            assert found.matrix_instruction.startswith("tcgen05")
            assert found.rows == (16 if rows <= 16 else 128)

    def test_few_rows_are_heads_times_new_tokens(self, arch: str) -> None:
        """Tokens with top-k indices have tiles of their own, so new tokens do not count there."""
        lists = dict(page_table=None, token_table=torch.zeros(480, 256, dtype=torch.int32))
        for heads, q_len, own in (
            (16, 1, True),
            (8, 2, True),
            (5, 3, True),
            (3, 5, True),
            (1, 16, True),
            (6, 3, False),
        ):
            found = resolve(problem(heads=heads, q_len=q_len), arch)
            assert type(found) is (Sm100SwapABMlaConfig if own else Sm100MlaConfig), (heads, q_len)
            found = resolve(problem(heads=heads, q_len=q_len, **lists), arch)
            assert (type(found), found.kv_fetch) == (Sm100SwapABMlaConfig, KvFetch.TOPK_ROWS)
        with pytest.raises(
            NotImplementedError, match=f"no tcgen05 MLA kernel of few rows for {arch} with 17 packed rows"
        ):
            resolve_mla(problem(heads=17), arch, Sm100SwapABMlaConfig)

    def test_few_rows_have_a_shipped_kernel(self, arch: str) -> None:
        for dims, page_size in itertools.product(MLA_HEAD_DIMS, (1, 4, 8, 16, 32, 64, 128, 192)):
            found = resolve(problem(dims, page_size, heads=16), arch)
            assert (found in SWAP_AB[arch]) == (page_size != 192)  # uneven pages are compiled on demand
            assert (type(build(found)[0]), found.batch_invariant, found.is_cooperative) == (SwapABMlaSm90, False, False)
            assert found.box_rows == (min(page_size, 64) if page_size >= 8 else 0)

    def test_few_rows_are_batch_invariant_anyhow(self, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        found = resolve(problem(heads=16), arch)
        monkeypatch.setattr(settings.BATCH_INVARIANT, "given", True)
        assert resolve(problem(heads=16), arch) == found

    @pytest.mark.parametrize("kinds", OPERANDS, ids=str)
    def test_few_rows_have_the_tiles_of_hopper(self, kinds: tuple[torch.dtype, torch.dtype], arch: str) -> None:
        own, hopper = (resolve(operands(*kinds, heads=16), each) for each in (arch, "sm_90a"))
        for name in ("tile", "leaf_tokens", "smem_levels", "consumer_warpgroups", "registers", "has_combine_role"):
            assert getattr(own, name) == getattr(hopper, name), name
        assert own.name == hopper.name.replace("sm_90a_", f"{arch}_tcgen05_")

    def test_8bit_caches_are_copied_by_lanes(self, arch: str) -> None:
        found = resolve(problem(kv_dtype=FP8), arch)
        assert isinstance(found, Sm100MlaConfig)
        assert (found.kv_type, found.kv_fetch, found.dtype) == (KvType.E4M3, KvFetch.PAGE_ROWS, "bf16")
        assert found in SHIPPED[arch]

    def test_batch_invariant_results(self, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not resolve_mla(problem(), arch, Sm100MlaConfig).batch_invariant
        monkeypatch.setattr(settings.BATCH_INVARIANT, "given", True)
        found = resolve(problem(), arch)
        assert isinstance(found, Sm100MlaConfig)
        assert found.batch_invariant
        assert found in SHIPPED[arch]


@pytest.mark.parametrize("arch", BLACKWELL)
def test_what_is_shipped(arch: str) -> None:
    wanted = {(dims, *fetch) for dims in MLA_HEAD_DIMS for fetch in paged_fetches(64)}
    wanted |= {(dims, KvFetch.TOPK_ROWS, 0) for dims in SPARSE_MLA_HEAD_DIMS}
    for dtype in ("bf16", "e4m3"):
        of = (c for c in SHIPPED[arch] if c.dtype == dtype and c.kv_type is KvType.WIDE)
        assert {((c.head_dim_qk, c.head_dim_v), c.kv_fetch, c.box_rows) for c in of} == wanted
    by_rows = {(dims, fetch) for dims, fetch, box_rows in wanted if not box_rows}
    for kv_type, dims in ((KvType.E4M3, {*SPARSE_MLA_HEAD_DIMS}), (KvType.FP8_DS_MLA, {WIDE})):
        of = (c for c in SHIPPED[arch] if c.kv_type is kv_type)
        assert {((c.head_dim_qk, c.head_dim_v), c.kv_fetch) for c in of} == {
            each for each in by_rows if each[0] in dims
        }
    assert {c.dtype for c in SHIPPED[arch]} == {"bf16", "e4m3"}
    assert all(c.out_dtype == "bf16" for c in SHIPPED[arch])
    assert all("_rows128_" in c.name for c in SHIPPED[arch])


@pytest.mark.parametrize("arch", BLACKWELL)
def test_which_kernels_of_few_rows_are_shipped(arch: str) -> None:
    """Hopper ships the same kernels of 16 rows."""
    hopper = [config for config in all_shipped("sm_90a", Family.MLA) if config.rows == LATENT_SWAP_AB_ROWS]
    names = [config.name for config in SWAP_AB[arch]]
    assert len(names) == len(set(names)) > 0
    assert {*names} == {config.name.replace("sm_90a_", f"{arch}_tcgen05_") for config in hopper}


def test_covering_kernels_of_few_rows_stand_for_all() -> None:
    """Each width comes with each type, and each type with each fetch; both architectures are there."""
    assert len({*COVERING_SWAP_AB_MLA}) == len(COVERING_SWAP_AB_MLA)
    facts: list[Callable[[Sm100SwapABMlaConfig], Any]] = [
        lambda c: (c.dtype, c.kv_type, c.head_dim_qk, c.head_dim_v),
        lambda c: (c.dtype, c.kv_type, c.kv_fetch, c.box_rows),
        lambda c: (c.kv_fetch, c.head_dim_qk),
    ]
    for fact in facts:
        assert {*map(fact, SWAP_AB["sm_100a"])} <= {*map(fact, COVERING_SWAP_AB_MLA)}
    assert {c.arch for c in COVERING_SWAP_AB_MLA} == {*BLACKWELL}
    assert {c.dtype for c in COVERING_SWAP_AB_MLA} == {"bf16", "fp16", "e4m3"}
    for config in COVERING_SWAP_AB_MLA:
        assert config in SWAP_AB[config.arch] or config.dtype == "fp16"


@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize("sms", [1, 4, 5, 148])
@pytest.mark.parametrize("dims", MLA_HEAD_DIMS)
def test_nodes_of_few_rows_fit_the_scratch(
    dims: tuple[int, int], sms: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that CTAs share, and each CTA's nodes in global memory, fit the scratch of any bound of rows."""
    monkeypatch.setattr("hopwell.kernels.launch.geometry.multiprocessors", lambda device: sms)
    for kv_len, heads in itertools.product((1, 5000, 1 << 20), (1, 16)):
        of = problem(dims, heads=heads, max_kv_len=kv_len)
        config = resolve(of, arch)
        assert isinstance(config, Sm100SwapABMlaConfig)
        sizes = decode_geometry(of, config)
        assert (sizes.grid, sizes.row_tiles) == (sms, 1)
        assert sizes.gmem_levels == splitting.gmem_levels(config.leaf_tokens, kv_len, config.smem_levels)
        nodes = sizes.slots + sizes.gmem_levels * sizes.grid
        needed = nodes * splitting.node_bytes(config.rows, dims[1]) + splitting.ALIGNMENT
        for bound in (heads, 16, 64, 128):
            assert needed <= scratch_bytes(Family.MLA, arch, LaunchSizes(bound, 1, dims[1], kv_len, sms)), bound


@pytest.mark.parametrize("config", COVERING_SWAP_AB_MLA, ids=lambda config: config.name)
def test_resources_of_few_rows(config: Sm100SwapABMlaConfig) -> None:
    """Scores come first in tensor memory, then parts of O of 64 columns."""
    kernel, arch = build(config)[0], ARCHITECTURES[config.arch]
    assert kernel.shared_bytes <= arch.shared_bytes
    assert WARPGROUP * sum(config.registers) <= REGISTERS
    blocks = config.head_dim_v // 64
    assert config.columns.widths == dict(s=16, o=16 * blocks)
    assert (config.columns.first("s"), config.columns.first("o"), config.columns.total) == (0, 16, 16 * (1 + blocks))
    assert config.allocations == ({512: 256, 256: 128}[config.head_dim_v],)
    edges = {edge.name: edge for edge in kernel.edges}
    loaded = {"loaded_k", "loaded_v"} if config.kv_type is not KvType.WIDE else set()
    assert {*edges} == {"q", "k", "v", "work", "leaf", "s", "o", *loaded}
    for name in ("k", "v"):  # a commit releases them
        assert (edges[name].stages, edges[name].consumer_warps * edges[name].consumer_lanes) == (
            config.tile.kv_stages,
            1,
        )
    for name in ("s", "o"):
        assert (edges[name].stages, edges[name].full_arrivals) == (1, 1)


@pytest.mark.parametrize(
    ("heads", "q_len", "row_tiles"), [(128, 1, 1), (65, 1, 1), (17, 1, 1), (128, 3, 3), (100, 2, 2)]
)
@pytest.mark.parametrize("sms", [1, 4, 5, 148])
def test_pairs_and_slots(heads: int, q_len: int, row_tiles: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair is one CTA of the schedule, and a slot has the rows of both of its CTAs. All slots fit the scratch."""
    monkeypatch.setattr("hopwell.kernels.launch.geometry.multiprocessors", lambda device: max(sms, 2))
    of = problem(heads=heads, q_len=q_len)
    config = resolve(of, "sm_100a")
    sizes = decode_geometry(of, config)
    pairs = max(sms, 2) // 2
    assert (sizes.grid, sizes.row_tiles, sizes.cta_parts) == (pairs, row_tiles, splitting.cta_parts(row_tiles, pairs))
    assert sizes.slot_rows == min(-(-heads * q_len // 16) * 16, 128)
    assert sizes.slots >= 2 * sizes.cta_parts * row_tiles
    needed = sizes.slots * splitting.slot_bytes(sizes.slot_rows, 512, latent=True) + splitting.ALIGNMENT
    launched = LaunchSizes(heads * q_len, 1, 512, of.max_kv_len, max(sms, 2))
    assert needed <= scratch_bytes(Family.MLA, "sm_100a", launched)


class TestResources:
    @pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
    @pytest.mark.parametrize("dims", MLA_HEAD_DIMS)
    def test_shared_and_tensor_memory(self, dims: tuple[int, int], dtype: str) -> None:
        of = (c for c in SHIPPED["sm_100a"] if (c.head_dim_qk, c.head_dim_v) == dims and c.dtype == dtype)
        config, (qk, v) = next(of), dims
        kernel, size = MlaSm100(config), 2 if dtype == "bf16" else 1
        steps = 1 if (dims, dtype) == (WIDE, "bf16") else 2
        row = -(-qk * size // 128) * 128  # bytes of a row of Q, and of K: whole boxes
        operands = 64 * row + steps * (64 * row + 128 * v // 2 * size) + 64 * 128 * size
        stages = {"k": steps * row // 128, "v": steps * 128 * v // 2 * size // (16 << 10)}
        loaded = 2 * (1 + stages["k"] + stages["v"])  # each is relayed
        barriers = 8 * (2 * (loaded + 1 + 1 + 1 + 2 + 1) + 2)
        others = 2 * 512 + 2 * 512 + 16 + 4 * work_queue_stride(SplitTile.INTS)
        assert kernel.shared_bytes == operands + barriers + others
        assert kernel.shared_bytes <= ARCHITECTURES["sm_100a"].shared_bytes
        in_tmem = 6 if (dims, dtype) == (WIDE, "bf16") else row // 128  # boxes of Q
        assert [*config.columns.widths.items()] == [("s", 64), ("o", v // 2), ("q", 32 * in_tmem)]

    @pytest.mark.parametrize("by_lanes", [False, True])
    def test_edges(self, by_lanes: bool) -> None:
        """Lanes that copy rows all arrive, and the mma warp fences their writes for the tensor cores."""
        kernel = MlaSm100(next(c for c in SHIPPED["sm_100a"] if (not c.box_rows) == by_lanes))
        assert {e.name for e in kernel.edges if e.consumer_fences} == ({"k", "v"} if by_lanes else set())
        loads = LANES if by_lanes else 1
        arrivals = {e.name: (e.stages, e.full_arrivals, e.consumer_warps * e.consumer_lanes) for e in kernel.edges}
        assert arrivals == dict(
            q=(1, LANES, 1),
            k=(9, loads, 1),
            v=(4, loads, 1),
            relayed_q=(1, 1, 1),
            relayed_k=(9, 1, 1),
            relayed_v=(4, 1, 1),
            work=(1, 1, 11 * LANES),
            s=(1, 1, 8),
            p=(1, 8, 1),
            factor=(2, 4 * LANES, 4 * LANES),
            o=(1, 1, 8),
        )

    def test_edges_are_in_the_docstring(self) -> None:
        document = MlaSm100.__doc__ or ""
        for edge in MlaSm100(SHIPPED["sm_100a"][0]).edges:
            assert f"\n        {edge.name}" in document or f", {edge.name}" in document
