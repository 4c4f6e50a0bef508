"""Kernel selection for each problem, and the constraints of every shipped kernel's tile sizes and registers."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import fields, replace

import pytest
import torch
from helpers.cases.kernel_problems import CACHES, MASKS, SCORES, cache, contiguous, empty, paged
from helpers.covering.configs import MAIN_DIMS, covering_configs, every_tile, stands_for_masks, with_features

from hopwell.kernels.config.base import (
    DTYPES,
    MAX_BOX_ROWS,
    MIN_BOX_ROWS,
    WORK_STAGES,
    KvFetch,
    KvType,
)
from hopwell.kernels.config.prefill import SHORT_STEP, SHORT_WINDOW, TILES, PrefillConfig, packed_shape
from hopwell.kernels.hardware import REGISTERS, WARPGROUP
from hopwell.kernels.problem import (
    LogSumExp,
    LseLayout,
    Mask,
    MaskKind,
    Score,
    ScoreKind,
)
from hopwell.kernels.registry import resolve, shipped_configs
from hopwell.kernels.support import COMMON_HEAD_DIMS, REGISTER_HEAD_DIMS

ARCH = "sm_90a"
HEAD_DIMS = (*COMMON_HEAD_DIMS, *REGISTER_HEAD_DIMS)
SHIPPED = list(shipped_configs())
COVERING = covering_configs()
PAGE_SIZES = [1 << i for i in range(12)]
ANY = SHIPPED[0]


def any_config(dims: tuple[int, int]) -> PrefillConfig:
    return next(config for config in SHIPPED if (config.head_dim_qk, config.head_dim_v) == dims)


class TestShipped:
    def test_names_are_unique_and_fit_for_files_and_c(self) -> None:
        names = [config.name for config in SHIPPED]
        assert len(set(names)) == len(set(SHIPPED)) == len(names)
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
        assert len(set(map(str.lower, names))) == len(names)
        assert all(len(name) < 100 for name in names)

    def test_every_field_is_in_the_name(self) -> None:
        """The name is the key of the compiled kernel: two configs that differ must not share it."""
        others = dict(
            arch="sm_100a",
            dtype="fp16",
            out_dtype="fp16",
            head_dim_qk=192,
            head_dim_v=64,
            mask=MaskKind.CAUSAL,
            kv_fetch=KvFetch.PAGE_ROWS,
            box_rows=16,
            compiled_for="sm_100a",
            score=ScoreKind.ALIBI,
            skip_softmax=True,
            short_steps=True,
            packs_heads=True,
            kv_type=KvType.E4M3,
            dequantizes_q=True,
            linear_v_scales=True,
            uneven_pages=True,
            k_head_scales=True,
            v_head_scales=True,
        )
        base = PrefillConfig(ARCH, "bf16", "bf16", 128, 128, MaskKind.FULL, KvFetch.PAGE_BOXES, 8)
        assert set(others) == {f.name for f in fields(PrefillConfig)}
        for field, value in others.items():
            # The test does not construct these configs, because a change of one field may not give a valid config.
            changed = object.__new__(PrefillConfig)
            changed.__dict__.update(base.__dict__ | {field: value})
            assert changed.name != base.name, field

    def test_names_are_unique_with_everything_that_can_be_asked_for(self) -> None:
        """On-demand kernels have names of their own: other scores, skip-softmax, the other dtype as output."""
        asked = [
            replace(config, out_dtype=out)
            for plain, out in itertools.product(SHIPPED, DTYPES.values())
            for config in with_features(plain)
        ]
        names = [config.name for config in asked]
        assert len(set(names)) == len(set(asked)) == len(names)
        assert {(c.score, c.skip_softmax) for c in asked} == set(itertools.product(ScoreKind, (False, True)))
        assert len({(c.short_steps, c.packs_heads) for c in asked}) == 4
        assert all(re.fullmatch(r"[a-z][a-z0-9_]{1,98}", name) for name in names)

    def test_names(self) -> None:
        """Default parts are left out, so names of plain kernels do not change."""
        plain = PrefillConfig(ARCH, "bf16", "bf16", 192, 128, MaskKind.CHUNKED, KvFetch.PAGE_BOXES, 16)
        assert plain.name == "prefill_sm_90a_bf16_d192_128_chunked_pages16"
        other = replace(plain, out_dtype="fp16", score=ScoreKind.SOFT_CAP, skip_softmax=True)
        assert other.name == "prefill_sm_90a_bf16_to_fp16_d192_128_chunked_soft_cap_skip_softmax_pages16"

    def test_all_that_the_support_table_lists(self) -> None:
        assert set(TILES) == set(HEAD_DIMS)
        combinations = {(c.dtype, (c.head_dim_qk, c.head_dim_v), c.mask, c.kv_fetch) for c in SHIPPED}
        fetches = set(KvFetch) - {KvFetch.TOPK_ROWS}
        assert combinations == set(itertools.product(DTYPES.values(), HEAD_DIMS, MASKS, fetches))
        assert all(c.arch == ARCH and c.out_dtype == c.dtype for c in SHIPPED)
        assert all(c.score is ScoreKind.SCALED and not c.skip_softmax for c in SHIPPED)

    def test_every_box_that_divides_a_page_and_a_tile(self) -> None:
        for dims, tile in TILES.items():
            rows = {c.box_rows for c in SHIPPED if (c.head_dim_qk, c.head_dim_v) == dims} - {0}
            assert rows == {n for n in PAGE_SIZES if MIN_BOX_ROWS <= n <= MAX_BOX_ROWS and tile.n % n == 0}

    def test_other_archs_have_none(self) -> None:
        assert list(shipped_configs("sm_89")) == []


class TestCovering:
    """The kernels compiled in tests stand for all others: no shipped choice is missing."""

    def test_every_choice_is_there(self) -> None:
        for field in fields(PrefillConfig):
            every = {getattr(config, field.name) for config in SHIPPED}
            every |= {"score": set(ScoreKind), "skip_softmax": {False, True}}.get(field.name, set())
            assert {getattr(config, field.name) for config in COVERING} == every, field.name

    def test_every_tile_in_every_way_to_fetch(self) -> None:
        def pairs(configs: list[PrefillConfig]) -> set[tuple[tuple[int, int], KvFetch]]:
            return {((c.head_dim_qk, c.head_dim_v), c.kv_fetch) for c in configs}

        assert pairs(COVERING) == pairs(SHIPPED)

    @pytest.mark.parametrize("dims", MAIN_DIMS, ids=str)
    def test_main_head_dims(self, dims: tuple[int, int]) -> None:
        """Coverage has all masks except chunks with nearly every fetch, all scores, skip-softmax, and every performance
        choice.
        """

        def of_dims(configs: list[PrefillConfig]) -> set[PrefillConfig]:
            return {c for c in configs if (c.head_dim_qk, c.head_dim_v) == dims and c.dtype == "bf16"}

        def plain(configs: set[PrefillConfig]) -> set[PrefillConfig]:
            return {c for c in configs if not (c.short_steps or c.packs_heads or c.score is not ScoreKind.SCALED)}

        here, shipped = of_dims(COVERING), of_dims(SHIPPED)
        assert plain(here) & shipped >= {
            c
            for c in plain(shipped)
            if c.mask is not MaskKind.CHUNKED and stands_for_masks(dims, c.mask, (c.kv_fetch, c.box_rows))
        }
        assert {(c.mask, c.score, c.skip_softmax) for c in here} >= {
            *((mask, ScoreKind.SCALED, False) for mask in MASKS),
            *((MaskKind.CAUSAL, score, False) for score in ScoreKind),
            (MaskKind.CAUSAL, ScoreKind.SCALED, True),
        }
        choices = {(c.short_steps, c.packs_heads) for c in shipped}
        assert {(c.short_steps, c.packs_heads) for c in here} >= choices - {(True, True)}
        if dims in ((64, 64), (128, 128)):
            assert {(c.short_steps, c.packs_heads) for c in here} == choices
            assert {c.kv_fetch for c in here if c.packs_heads} == {c.kv_fetch for c in shipped}

    def test_there_are_few(self) -> None:
        """Each kernel takes seconds."""
        assert len(set(COVERING)) == len(COVERING) < 180


class TestResources:
    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_registers_can_be_handed_out(self, dims: tuple[int, int]) -> None:
        """setmaxnreg takes multiples of 8 from 24 to 256. Producers release registers and consumers take them; the sum
        must fit.
        """
        assert any_config(dims).consumer_warpgroups == TILES[dims].m // 64 * (2 if TILES[dims].splits_v else 1)
        for tile in every_tile(dims):
            groups = tile.m // 64 * (2 if tile.splits_v else 1)
            at_launch = REGISTERS // (WARPGROUP * (groups + 1)) // 8 * 8
            for registers in (tile.producer_registers, tile.consumer_registers):
                assert registers % 8 == 0
                assert 24 <= registers <= 256
            assert tile.producer_registers <= at_launch <= tile.consumer_registers
            assert tile.producer_registers + groups * tile.consumer_registers <= at_launch * (groups + 1)

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_tiles_fit_the_instructions(self, dims: tuple[int, int]) -> None:
        _, depth_v = any_config(dims).layout.depth
        assert all(dim % 8 == 0 for dim in dims), "rows are copied and stored in pieces of 8 columns"
        for tile in every_tile(dims):
            assert tile.m % 64 == 0, "wgmma has 64 rows"
            assert tile.n % 16 == 0, "P V takes 16 keys at a time"
            assert max(tile.n, depth_v) <= 256, "wgmma has at most 256 columns"
            assert max(tile.m, tile.n) <= 256, "a TMA box has at most 256 rows"
            for stages in (tile.q_stages, tile.kv_stages, WORK_STAGES):
                assert stages & (stages - 1) == 0

    @pytest.mark.parametrize(("score", "skip"), [*itertools.product(ScoreKind, (False, True))])
    def test_features_that_need_registers_have_smaller_steps(self, score: ScoreKind, skip: bool) -> None:
        """Only tiles of three warpgroups, which have the fewest registers, get smaller steps; all else about a tile
        stays.
        """
        for dims, tile in TILES.items():
            smaller = max(dims) <= 64 and (score.caps or skip)
            want = replace(tile, n=96) if smaller else tile
            assert PrefillConfig.tile_of(dims, score, skip) == want
            config = replace(any_config(dims), score=score, skip_softmax=skip)
            assert config.tile == want

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_columns(self, dims: tuple[int, int]) -> None:
        """Shared memory has whole column blocks of 64; instructions multiply the minimum of columns
        that they support.
        """
        config = any_config(dims)
        assert config.layout.columns == tuple(64 * math.ceil(dim / 64) for dim in dims)
        depth_qk, depth_v = config.layout.depth
        assert depth_qk == 16 * math.ceil(dims[0] / 16), "Q K^T takes 16 columns at a time"
        # P V takes all columns at once: of a single block a part, of several the whole.
        whole = 64 * math.ceil(dims[1] / 64) if dims[1] > 64 else 16 * math.ceil(dims[1] / 16)
        assert depth_v == whole // (2 if config.tile.splits_v else 1)

    @pytest.mark.parametrize(
        ("dims", "columns", "depth"),
        [
            ((32, 32), (64, 64), (32, 32)),
            ((40, 40), (64, 64), (48, 48)),
            ((64, 64), (64, 64), (64, 64)),
            ((80, 80), (128, 128), (80, 128)),
            ((104, 104), (128, 128), (112, 128)),
            ((160, 160), (192, 192), (160, 192)),
            ((192, 128), (192, 128), (192, 128)),
        ],
        ids=str,
    )
    def test_columns_by_hand(self, dims: tuple[int, int], columns: tuple[int, int], depth: tuple[int, int]) -> None:
        layout = any_config(dims).layout
        assert (layout.columns, layout.depth) == (columns, depth)

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_consumers_have_registers_for_their_tiles(self, dims: tuple[int, int]) -> None:
        """S, O and P are held at once, a 128th of each in a thread, and cannot be moved elsewhere."""
        config = any_config(dims)
        tile, (_, depth_v) = config.tile, config.layout.depth
        assert 64 * (tile.n + depth_v + tile.n // 2) // WARPGROUP < tile.consumer_registers

    def test_boxes_fit_tiles_and_swizzle(self) -> None:
        for config in SHIPPED:
            if config.box_rows:
                assert config.tile.n % config.box_rows == 0
                assert config.box_rows % 8 == 0, "a box of all columns holds whole swizzle atoms of 8 rows"
                assert MIN_BOX_ROWS <= config.box_rows <= MAX_BOX_ROWS
                assert config.tile.n // config.box_rows <= 32, "each box is located by a lane of its own"

    @pytest.mark.parametrize("field", ["producer_registers", "consumer_registers"])
    def test_more_registers_than_there_are_is_refused(self, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """At the limit, a config can be made; one step of 8 above it cannot."""
        tile = TILES[128, 128]
        spare = 168 * 3 - tile.producer_registers - 2 * tile.consumer_registers
        assert spare == 0, "no registers are left unused"
        monkeypatch.setitem(TILES, (128, 128), replace(tile, **{field: getattr(tile, field) + 8}))
        with pytest.raises(ValueError, match=r"_d128_causal_contiguous: \d+ registers asked .* the kernel would hang"):
            PrefillConfig(ARCH, "bf16", "bf16", 128, 128, MaskKind.CAUSAL, KvFetch.CONTIGUOUS, 0)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (dict(m=96), "96 rows of a tile must be a multiple of 64, at most 256"),
            (dict(m=320), "320 rows of a tile must be a multiple of 64, at most 256"),
            (dict(n=120), "120 keys of a step must be a multiple of 16, at most 256"),
            (dict(n=272), "272 keys of a step must be a multiple of 16, at most 256"),
            (dict(q_stages=3), r"numbers of stages \(3, 2, 2, 2\) must be powers of two"),
            (dict(kv_stages=0), r"numbers of stages \(2, 0, 0, 0\) must be powers of two"),
            (
                dict(producer_registers=36),
                r"registers of a thread \(36, 232, 232\) must be multiples of 8 from 24 to 256",
            ),
            (
                dict(consumer_registers=16),
                r"registers of a thread \(40, 16, 16\) must be multiples of 8 from 24 to 256",
            ),
        ],
    )
    def test_a_tile_that_no_kernel_can_have_is_refused(
        self, change: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(TILES, (128, 128), replace(TILES[128, 128], **change))
        with pytest.raises(ValueError, match=f"prefill_sm_90a_bf16_d128_causal_contiguous: {message}"):
            PrefillConfig(ARCH, "bf16", "bf16", 128, 128, MaskKind.CAUSAL, KvFetch.CONTIGUOUS, 0)

    def test_a_product_wider_than_an_instruction_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One warpgroup has all 512 columns of V if two do not share the rows."""
        monkeypatch.setitem(TILES, (512, 512), replace(TILES[512, 512], splits_v=False))
        with pytest.raises(ValueError, match="a warpgroup has 512 columns of V, at most 256 fit an instruction"):
            PrefillConfig(ARCH, "bf16", "bf16", 512, 512, MaskKind.CAUSAL, KvFetch.CONTIGUOUS, 0)

    @pytest.mark.parametrize(
        ("fetch", "rows"),
        [
            (KvFetch.PAGE_BOXES, 0),
            (KvFetch.PAGE_BOXES, 48),  # does not divide 128 keys
            (KvFetch.PAGE_BOXES, 256),
            (KvFetch.PAGE_ROWS, 8),
            (KvFetch.CONTIGUOUS, 64),
        ],
    )
    def test_boxes_that_do_not_go_with_the_tile_are_refused(self, fetch: KvFetch, rows: int) -> None:
        with pytest.raises(ValueError, match=f"box_rows={rows} does not go with 128 keys a step"):
            PrefillConfig(ARCH, "bf16", "bf16", 128, 128, MaskKind.CAUSAL, fetch, rows)


