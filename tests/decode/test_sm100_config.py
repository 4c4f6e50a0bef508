"""tcgen05 decode of Blackwell: selection, shipped kernels, scratch, and the constraints of tiles and edges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases.kernel_problems import CACHES, cache, empty, paged
from helpers.covering.configs import PAGES16
from helpers.covering.sm100_decode import COVERING_SM100_DECODE, page_size

from hopwell.kernels.config import splitting
from hopwell.kernels.config.base import DTYPES, KvFetch, KvType, paged_fetches
from hopwell.kernels.config.decode import DRAFT_MASKS, HEAD_DIMS, KV_TYPES, MASKS, resolve_decode
from hopwell.kernels.config.splitting import LEAF_TILE, LaunchSizes, node_bytes, tree_rows
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, WARPGROUP, WARPS
from hopwell.kernels.launch.geometry import decode_geometry
from hopwell.kernels.problem import AttentionProblem, DcpRank, Family, Mask, MaskKind, TokenOffsets
from hopwell.kernels.registry import build, resolve, scratch_bytes, shipped_configs
from hopwell.kernels.sm90.decode.swap_ab import SwapABDecodeSm90
from hopwell.kernels.sm100.common.leaves import TensorProducts
from hopwell.kernels.sm100.common.resources import TENSOR_MEMORY_COLUMNS
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig
from hopwell.kernels.support import BLACKWELL, DECODE_NVFP4_HEAD_DIMS
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig

pytestmark = pytest.mark.traced

SHIPPED = {
    arch: [c for c in shipped_configs(arch, Family.DECODE) if isinstance(c, Sm100DecodeConfig)] for arch in BLACKWELL
}
COMPILED_DIMS = (64, 128, 256)  # ahead of time; 512 columns have no tree
SHARED = ("tile", "leaf_tokens", "smem_levels", "accumulated_levels", "consumer_warpgroups", "registers", "ctas_per_sm")
TREE_DIMS = [dims for dims in HEAD_DIMS if tree_rows(dims[0])]


def problem(
    dims: int | tuple[int, int] = 128, rows: int = 8, page_size: int = 16, form: str = "tuple-HND", **changes: Any
) -> AttentionProblem:
    """Return a problem of three requests with ``rows`` query heads of each of two KV heads."""
    dims, dtype = dims if isinstance(dims, tuple) else (dims, dims), changes.pop("dtype", torch.bfloat16)
    query_dtype = dtype if dtype in DTYPES else torch.bfloat16
    given = dict(query=empty(60, 2 * rows, dims[0], dtype=query_dtype), max_q_len=1, q_offsets=None)
    given |= dict(mask=Mask(MaskKind.FULL), family=Family.DECODE, scratch=empty(1, dtype=torch.uint8))
    return paged(*cache(form, page_size, dims, dtype=dtype), **given | changes)


def most_rows(dims: tuple[int, int]) -> int:
    return max(tree_rows(dims[0]))


@pytest.mark.parametrize("arch", BLACKWELL)
class TestResolve:
    @pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
    def test_16_bit_caches_up_to_the_most_rows(self, dims: tuple[int, int], arch: str) -> None:
        """Tiles have up to 64 packed rows, or 16 beyond head dim 128. mma.sync serves head dim 512."""
        most = 64 if dims[0] <= 128 else 16
        for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128):
            found = resolve(problem(dims, rows), arch)
            assert type(found) is (Sm100DecodeConfig if dims[0] <= 256 else Sm120DecodeConfig), rows
            if dims[0] <= 256:
                assert found.rows == min((m for m in (8, 16, 32, 64) if m >= rows and m <= most), default=most)
                assert found.matrix_instruction == "tcgen05"
            else:
                assert found.matrix_instruction == "mma.sync"

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
    @pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
    def test_8_bit_caches(self, dims: tuple[int, int], dtype: torch.dtype, arch: str) -> None:
        """Tiles have up to 64 packed rows to head dim 128, and 8 beyond."""
        most = 64 if dims[0] <= 128 else 8
        for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65):
            found = resolve(problem(dims, rows, dtype=dtype), arch)
            assert type(found) is (Sm100DecodeConfig if dims[0] <= 256 else Sm120DecodeConfig), rows
            if dims[0] <= 256:
                assert found.rows == min((m for m in (8, 16, 32, 64) if m >= rows and m <= most), default=most)
                assert (found.matrix_instruction, found.dtype) == ("tcgen05", "bf16")

    @pytest.mark.parametrize("dims", DECODE_NVFP4_HEAD_DIMS, ids=str)
    def test_nvfp4_caches(self, dims: tuple[int, int], arch: str) -> None:
        """Tiles have up to 64 packed rows, or 8 beyond head dim 128."""
        most = max(Sm100DecodeConfig.tiles_with_tree(dims[0], KvType.NVFP4))
        assert most == (64 if dims[0] <= 128 else 8)
        key, value = cache("tuple-HND", 16, (dims[0] // 2, dims[1] // 2), dtype=torch.uint8)
        for rows in (1, 8, 9, 16, 17, 33, 64, 65):
            of = replace(problem(dims, rows), key=key, value=value, kv_scales=(key, value))
            found = resolve(of, arch)
            assert type(found) is Sm100DecodeConfig, rows
            assert (found.kv_type, found.rows <= most) == (KvType.NVFP4, True)

    def test_outputs_and_scales_of_8_bit_caches(self, arch: str) -> None:
        one, two = (empty(count, dtype=torch.float32) for count in (1, 2))
        out = empty(60, 16, 128, dtype=torch.float8_e4m3fn)
        for k_scale, v_scale in itertools.product((one, two), repeat=2):
            given = dict(dtype=torch.float8_e4m3fn, out=out, softmax_scale=k_scale, output_scale=v_scale)
            found = resolve(problem(**given), arch)
            assert isinstance(found, Sm100DecodeConfig)
            assert (found.out_dtype, found.k_head_scales, found.v_head_scales) == (
                "e4m3",
                k_scale is two,
                v_scale is two,
            )

    def test_rows_are_heads_times_new_tokens(self, arch: str) -> None:
        for heads, q_len, rows in ((4, 2, 8), (4, 3, 16), (4, 16, 64), (4, 17, 64), (1, 32, 32), (8, 9, 64)):
            draft = dict(max_q_len=q_len, mask=Mask(MaskKind.DRAFT))
            assert resolve(problem(rows=heads, **draft), arch).rows == rows, (heads, q_len)

    @pytest.mark.parametrize("dim", COMPILED_DIMS)
    def test_every_cache_has_a_shipped_kernel(self, dim: int, arch: str) -> None:
        shipped, sizes = set(SHIPPED[arch]), [1 << i for i in range(12)]
        for dtype, form, size, mask in itertools.product(DTYPES, CACHES, sizes, MASKS):
            for rows in tree_rows(dim):
                q_len = 2 if mask in DRAFT_MASKS else 1
                given = dict(dtype=dtype, mask=Mask(mask), max_q_len=q_len)
                found = resolve(problem(dim, rows // q_len, size, form, **given), arch)
                assert found in shipped, (form, size, rows)
                assert (found.dtype, found.head_dim_qk, found.mask, found.rows) == (DTYPES[dtype], dim, mask, rows)
                assert (found.kv_fetch is KvFetch.PAGE_ROWS) == (size < 8)
                assert found.box_rows == (0 if size < 8 else min(size, 64))

    def test_ragged_drafts_have_short_leaves_up_to_32_rows(self, arch: str) -> None:
        """Their leaves are as long as with 8 rows, so bits do not depend on the bound of new tokens."""
        offsets = TokenOffsets(empty(4, dtype=torch.int32))
        for dim, rows in itertools.product(COMPILED_DIMS, (8, 16, 32, 64)):
            if rows not in tree_rows(dim):
                continue
            ragged = dict(max_q_len=8, mask=Mask(MaskKind.DRAFT), q_offsets=offsets)
            found = resolve(problem(dim, rows // 8, **ragged), arch)
            assert isinstance(found, Sm100DecodeConfig)
            assert found.short_leaves == (rows == 32)
            assert found.accumulated_levels == (2 if rows == 64 else 0)
            if rows <= 32:
                assert found.leaf_tokens == resolve(problem(dim, 1), arch).leaf_tokens

    def test_masks(self, arch: str) -> None:
        rank = DcpRank(2, 1, empty(3, dtype=torch.int32))
        for mask, more in ((MaskKind.CYCLIC, dict(dcp_rank=rank)), (MaskKind.SLIDING_WINDOW, {}), (MaskKind.DRAFT, {})):
            found = resolve(
                problem(mask=Mask(mask, 7) if mask is MaskKind.SLIDING_WINDOW else Mask(mask), **more), arch
            )
            assert (type(found), found.mask) == (Sm100DecodeConfig, mask)
        with pytest.raises(NotImplementedError, match=f"the mask causal has no decode kernel on {arch}"):
            resolve(problem(mask=Mask(MaskKind.CAUSAL)), arch)

    @pytest.mark.parametrize("size", [24, 1040, 3, 7])
    def test_page_sizes_that_are_no_powers_of_two(self, size: int, arch: str) -> None:
        found = resolve(problem(page_size=size), arch)
        assert isinstance(found, Sm100DecodeConfig)
        assert found.uneven_pages
        assert found.box_rows == {24: 8, 1040: 16}.get(size, 0)

    def test_the_config_is_that_of_hopper(self, arch: str) -> None:
        """Tiles, leaves, stages, registers and levels are the same, so results have the same bits."""
        for dims, rows in itertools.product(TREE_DIMS, (1, 9, 17, 33)):
            if rows > most_rows(dims):
                continue
            own, hopper = (resolve(problem(dims, rows), each) for each in (arch, "sm_90a"))
            for name in (
                "tile",
                "leaf_tokens",
                "smem_levels",
                "accumulated_levels",
                "consumer_warpgroups",
                "registers",
            ):
                assert getattr(own, name) == getattr(hopper, name), (dims, rows, name)
            assert own.name == hopper.name.replace("sm_90a_", f"{arch}_tcgen05_")


@pytest.mark.parametrize("arch", BLACKWELL)
class TestRefusals:
    @staticmethod
    def refusal(of: AttentionProblem, arch: str) -> str:
        with pytest.raises(NotImplementedError) as caught:
            resolve_decode(of, arch, Sm100DecodeConfig)
        return str(caught.value)

    def test_head_dim_512(self, arch: str) -> None:
        message = self.refusal(problem(512), arch)
        assert message == f"there is no tcgen05 decode kernel for {arch} at head dim 512; most: 256"

    def test_other_head_dims(self, arch: str) -> None:
        assert isinstance(resolve(problem(240), arch), Sm100DecodeConfig)
        with pytest.raises(NotImplementedError, match=r"\(QK/V\) 24 have no decode kernel"):
            resolve(problem(24), arch)

    def test_scales_of_each_head_of_a_16_bit_cache(self, arch: str) -> None:
        for name in ("softmax_scale", "output_scale"):
            message = self.refusal(problem(**{name: empty(2, dtype=torch.float32)}), arch)
            assert message == f"scales of each KV head have no decode kernel on {arch} with a 16-bit cache"


@pytest.mark.parametrize("arch", BLACKWELL)
def test_what_is_shipped(arch: str) -> None:
    wanted = set(itertools.product(DTYPES.values(), COMPILED_DIMS, MASKS, paged_fetches(LEAF_TILE)))
    wide = [c for c in SHIPPED[arch] if c.kv_type is KvType.WIDE]
    assert {(c.dtype, c.head_dim_qk, c.mask, (c.kv_fetch, c.box_rows)) for c in wide} == wanted
    for dim in COMPILED_DIMS:
        assert {c.rows for c in wide if c.head_dim_qk == dim} == {*tree_rows(dim)}
    assert len(wide) == len(set(wide)) == len(DTYPES) * len(MASKS) * len(paged_fetches(LEAF_TILE)) * (4 + 4 + 2)
    assert all("_tcgen05_" in c.name and c.out_dtype == c.dtype for c in SHIPPED[arch])
    narrow = [c for c in SHIPPED[arch] if c.kv_type is not KvType.WIDE]
    kinds = itertools.product(DTYPES.values(), MASKS, (KvType.E4M3, KvType.INT8), paged_fetches(LEAF_TILE))
    rows = {64: (8, 16, 32, 64), 128: (8, 16, 32, 64), 256: (8,)}
    assert {(c.dtype, c.mask, c.kv_type, (c.kv_fetch, c.box_rows), c.head_dim_qk, c.rows) for c in narrow} == {
        (*kind, dim, count) for kind in kinds for dim, counts in rows.items() for count in counts
    }


@pytest.mark.parametrize("arch", BLACKWELL)
def test_no_shipped_kernel_of_mma_sync_is_without_a_call(arch: str) -> None:
    """mma.sync kernels are shipped for head dim 512."""
    others = [c for c in shipped_configs(arch, Family.DECODE) if isinstance(c, Sm120DecodeConfig)]
    assert {(c.head_dim_qk, c.rows) for c in others} == {(512, 8)}


def test_covering_ones_stand_for_all() -> None:
    """Every number of rows comes with each mask and head dim, and every type with each mask and head dim."""
    assert len(set(COVERING_SM100_DECODE)) == len(COVERING_SM100_DECODE)
    facts: list[Callable[[Sm100DecodeConfig], Any]] = [
        lambda c: (c.head_dim_qk, c.rows, c.kv_bytes),
        lambda c: (c.head_dim_qk, c.kv_type),
        lambda c: (c.mask, c.head_dim_qk),
        lambda c: (c.mask, c.rows, c.kv_bytes),
        lambda c: (c.mask, c.kv_type),
        lambda c: (c.dtype, c.kv_type),
        lambda c: (c.kv_fetch, c.box_rows, c.kv_bytes),
        lambda c: (c.kv_fetch, c.mask, c.kv_bytes),
    ]
    for fact in facts:
        assert {*map(fact, SHIPPED["sm_100a"])} <= {*map(fact, COVERING_SM100_DECODE)}
    assert {c.arch for c in COVERING_SM100_DECODE} == set(BLACKWELL)
    for config in COVERING_SM100_DECODE:
        assert page_size(config) % max(config.box_rows, 1) == 0


@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize("sms", [1, 4, 5, 148])
@pytest.mark.parametrize(
    ("dims", "rows"), [(64, 8), (128, 8), (128, 16), (128, 32), (80, 64), (128, 64), (128, 130), (256, 16), (256, 100)]
)
def test_scratch_and_slots(dims: int, rows: int, sms: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes that CTAs share, and each CTA's nodes in memory, fit the scratch of any bound of rows."""
    monkeypatch.setattr("hopwell.kernels.launch.geometry.multiprocessors", lambda device: sms)
    for kv_len in (1, 5000, 1 << 20):
        of = problem(dims, rows, max_kv_len=kv_len)
        config = resolve(of, arch)
        assert isinstance(config, Sm100DecodeConfig)
        sizes = decode_geometry(of, config)
        assert (sizes.grid, sizes.row_tiles) == (sms, -(-rows // config.rows))
        levels = splitting.gmem_levels(config.leaf_tokens, kv_len, config.smem_levels)
        assert sizes.gmem_levels == levels
        nodes = sizes.slots + levels * sizes.grid
        needed = nodes * node_bytes(config.rows, dims) + splitting.ALIGNMENT
        for bound in (rows, max(rows, 64), 200):
            assert needed <= scratch_bytes(Family.DECODE, arch, LaunchSizes(bound, 2, dims, kv_len, sms)), bound


def test_scratch_of_three_ctas() -> None:
    """Three CTAs of an SM have fewer levels in shared memory, and more nodes in memory, than two."""
    config = Sm100DecodeConfig("sm_100a", "bf16", "bf16", 128, 128, MaskKind.FULL, *PAGES16, KvType.NVFP4, 8)
    for sms, kv_len in itertools.product((1, 4, 148), (1, 5000, 1 << 20)):
        sizes = LaunchSizes(8, 2, 128, kv_len, sms)
        levels = splitting.gmem_levels(config.leaf_tokens, kv_len, config.smem_levels)
        nodes = config.slots(sizes, 1) + levels * 3 * sms
        needed = nodes * node_bytes(8, 128) + splitting.ALIGNMENT
        assert needed <= scratch_bytes(Family.DECODE, "sm_100a", sizes)
    assert needed > splitting.scratch_bytes(sizes), "two CTAs would need less"


def kernels(dims: tuple[int, int], kv_types: Sequence[KvType] = (*KV_TYPES, KvType.NVFP4)) -> list[Any]:
    """Return every kernel of head dims with drafts in bf16."""
    common = ("sm_100a", "bf16", "bf16", *dims)
    return [
        build(Sm100DecodeConfig(*common, MaskKind.DRAFT, *fetch, kv_type, rows))[0]
        for kv_type in kv_types
        for rows in Sm100DecodeConfig.tiles_with_tree(dims[0], kv_type)
        for fetch in paged_fetches(LEAF_TILE)
        if kv_type is not KvType.NVFP4 or dims in DECODE_NVFP4_HEAD_DIMS
    ]


@pytest.mark.parametrize("dims", TREE_DIMS, ids=str)
class TestResources:
    def test_shared_memory_and_registers(self, dims: tuple[int, int]) -> None:
        for kernel in kernels(dims):
            c = kernel.config
            assert kernel.shared_bytes <= ARCHITECTURES[c.arch].shared_bytes_of(c.ctas_per_sm)
            assert WARPGROUP * sum(c.registers) * c.ctas_per_sm <= REGISTERS
            assert len(c.registers) == 1 + c.consumer_warpgroups

    def test_tensor_memory(self, dims: tuple[int, int]) -> None:
        """S of a leaf comes first, then O, then pairs of dequantized tiles of each warpgroup. A product has two tiles
        or blocks of V if they are dequantized. The columns of all CTAs of an SM fit together."""
        for kernel in kernels(dims):
            c = kernel.config
            of_product, blocks = 1 if c.kv_type is KvType.WIDE else 2, -(-dims[1] // 64)
            pair = max(-(-kernel.layout.tile_dims[0] // 64), 2 * -(-blocks // 2)) * 32
            assert c.columns.widths["s"] == c.rows * c.leaf_tiles // of_product
            assert c.columns.widths["o"] == c.rows * -(-blocks // of_product)
            assert c.columns.widths["a"] == c.operand_buffers * c.consumer_warpgroups * pair
            assert (c.operand_buffers == 0) == (c.kv_type is KvType.WIDE)
            assert [c.columns.first(name) for name in ("s", "o")] == [0, c.columns.widths["s"]]
            columns = [c.columns.total]
            if len(c.allocations) > 1:
                columns = [c.columns.first("a"), c.columns.widths["a"]]
            for used, allocated in zip(columns, c.allocations, strict=True):
                assert used <= allocated < max(2 * used, 33)
                assert allocated & (allocated - 1) == 0
            assert sum(c.allocations) * c.ctas_per_sm <= TENSOR_MEMORY_COLUMNS

    def test_three_ctas_of_an_sm(self, dims: tuple[int, int]) -> None:
        """Three CTAs share an SM with eight rows over NVFP4 caches, up to head dim 128."""
        for kernel in kernels(dims):
            c = kernel.config
            few = c.kv_type is KvType.NVFP4 and c.rows == 8 and max(dims) <= 128
            assert (c.ctas_per_sm == 3) == few
            assert not few or (len(c.allocations), c.tile.kv_stages >= c.leaf_tiles) == (2, True)

    def test_edges(self, dims: tuple[int, int]) -> None:
        """S and O are full after one commit. A commit releases 16-bit K and V. The warps of one warpgroup release a
        narrow tile, and fill operand A."""
        for kernel in kernels(dims):
            c, warpgroups = kernel.config, kernel.config.consumer_warpgroups
            edges = {e.name: e for e in kernel.edges}
            is_wide = c.kv_type is KvType.WIDE
            assert {*edges} == {"q", "k", "v", "work", "s", "o"} | ({"a"} if c.operand_buffers else set())
            for name in ("k", "v"):
                assert edges[name].stages == c.tile.kv_stages
                assert edges[name].consumer_warps == (1 if is_wide else WARPS)
                assert edges[name].consumer_lanes == 1 or not is_wide
            for name in ("s", "o"):
                assert (edges[name].stages, edges[name].full_arrivals) == (1, 1)
            if not is_wide:
                filled = (edges["a"].stages, edges["a"].full_arrivals, edges["a"].consumer_warps)
                assert filled == (c.operand_buffers * warpgroups, WARPS, 1)


def test_edges_are_in_the_docstrings() -> None:
    document = f"{SwapABDecodeSm90.__doc__}{TensorProducts.__doc__}"
    for kernel in kernels((128, 128)):
        for edge in kernel.edges:
            assert f"\n        {edge.name}" in document or f", {edge.name} " in document


def test_more_columns_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sm100DecodeConfig, "leaf_tiles", 8)
    with pytest.raises(ValueError, match="1 CTAs of an SM have 512 columns of tensor memory each, not 1024"):
        replace(SHIPPED["sm_100a"][0], head_dim_qk=128, head_dim_v=128, rows=64, mask=MaskKind.FULL)


def test_fields_are_in_the_name() -> None:
    config = Sm100DecodeConfig("sm_103a", "fp16", "bf16", 192, 128, MaskKind.DRAFT, *PAGES16, KvType.WIDE, 16)
    assert config.name == "decode_sm_103a_tcgen05_fp16_to_bf16_d192_128_draft_rows16_pages16"
