"""The maximum number of partials, and the size of their memory: plain numbers."""

from __future__ import annotations

import itertools

import pytest
from helpers.covering.sm100_decode import COVERING_SM100_DECODE
from hypothesis import given
from hypothesis import strategies as st

from hopwell.kernels import registry
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.splitting import (
    ALIGNMENT,
    CHUNK_ELEMENTS,
    COMFORTABLE_BYTES,
    DOUBLINGS,
    FAN_IN,
    IN_FLIGHT,
    LATENT_IN_FLIGHT,
    LATENT_WORK_TILES,
    MAX_CHUNKS,
    ROWS,
    SLOT_COUNTERS,
    STATISTICS,
    SWAP_AB_ROWS,
    TICKETS,
    LaunchSizes,
    chunk_tokens,
    counter_ints,
    gmem_levels,
    node_bytes,
    node_slots,
    scratch_bytes,
    slot_bytes,
    tree_rows,
)
from hopwell.kernels.problem import Family
from hopwell.kernels.registry import shipped_configs as shipped

CAPACITIES = (0, 1, 511, 512, 513, 5000, 255 * 512, 255 * 512 + 1, 256 * 512, 256 * 512 + 1, 1 << 20, 2**31 - 1)
COLUMNS = (16, 48, 64, 128, 256, 512)


def test_longest_chunks_are_long_enough() -> None:
    """Chunks suffice for all keys of a 32-bit count, wherever the first visible one is in its chunk."""
    for columns in COLUMNS:
        assert (chunk_tokens(columns) << DOUBLINGS) * (MAX_CHUNKS - 1) >= 2**31
    assert (chunk_tokens(512, latent=True) << DOUBLINGS) * 2 >= 2**31


def test_chunks_have_equal_bytes() -> None:
    """Chunks have bytes as equal as powers of two allow, so they take equal times; wide heads have no
    shorter chunks.
    """
    assert [chunk_tokens(columns) for columns in (64, 128, 256, 512)] == [2048, 1024, 1024, 1024]
    for columns in range(16, 513, 16):
        tokens = chunk_tokens(columns)
        assert tokens & (tokens - 1) == 0
        assert CHUNK_ELEMENTS / 2 < tokens * min(columns, 128) <= CHUNK_ELEMENTS
        assert chunk_tokens(columns, element_bytes=1) == 2 * tokens