class TestResolve:
    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_every_cache_has_a_shipped_kernel(self, dims: tuple[int, int]) -> None:
        shipped = set(SHIPPED)
        for dtype, form, page_size in itertools.product(DTYPES, CACHES, PAGE_SIZES):
            for heads, pages in itertools.product((1, 2, 5), (1, 7)):
                config = resolve(paged(*cache(form, page_size, dims, pages=pages, heads=heads, dtype=dtype)), ARCH)
                assert config in shipped, (form, page_size)
                assert (config.dtype, config.out_dtype) == (DTYPES[dtype], DTYPES[dtype])
                assert (config.head_dim_qk, config.head_dim_v) == dims

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_contiguous_keys_have_a_shipped_kernel(self, dims: tuple[int, int]) -> None:
        for dtype, heads, tokens in itertools.product(DTYPES, (1, 4), (1, 1000)):
            key, value = (empty(tokens, heads, dim, dtype=dtype).transpose(0, 1)[None] for dim in dims)
            config = resolve(contiguous(key, value), ARCH)
            assert config in SHIPPED
            assert config.kv_fetch is KvFetch.CONTIGUOUS
            assert (config.dtype, config.head_dim_qk, config.head_dim_v) == (DTYPES[dtype], *dims)

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_masks_and_scores(self, dims: tuple[int, int]) -> None:
        """The kernel has the requested mask and score; only boxes follow the tile."""
        shipped = set(SHIPPED)
        key, value = (empty(40, 2, dim).transpose(0, 1)[None] for dim in dims)
        for problem in (
            contiguous(key, value),
            *(paged(*cache("tuple-HND", page_size, dims)) for page_size in (1, 8, 64)),
        ):
            plain = resolve(problem, ARCH)
            for mask, score, skip in itertools.product(MASKS, ScoreKind, (0.0, 1e-30, 500.0)):
                changes = dict(mask=MASKS[mask], score=SCORES[score], skip_softmax=skip)
                config = resolve(replace(problem, **changes), ARCH)
                rows = math.gcd(plain.box_rows, config.tile.n) if plain.box_rows else 0
                kind = dict(mask=mask, score=score, skip_softmax=skip > 0, box_rows=rows)
                assert config == replace(plain, **kind, short_steps=config.short_steps)
                assert (config in shipped) == (score is ScoreKind.SCALED and skip == 0)

    def test_run_time_facts_do_not_make_other_kernels(self) -> None:
        """The number of queries and the size of a window do make other kernels: see TestChoices."""
        views = cache("tuple-HND", 16, (128, 128))
        problem = paged(*views)
        want = resolve(problem, ARCH)
        changes = dict(
            batch=1,
            max_q_len=9000,
            max_kv_len=1,
            softmax_scale=empty(1, dtype=torch.float32),
            output_scale=2.0,
            sinks=empty(4, dtype=torch.float32),
            programmatic_launch=True,
            q_lens=empty(3, dtype=torch.int32),
            query=empty(9000, 2, 128),
            out=empty(600, 4, 128),
            lse=LogSumExp(empty(600, 4, dtype=torch.float32), LseLayout.RAGGED, natural=True),
            statistics=empty(600, 4, 2, dtype=torch.float32),
            skipped_tiles=empty(1, dtype=torch.int32),
        )
        for field, value in changes.items():
            assert resolve(replace(problem, **{field: value}), ARCH) == want, field
        small, large = (replace(problem, mask=Mask(MaskKind.CHUNKED, chunk=chunk)) for chunk in (1, 8192))
        assert resolve(small, ARCH) == resolve(large, ARCH) != want
        low, high = (replace(problem, score=Score(ScoreKind.SOFT_CAP, cap)) for cap in (0.5, 50.0))
        assert resolve(low, ARCH) == resolve(high, ARCH) != want
        little, much = (replace(problem, skip_softmax=factor) for factor in (1e-30, 1e6))
        assert resolve(little, ARCH) == resolve(much, ARCH) != want

    def test_output_of_the_other_dtype(self) -> None:
        problem = paged(*cache("tuple-HND", 16, (128, 128)), out=empty(600, 4, 128, dtype=torch.float16))
        config = resolve(problem, ARCH)
        assert (config.dtype, config.out_dtype) == ("bf16", "fp16")
        assert config.name == "prefill_sm_90a_bf16_to_fp16_d128_causal_pages16"


