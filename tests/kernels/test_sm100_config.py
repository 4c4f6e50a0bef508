"""Blackwell's prefill kernels: selection, and the constraints of their tiles, registers and edges."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.cases.kernel_problems import CACHES, MASKS, SCORES, cache, contiguous, empty, paged
from helpers.covering.configs import covering_blackwell_configs

from hopwell.kernels.config.base import DTYPES, KvFetch, KvType, kv_fetch, rounded_up
from hopwell.kernels.config.prefill import resolve_prefill
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, WARPGROUP
from hopwell.kernels.parts.core import copy
from hopwell.kernels.problem import AttentionProblem, BlockScales, MaskKind, ScoreKind
from hopwell.kernels.registry import build, resolve, shipped_configs
from hopwell.kernels.sm100.common.resources import Columns, Role, RoleTable
from hopwell.kernels.sm100.prefill import config as sm100_config
from hopwell.kernels.sm100.prefill.config import PAIR_DIMS, Q_TILES, TILES, Sm100PrefillConfig
from hopwell.kernels.sm100.prefill.kernel import PrefillSm100
from hopwell.kernels.support import COMMON_HEAD_DIMS, NVFP4_HEAD_DIMS
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig
from hopwell.kernels.warp_mma.prefill.kernel import PrefillSm120

SHARED_BYTES = ARCHITECTURES["sm_90a"].shared_bytes

pytestmark = pytest.mark.traced

ARCHS = ("sm_100a", "sm_103a")
SHIPPED = {arch: [c for c in shipped_configs(arch) if isinstance(c, Sm100PrefillConfig)] for arch in ARCHS}
PAGE_SIZES = [1 << i for i in range(12)]
SINGLE_DIMS = [dims for dims in TILES if dims not in PAIR_DIMS]  # of kernels without pairs of CTAs


def config(dims: tuple[int, int] = (128, 128), arch: str = "sm_100a") -> Sm100PrefillConfig:
    return Sm100PrefillConfig(arch, "bf16", "bf16", *dims, MaskKind.CAUSAL, KvFetch.CONTIGUOUS, 0)


def resolve_own(problem: AttentionProblem, arch: str) -> Sm100PrefillConfig:
    """Return the tcgen05 kernel that serves a problem."""
    found = resolve_prefill(problem, arch, Sm100PrefillConfig)
    assert isinstance(found, Sm100PrefillConfig)
    return found


def _is_common(c: Sm100PrefillConfig) -> bool:
    return (c.head_dim_qk, c.head_dim_v) in COMMON_HEAD_DIMS


class TestShipped:
    def test_all_that_the_support_table_lists(self) -> None:
        assert set(TILES) == {*COMMON_HEAD_DIMS, *((d, d) for d in (32, 40, 48, 80, 96, 104, 160, 192, 256))}
        fetches = set(KvFetch) - {KvFetch.TOPK_ROWS}
        wanted = set(itertools.product(DTYPES.values(), TILES, MASKS, fetches))
        for arch, configs in SHIPPED.items():
            assert {(c.dtype, (c.head_dim_qk, c.head_dim_v), c.mask, c.kv_fetch) for c in configs} == wanted
            assert all(isinstance(c, Sm100PrefillConfig) and c.arch == arch for c in configs)

    def test_names_are_unique_among_all_archs(self) -> None:
        configs = [*shipped_configs(), *itertools.chain(*map(shipped_configs, ARCHS)), *shipped_configs("sm_120a")]
        assert len({c.name for c in configs}) == len(set(configs)) == len(configs)

    def test_covering_ones_stand_for_all(self) -> None:
        covering = covering_blackwell_configs()
        assert len(set(covering)) == len(covering)

        def pairs(configs: set[Sm100PrefillConfig]) -> set[tuple[int, int, KvFetch]]:
            return {(c.head_dim_qk, c.head_dim_v, c.kv_fetch) for c in configs}

        common, padded = ({c for c in covering if _is_common(c) == way} for way in (True, False))
        assert pairs(common) == pairs({c for c in SHIPPED["sm_100a"] if _is_common(c)})
        assert {c.kv_fetch for c in padded if not c.is_pair} == set(KvFetch) - {KvFetch.TOPK_ROWS}
        assert {c.kv_fetch for c in padded if c.is_pair} == set(KvFetch) - {KvFetch.TOPK_ROWS}
        assert {c.mask for c in padded if c.is_pair} == set(MASKS)
        served = set(ScoreKind)
        for dims, scores in (((64, 64), served - {ScoreKind.LARGE_SOFT_CAP}), ((128, 128), served)):
            here = [c for c in covering if (c.head_dim_qk, c.head_dim_v) == dims]
            assert {(c.mask, c.score, c.skip_softmax) for c in here} == {
                *((mask, ScoreKind.SCALED, False) for mask in MASKS),
                *((MaskKind.CAUSAL, score, False) for score in scores),
                (MaskKind.CAUSAL, ScoreKind.SCALED, True),
            }
        assert {c.dtype for c in covering} == set(DTYPES.values())


@pytest.mark.parametrize("arch", ARCHS)
class TestResolve:
    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_every_cache_has_a_shipped_kernel(self, dims: tuple[int, int], arch: str) -> None:
        shipped = set(SHIPPED[arch])
        for dtype, form, page_size in itertools.product(DTYPES, CACHES, PAGE_SIZES):
            found = resolve_own(paged(*cache(form, page_size, dims, dtype=dtype)), arch)
            assert found in shipped, (form, page_size)
            assert (found.dtype, found.head_dim_qk, found.head_dim_v) == (DTYPES[dtype], *dims)
        key, value = (empty(640, 2, dim).transpose(0, 1)[None] for dim in dims)
        assert resolve_own(contiguous(key, value), arch) == config(dims, arch) == resolve(contiguous(key, value), arch)

    def test_masks_and_scores(self, arch: str) -> None:
        """No feature changes a tile, so boxes stay too."""
        problem = paged(*cache("tuple-HND", 16, (128, 128)))
        plain = resolve_own(problem, arch)
        for mask, score, skip in itertools.product(MASKS, ScoreKind, (0.0, 500.0)):
            found = resolve_own(replace(problem, mask=MASKS[mask], score=SCORES[score], skip_softmax=skip), arch)
            assert found == replace(plain, mask=mask, score=score, skip_softmax=skip > 0)
            assert found.tile == plain.tile

    @pytest.mark.parametrize("dims", [(136, 136), (168, 168), (248, 248), (512, 512), (128, 64), (256, 128)], ids=str)
    def test_other_head_dims_are_refused(self, dims: tuple[int, int], arch: str) -> None:
        message = (
            rf"{dims[0]}/{dims[1]} have no kernel on {arch}; supported: 64/64, 128/128, 192/128, 32/32, .*, 120/120, "
            "224/224$"
        )
        with pytest.raises(NotImplementedError, match=message):
            resolve_own(paged(*cache("tuple-HND", 16, dims)), arch)

    @pytest.mark.parametrize("dims", [dims for dims in SINGLE_DIMS if dims[0] % 16 == 0], ids=str)  # rows for TMA
    def test_e4m3_caches_with_16_bit_queries(self, dims: tuple[int, int], arch: str) -> None:
        """They have the tiles of 16-bit caches, because K and V are dequantized in place."""
        key, value = cache("tuple-HND", 16, dims, dtype=torch.float8_e4m3fn)
        wide = paged(*cache("tuple-HND", 16, dims))
        problem = replace(wide, key=key, value=value)
        found = resolve_own(problem, arch)
        assert found == resolve(problem, arch)
        assert (found.dtype, found.kv_type, found.matrix_instruction) == ("bf16", KvType.E4M3, "tcgen05")
        assert found.tile == resolve_own(wide, arch).tile

    @pytest.mark.parametrize("dims", PAIR_DIMS, ids=str)
    def test_narrow_caches_have_no_pairs(self, dims: tuple[int, int], arch: str) -> None:
        """Pairs have no role that dequantizes, so kernels with mma.sync serve these caches."""
        key, value = cache("tuple-HND", 16, dims, dtype=torch.float8_e4m3fn)
        problem = replace(paged(*cache("tuple-HND", 16, dims)), key=key, value=value)
        message = f"dequantized K and V have no kernel of CTA pairs on {arch}: head dims {dims[0]}/{dims[1]}"
        with pytest.raises(NotImplementedError, match=message):
            resolve_own(problem, arch)
        found = resolve(problem, arch)
        assert isinstance(found, Sm120PrefillConfig)
        assert found.kv_type is KvType.E4M3

    @pytest.mark.parametrize("dims", PAIR_DIMS, ids=str)
    def test_pairs(self, dims: tuple[int, int], arch: str) -> None:
        found = resolve(paged(*cache("tuple-HND", 16, dims)), arch)
        assert found == resolve_own(paged(*cache("tuple-HND", 16, dims)), arch)
        assert (found.is_pair, found.cluster_ctas, found.q_tiles, found.tile.m) == (True, 2, 1, 256)
        assert not config((128, 128), arch).is_pair

    @pytest.mark.parametrize("dims", NVFP4_HEAD_DIMS, ids=str)
    def test_nvfp4_caches(self, dims: tuple[int, int], arch: str) -> None:
        wide = paged(*cache("tuple-HND", 16, dims))
        key, value = cache("tuple-HND", 16, (dims[0] // 2, dims[1] // 2), dtype=torch.uint8)
        scales = cache("tuple-HND", 16, (dims[0] // 16, dims[1] // 16), dtype=torch.float8_e4m3fn)
        problem = replace(wide, key=key, value=value, kv_scales=BlockScales(*scales, interleaves_v=True))
        found = resolve(problem, arch)
        assert found.kv_type is KvType.NVFP4
        assert isinstance(found, Sm100PrefillConfig) == (dims in SINGLE_DIMS)

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_e4m3(self, dims: tuple[int, int], arch: str) -> None:
        problem = paged(*cache("tuple-HND", 16, dims, dtype=torch.float8_e4m3fn))
        found = resolve_own(problem, arch)
        assert found == resolve(problem, arch)
        assert (found.dtype, found.out_dtype) == ("e4m3", "e4m3")
        assert (found.tile.n, found.tile.kv_stages) == (128, 2 if dims == (192, 128) else 4)
        assert found.matrix_instruction == "tcgen05 e4m3"

    def test_kernels_of_sm120_serve_the_rest(self, arch: str) -> None:
        plain = paged(*cache("tuple-HND", 16, (128, 128)))
        wide, narrow = (paged(*cache("tuple-HND", 16, dims)) for dims in ((512, 512), (136, 136)))
        fp8 = paged(*cache("tuple-HND", 16, (512, 512), dtype=torch.float8_e4m3fn))
        rest = [wide, narrow, fp8]
        for problem in rest:
            found = resolve(problem, arch)
            assert found == replace(resolve(problem, "sm_120a"), arch=arch)
            assert isinstance(build(found)[0], PrefillSm120)
        assert isinstance(build(resolve(plain, arch))[0], PrefillSm100)
        with pytest.raises(NotImplementedError, match=f"24/128 have no kernel on {arch}; supported: 64/64, .*512/512"):
            resolve(paged(*cache("tuple-HND", 16, (24, 128))), arch)
        # Shipped kernels include the head dims without a tensor-memory kernel.
        others = {(c.head_dim_qk, c.head_dim_v) for c in shipped_configs(arch) if isinstance(c, Sm120PrefillConfig)}
        assert others == set(Sm120PrefillConfig.tiles) - set(TILES)


class TestKvFetch:
    @pytest.mark.parametrize("dims", TILES, ids=str)
    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_pages(self, page_size: int, dims: tuple[int, int]) -> None:
        """Pages smaller than a swizzle atom are fetched row by row.

        Larger pages take the tallest boxes that divide a page and a tile.
        """
        fetch = kv_fetch(paged(*cache("tuple-HND", page_size, dims)), TILES[dims].n)
        boxes = [n for n in (8, 16, 32, 64) if page_size % n == 0 and TILES[dims].n % n == 0]
        assert fetch == ((KvFetch.PAGE_BOXES, max(boxes)) if boxes else (KvFetch.PAGE_ROWS, 0))
        assert (page_size in (1, 2, 4)) == (not boxes)


class TestResources:
    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_tensor_memory(self, dims: tuple[int, int]) -> None:
        """S comes first, then O: of both query tiles, or of one with two places for S. 512 columns at most."""
        c = config(dims)
        assert c.q_tiles == (1 if dims in PAIR_DIMS else 2)
        assert c.columns.first("s") == 0
        assert c.columns.first("o") == 2 * c.tile.n
        assert c.columns.total == c.columns.first("o") + c.q_tiles * c.output_columns <= 512
        assert c.output_columns >= c.head_dim_v

    def test_more_columns_than_there_are_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert config().columns.total == 512, "at the limit"
        monkeypatch.setitem(sm100_config._TILES, (128, 128), replace(TILES[128, 128], n=144))
        with pytest.raises(ValueError, match="the kernel needs 544 columns of tensor memory, 512 are there"):
            config()

    @pytest.mark.parametrize("kv_type", [KvType.WIDE, KvType.E4M3, KvType.NVFP4])
    @pytest.mark.parametrize("out", ["bf16", "e4m3", "nvfp4"])
    def test_registers_add_up(self, out: str, kv_type: KvType) -> None:
        """setmaxnreg takes multiples of 8 from 24 to 256, and can only redistribute the launch registers."""
        registers = replace(config(), out_dtype=out, kv_type=kv_type).registers
        launched = REGISTERS // (WARPGROUP * len(registers)) // 8 * 8
        assert sum(registers) == launched * len(registers)
        assert all(count % 8 == 0 and 24 <= count <= 256 for count in registers)
        assert min(registers[:4]) == max(registers[:4]) > launched > max(registers[4:])

    @pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
    @pytest.mark.parametrize("dims", PAIR_DIMS, ids=str)
    def test_resources_of_pairs(self, dims: tuple[int, int], dtype: str) -> None:
        """The launch has 512 threads. A CTA has a query tile, half of K's keys and half of V's columns."""
        c = replace(config(dims), dtype=dtype, out_dtype=dtype)
        assert len(c.registers) == 4
        assert sum(c.registers) * WARPGROUP == REGISTERS
        kernel, words = PrefillSm100(c), dims[0] // (2 if dtype == "e4m3" else 1)
        assert kernel.kv_rows == (64, 128)
        key, value = (rounded_up(count, 64) for count in (words, words // 2))  # whole swizzled rows of 16-bit words
        assert c.layout.columns == (key, value)
        tiles = 2 * (128 * key + c.tile.kv_stages * (64 * key + 128 * value))
        assert tiles < kernel.shared_bytes < tiles + 8192
        assert kernel.shared_bytes <= SHARED_BYTES

    def test_more_registers_than_there_are_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        softmax = Role(16, sm100_config.SOFTMAX_REGISTERS + 8)
        monkeypatch.setattr(sm100_config, "ROLES", RoleTable(sm100_config.ROLES.roles | {"softmax": softmax}))
        with pytest.raises(ValueError, match="65536 registers asked for, 61440 at launch: the kernel would hang"):
            config()

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_tiles_fit_the_instructions(self, dims: tuple[int, int]) -> None:
        tile = TILES[dims]
        assert tile.m == Q_TILES * 128, "an accumulator has a row in each lane of tensor memory"
        assert tile.q_stages == config(dims).q_tiles
        columns, depth = config(dims).output_columns, config(dims).layout.depth[0]
        assert all(n % 16 == 0 and n <= 256 for n in (tile.n, columns)), "tcgen05.mma with 128 rows"
        assert depth % 16 == tile.n % 16 == 0, "16 elements are reduced at a time"
        assert config(dims).half_keys % 16 == columns % 16 == 0, "tensor memory is accessed 16 columns at a time"
        # A thread has half of the keys. The early part of P is multiplied first; a late part remains.
        assert 0 < config(dims).early_keys < config(dims).half_keys
        assert config(dims).early_keys % 16 == config(dims).half_keys % 16 == 0
        for row in (columns * copy.SWIZZLE_ROW_BYTES for columns in (128, tile.n)):
            assert row % copy.SWIZZLE_ATOM_BYTES == 0, "column blocks start where the swizzle does"


class TestRoleTable:
    TABLE = RoleTable(dict(softmax=Role(4, 200), mma=Role(1, 48), load=Role(3, 48)))

    def test_warps_follow_one_another(self) -> None:
        assert [self.TABLE.first(name) for name in self.TABLE.roles] == [0, 4, 5]
        assert [self.TABLE.end(name) for name in self.TABLE.roles] == [4, 5, 8]
        assert self.TABLE.registers == (200, 48)

    def test_warpgroups_are_whole_and_have_one_register_count(self) -> None:
        with pytest.raises(ValueError, match="do not fill whole warpgroups"):
            RoleTable(dict(softmax=Role(4, 200), mma=Role(1, 48)))
        with pytest.raises(ValueError, match=r"a warpgroup has roles with \[48, 64\] registers; setmaxnreg takes one"):
            RoleTable(dict(mma=Role(1, 48), load=Role(3, 64)))


def test_columns_follow_one_another() -> None:
    columns = Columns(dict(s=256, o=200))
    assert (columns.first("s"), columns.first("o"), columns.total) == (0, 256, 456)
    fits, reason = Columns(dict(s=256, o=257)).constraint
    assert not fits
    assert reason == "the kernel needs 513 columns of tensor memory, 512 are there"
