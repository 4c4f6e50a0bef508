"""MLA decode of Blackwell by pairs of CTAs: selection, scratch, and the constraints of tiles, registers and edges."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.cases.kernel_problems import empty, paged

from hopwell.kernels.config import splitting
from hopwell.kernels.config.base import QUERY_DTYPES, KvFetch, KvType, paged_fetches
from hopwell.kernels.hardware import ARCHITECTURES, LANES
from hopwell.kernels.jit import settings
from hopwell.kernels.launch.geometry import decode_geometry
from hopwell.kernels.parts.core.kernel import work_queue_stride
from hopwell.kernels.parts.partition.split_kv import SplitTile
from hopwell.kernels.problem import AttentionProblem, Family
from hopwell.kernels.registry import build, resolve, scratch_bytes, shipped_configs
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig, resolve_sm100_mla
from hopwell.kernels.sm100.mla.kernel import MlaSm100
from hopwell.kernels.support import BLACKWELL, MLA_HEAD_DIMS, SPARSE_MLA_HEAD_DIMS
from hopwell.kernels.warp_mma.decode.config import Sm120MlaConfig
from hopwell.layouts import mla_kv_views

pytestmark = pytest.mark.traced

WIDE, NARROW = MLA_HEAD_DIMS
SHIPPED = {arch: [c for c in shipped_configs(arch, Family.MLA) if isinstance(c, Sm100MlaConfig)] for arch in BLACKWELL}
FP8 = torch.float8_e4m3fn


def problem(
    dims: tuple[int, int] = WIDE, page_size: int = 64, heads: int = 128, q_len: int = 1, **changes: Any
) -> AttentionProblem:
    dtype, kv_dtype = changes.pop("dtype", torch.bfloat16), changes.pop("kv_dtype", None)
    key, value = mla_kv_views(empty(5, page_size, dims[0], dtype=kv_dtype or dtype), dims[1])
    query = empty(60 * q_len, heads, dims[0], dtype=dtype)
    common = dict(query=query, q_offsets=None, max_q_len=q_len, batch=60, scratch=empty(1, dtype=torch.uint8))
    return paged(key, value, **(common | dict(family=Family.MLA) | changes))


@pytest.mark.parametrize("arch", BLACKWELL)
class TestResolve:
    def test_many_rows_have_a_shipped_kernel(self, arch: str) -> None:
        for dims, page_size in itertools.product(MLA_HEAD_DIMS, (1, 4, 8, 16, 32, 64, 128, 192)):
            found = resolve(problem(dims, page_size), arch)
            assert found == resolve_sm100_mla(problem(dims, page_size), arch)
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
        for dims, heads, own in itertools.product(SPARSE_MLA_HEAD_DIMS, (64, 65, 128), (True, False)):
            if own == (heads == 64):
                continue
            lists = dict(page_table=None, token_table=torch.zeros(120, 256, dtype=torch.int32))
            found = resolve(problem(dims, heads=heads, q_len=2, **lists), arch)
            assert isinstance(found, Sm100MlaConfig) == own
            assert found.kv_fetch is KvFetch.TOPK_ROWS
            assert not own or found in SHIPPED[arch]

    def test_rows_are_heads_times_new_tokens(self, arch: str) -> None:
        for heads, q_len, own in ((64, 1, False), (65, 1, True), (32, 2, False), (16, 5, True), (128, 4, True)):
            found = resolve(problem(heads=heads, q_len=q_len), arch)
            assert isinstance(found, Sm100MlaConfig if own else Sm120MlaConfig), (heads, q_len)

    def test_kernels_of_sm120_serve_few_rows(self, arch: str) -> None:
        few = problem(heads=64)
        with pytest.raises(NotImplementedError, match=f"no MLA decode kernel of CTA pairs for {arch} with 64 packed"):
            resolve_sm100_mla(few, arch)
        assert isinstance(resolve(few, arch), Sm120MlaConfig)

    def test_8bit_caches_are_copied_by_lanes(self, arch: str) -> None:
        found = resolve(problem(kv_dtype=FP8), arch)
        assert isinstance(found, Sm100MlaConfig)
        assert (found.kv_type, found.kv_fetch, found.dtype) == (KvType.E4M3, KvFetch.PAGE_ROWS, "bf16")
        assert found in SHIPPED[arch]

    def test_batch_invariant_results(self, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not resolve_sm100_mla(problem(), arch).batch_invariant
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


@pytest.mark.parametrize(("heads", "q_len", "row_tiles"), [(128, 1, 1), (65, 1, 1), (128, 3, 3), (100, 2, 2)])
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
    assert needed <= scratch_bytes(Family.MLA, "sm_100a", heads * q_len, 1, 512, of.max_kv_len, max(sms, 2))


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
        assert (config.columns.first("s"), config.columns.first("o"), config.columns.total) == (0, 64, 64 + v // 2)

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