class TestChoices:
    """Performance choices without a request: shapes and window sizes decide."""

    @staticmethod
    def of(tokens: int, group: int = 4, dims: tuple[int, int] = (128, 128), **changes: object) -> PrefillConfig:
        """Return the config for 3 requests."""
        problem = paged(*cache("tuple-HND", 16, dims))
        return resolve(replace(problem, query=empty(tokens, 2 * group, dims[0]), **changes), ARCH)

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_heads_are_packed_where_tiles_would_be_half_empty(self, dims: tuple[int, int]) -> None:
        """Two requests with the rows of one tile leave half of the rows of their tiles empty on average."""
        m = min(TILES[dims].m, 128)
        for tokens, packed in ((0, True), (1, True), (3 * m // 2, True), (3 * m // 2 + 1, False), (9000, False)):
            config = self.of(tokens, dims=dims)
            assert config.packs_heads == packed, tokens
            if packed:
                assert (config.tile.m, config.tile.n) == (m, TILES[dims].n)

    @pytest.mark.parametrize(
        ("group", "tokens", "shape"),
        [
            (1, 3, (1, 128)),
            (2, 3, (2, 64)),
            (3, 3, (3, 40)),  # 8 rows left over
            (7, 3, (7, 16)),
            (8, 192, (8, 16)),
            (9, 24, (9, 8)),
            (9, 120, (3, 40)),  # 3 tiles instead of 5 for all nine
            (32, 3, (16, 8)),
            (37, 3, (1, 128)),  # a prime number of heads can share tiles only as a whole
        ],
    )
    def test_shapes_by_hand(self, group: int, tokens: int, shape: tuple[int, int]) -> None:
        """Each head has whole swizzle atoms of 8 rows, and all heads of a tile belong to one KV head. A lone head is
        not packed.
        """
        problem = paged(*cache("tuple-HND", 16, (128, 128)))
        assert packed_shape(replace(problem, query=empty(tokens, 2 * group, 128)), 128) == shape
        assert self.of(tokens, group).packs_heads == (shape[0] > 1)

    def test_scores_and_skip_softmax(self) -> None:
        """A tile has one slope. Key tiles are left out for 64 queries at a time, for any batch."""
        packed = {kind: self.of(3, score=score).packs_heads for kind, score in SCORES.items()}
        assert packed == {score: not score.has_slopes for score in ScoreKind}
        window = Mask(MaskKind.SLIDING_WINDOW, 5)
        skipping = self.of(3, skip_softmax=1e-30, mask=window)
        assert not skipping.packs_heads
        assert not skipping.short_steps

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_small_windows_have_short_steps(self, dims: tuple[int, int]) -> None:
        for left in (0, 1, 127, SHORT_WINDOW - 2, SHORT_WINDOW - 1, SHORT_WINDOW, 4096):
            for score in SCORES.values():
                config = self.of(9000, dims=dims, score=score, mask=Mask(MaskKind.SLIDING_WINDOW, left))
                assert config.short_steps == (left < SHORT_WINDOW and TILES[dims].n == 128)
                assert config.tile.n == SHORT_STEP or not config.short_steps

    def test_other_masks_do_not(self) -> None:
        for mask in set(MASKS) - {MaskKind.SLIDING_WINDOW}:
            assert not self.of(9000, mask=MASKS[mask]).short_steps

    def test_bits_do_not_go_by_the_number_of_queries(self) -> None:
        """Steps decide the order of sums, and so must not depend on the rest of the batch."""
        for dims, mask, score in itertools.product(TILES, MASKS, SCORES.values()):
            few, many = (self.of(tokens, dims=dims, mask=MASKS[mask], score=score) for tokens in (3, 9000))
            assert few.tile.n == many.tile.n
            assert few.tile.splits_v == many.tile.splits_v
            assert replace(few, packs_heads=False) == many


def test_a_config_is_a_key() -> None:
    """Configs are compared and hashed by value: plans and compiled kernels are kept under them."""
    again = replace(ANY)
    assert again == ANY
    assert hash(again) == hash(ANY)
    with pytest.raises(AttributeError):
        again.dtype = "fp16"  # type: ignore[misc]


def test_choosing_a_kernel_reads_no_data() -> None:
    """Reading lengths or tables would wait for the device; tensors without memory have nothing to read."""
    problem = paged(*cache("stacked-NHD", 16, (128, 128)))
    assert problem.key.is_meta
    assert problem.page_table is not None
    assert problem.page_table.key.is_meta
    assert isinstance(resolve(problem, ARCH), PrefillConfig)