def test_two_levels_of_combines_are_enough() -> None:
    assert FAN_IN**2 >= MAX_CHUNKS


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("ctas", [1, 4, 132])
def test_the_ring_holds_more_than_one_request(ctas: int, capacity: int) -> None:
    """Otherwise a partial would wait for a slot that is freed only after its own turn."""
    for rows, kv_heads, columns in itertools.product((1, 16, 64, 65, 2048), (1, 8, 64), COLUMNS):
        # Chunks begin at whole multiples of their length, so the keys of a window may touch one more. Half chunks are
        # the shortest.
        chunks = min(-(-capacity // (chunk_tokens(columns) // 2)) + 1, MAX_CHUNKS)
        of_request = chunks * kv_heads * -(-rows // ROWS)
        assert LaunchSizes(rows, kv_heads, columns, capacity, ctas).slots >= of_request + IN_FLIGHT * ctas


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("rows", [1, 16, 64, 128, 256, 1000, 128 * 300])
def test_the_ring_holds_more_than_one_latent_request(rows: int, capacity: int) -> None:
    """A request with up to this number of rows has the maximum number of chunks for them."""
    slots = LaunchSizes(rows, 1, 512, capacity, 132, latent=True).slots
    for tiles in range(1, -(-rows // ROWS) + 1):
        chunks = min(-(-capacity // chunk_tokens(512, latent=True)), max(LATENT_WORK_TILES // tiles, 2))
        assert slots >= chunks * tiles + LATENT_IN_FLIGHT * 132


def test_slots_that_cost_little_are_there_anyway() -> None:
    assert LaunchSizes(8, 1, 128, 1, 1).slots * slot_bytes(8, 128) > 0.99 * COMFORTABLE_BYTES


@pytest.mark.parametrize("rows", [1, 8, 63, 64, 65, 2048])
def test_scratch_holds_outputs_and_statistics(rows: int) -> None:
    """Scratch holds at most a tile of rows in each slot, after the next 16-byte boundary."""
    for columns, capacity in itertools.product(COLUMNS, CAPACITIES):
        sizes = LaunchSizes(rows, 2, columns, capacity, 132)
        floats = sizes.slots * min(rows, ROWS) * (columns + STATISTICS)
        assert scratch_bytes(sizes) >= 4 * floats + 15
        assert floats < 2**31, "elements are counted in 32 bits"


@given(
    st.tuples(*[st.tuples(st.integers(1, most), st.integers(0, most)) for most in (300, 16, 512, 1 << 19)]),
    st.booleans(),
)
def test_scratch_for_more_is_enough_for_less(sizes: tuple[tuple[int, int], ...], latent: bool) -> None:
    """More rows, heads, columns or keys never need less memory: callers allocate once, for their largest launch."""
    fewer = [size for size, _ in sizes]
    more = [size + additional for size, additional in sizes]
    less, enough = (scratch_bytes(LaunchSizes(*of, 132, latent)) for of in (fewer, more))
    assert less <= enough


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_scratch_holds_the_trees_of_all_tiles(capacity: int) -> None:
    """Scratch holds nodes that several CTAs combine, and the tree levels outside shared memory of sm_120's kernels."""
    configs = {config.name: config for family in (Family.DECODE, Family.MLA) for config in shipped("sm_120a", family)}
    for config, kv_heads, tiles, sms in itertools.product(configs.values(), (1, 8), (1, 2, 17), (4, 188)):
        rows, columns, latent = config.rows * tiles, config.head_dim_v, config.family is Family.MLA
        slots = node_slots(config.rows, kv_heads * tiles, columns, sms, config.ctas_per_sm)
        levels = gmem_levels(config.leaf_tokens, capacity, config.smem_levels) * sms * config.ctas_per_sm
        found = scratch_bytes(LaunchSizes(rows, kv_heads, columns, capacity, sms, latent), tiled=True)
        assert found >= (slots + levels) * node_bytes(config.rows, columns) + ALIGNMENT


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_scratch_holds_the_trees_of_hopper_and_blackwell(arch: str, capacity: int) -> None:
    """Scratch does not know the type of a cache. It suffices for each type, and for problems of more rows."""
    trees = [c for c in shipped(arch, Family.DECODE) if c.has_tree and c.arch == arch and not c.tiled]
    if arch == "sm_100a":  # compiled on demand
        trees += [c for c in COVERING_SM100_DECODE if c.kv_type is KvType.NVFP4]
        known = {(8, 128, 3), (8, 64, 3), (16, 128, 2), (64, 128, 1)}
    else:
        known = {(16, 128, 2), (32, 128, 1), (8, 512, 1)}
    kinds = {(c.rows, c.head_dim_v, c.ctas_per_sm, c.leaf_tokens, c.smem_levels) for c in trees}
    assert known <= {kind[:3] for kind in kinds}
    for kind, kv_heads, tiles, sms in itertools.product(kinds, (1, 8), (1, 2, 17), (4, 132)):
        rows, columns, ctas, leaf, in_smem = kind
        if tiles > 1 and rows < ROWS:
            continue
        slots = node_slots(rows, kv_heads * tiles, columns, sms, ctas)
        nodes = slots + gmem_levels(leaf, capacity, in_smem) * sms * ctas
        for bound in (rows * tiles, 2 * ROWS * tiles):
            found = registry.scratch_bytes(Family.DECODE, arch, LaunchSizes(bound, kv_heads, columns, capacity, sms))
            assert found >= nodes * node_bytes(rows, columns) + ALIGNMENT, kind


def test_counters() -> None:
    """Each slot has an epoch, and counters of the present partials of a fan-in group and of a request."""
    assert counter_ints(0) == TICKETS
    assert counter_ints(100) - counter_ints(99) == SLOT_COUNTERS


@pytest.mark.parametrize("columns", [64, 128, 256, 512])
def test_tiles_of_few_rows_have_8_over_narrow_caches(columns: int) -> None:
    """Only wgmma has more rows over 8-bit caches; mma.sync reads the keys again for each tile of 8 rows."""
    assert tree_rows(columns, 1, tiled=True) == SWAP_AB_ROWS[:1]
