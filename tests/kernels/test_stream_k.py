"""The partition of leaves among CTAs, and the combine of their nodes: device code, on the host."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32, Int64
from helpers.host.tree import HostNode, HostTree, SharedInts
from helpers.host.warps import Lanes, SchedulingWarp, device_tuple, host

from hopwell.kernels import registry
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.decode import shipped_decode_configs
from hopwell.kernels.config.mla import shipped_mla_configs
from hopwell.kernels.config.splitting import (
    EIGHT_BIT_SWAP_AB_ROWS,
    FAN_IN_BITS,
    FAN_IN_LEVELS,
    FIRST_LEAVES,
    LARGE_NODE_FAN_IN_BITS,
    LATENT_SWAP_AB_ROWS,
    RESIDENT_BYTES,
    SWAP_AB_ROWS,
    ctas_per_sm,
    gmem_levels,
    node_slots,
    share_subtrees,
    shared_levels,
)
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.masks import WIDEST
from hopwell.kernels.parts.combine import tree as tree_module
from hopwell.kernels.parts.combine.tree import StoredNodes, Tree
from hopwell.kernels.parts.core import device
from hopwell.kernels.parts.core.copy import EVICT_FIRST, EVICT_NORMAL
from hopwell.kernels.parts.core.device import Divisor
from hopwell.kernels.parts.partition import split_kv as split
from hopwell.kernels.parts.partition import stream_k as ranges_module
from hopwell.kernels.parts.partition.split_kv import KeySchedule, PackedTile, TopkTokens
from hopwell.kernels.parts.partition.stream_k import (
    StreamKRanges,
    StreamKSchedule,
    StreamKTile,
    TopkStreamKSchedule,
    wave_and_head_list,
)
from hopwell.kernels.parts.rows.mask import IntervalMask, TileRange, TopkMask
from hopwell.kernels.problem import MAX_KEYS, MaskKind
from hopwell.kernels.sm90.decode import leaves as leaves_module
from hopwell.kernels.sm90.decode.leaves import LeafTree
from hopwell.kernels.sm100.decode.config import MOST_CTAS
from tests.kernels.test_scheduler import Memory

pytestmark = pytest.mark.traced

LEAF = 128  # tokens
SUBTREES = 16
RESIDENT_LEAVES = 40  # of all heads
GROUP = 4  # query heads of a KV head


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(split, "load_int", memory.load_int)
    topk_indices, spans = (
        ("_request_of", "_topk_token"),
        ((kind, [name]) for kind, name in ((KeySchedule, "_cut"), (TopkStreamKSchedule, "_span"))),
    )
    kinds = (
        (StreamKRanges, ("of", "own_range")),
        (StreamKSchedule, ("_requests", "_leaves")),
        (TopkTokens, topk_indices),
        *spans,
    )
    for kind, name in ((kind, name) for kind, names in kinds for name in names):
        member = vars(kind)[name]
        plain = getattr(member, "__func__", member).__wrapped__
        monkeypatch.setattr(kind, name, staticmethod(plain) if isinstance(member, staticmethod) else plain)
    monkeypatch.setattr(cutlass, "range", lambda *bounds, unroll: range(*map(host, bounds)))
    monkeypatch.setattr(cute.arch, "clz", lambda value: Int32(32 - host(value).bit_length()))
    monkeypatch.setattr(device, "tied", lambda value, other: value)
    return memory


def of(head_lists: int, leaves: int, requests: int, ctas: int, most_subtrees: int = SUBTREES) -> StreamKRanges:
    waves = Divisor(Int32(ctas // head_lists), Divisor.of(Int32(max(ctas // head_lists, 1))).reciprocal)
    return StreamKRanges.of(
        Int32(head_lists), Int32(leaves), Int32(requests), Divisor.of(Int32(ctas)), waves, most_subtrees
    )


def range_of(head_lists: int, number: int, ranges_of: Callable[..., Any]) -> tuple[int, int, int]:
    """Return (head list, first leaf, end) of a CTA, or of a ticket."""
    wave, head_list = wave_and_head_list(Int32(number), Divisor.of(Int32(head_lists)))
    first, end = ranges_of(wave)
    return host(head_list), host(first), host(end)


SIZES = [
    (head_lists, leaves, requests, ctas)
    for head_lists, ctas in ((1, 132), (8, 132), (8, 4), (3, 4), (5, 4), (96, 132), (200, 132))
    for leaves, requests in ((1, 1), (8, 1), (33, 3), (64, 64), (129, 2), (2049, 7), (2048, 256), (20000, 1))
]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("head_lists", "leaves", "requests", "ctas"), SIZES)
def test_every_leaf_of_every_head_list_is_in_one_range(head_lists: int, leaves: int, requests: int, ctas: int) -> None:
    ranges = of(head_lists, leaves, requests, ctas)
    tickets = (range_of(head_lists, number, ranges.handed_out) for number in itertools.count())
    found_ranges = [range_of(head_lists, number, ranges.own_range) for number in range(ctas)]
    found_ranges += itertools.takewhile(lambda each: each[1] < leaves, tickets)
    found = [(head_list, leaf) for head_list, first, end in found_ranges for leaf in range(first, end)]
    assert len(found_ranges) == ctas or host(ranges.has_tickets)
    assert sorted(found) == [(head_list, leaf) for head_list in range(head_lists) for leaf in range(leaves)]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("kv_heads", [1, 8, 100, 300])
@pytest.mark.parametrize(
    ("rows", "columns", "ctas_of_sm"),
    [
        *itertools.product(SWAP_AB_ROWS, (64, 128, 256), (1,)),
        *(
            (m, d, ctas_per_sm(m, d, 1))
            for m, most in EIGHT_BIT_SWAP_AB_ROWS.items()
            for d in (64, 128, 256, 512)
            if d <= most
        ),
        *((SWAP_AB_ROWS[0], d, MOST_CTAS) for d in (64, 128)),
        (LATENT_SWAP_AB_ROWS, 512, 1),
    ],
)
def test_there_are_places_for_all_nodes(rows: int, columns: int, ctas_of_sm: int, kv_heads: int) -> None:
    bits = FAN_IN_BITS if columns < 512 else LARGE_NODE_FAN_IN_BITS
    for leaves, requests, sms in itertools.product((1, 999, 100_000), (1, 2), (4, 132)):
        ranges = of(kv_heads, leaves, requests, sms * ctas_of_sm, share_subtrees(rows, columns, ctas_of_sm))
        slots = node_slots(rows, kv_heads, columns, sms, ctas_of_sm)
        assert kv_heads * host(ranges.head_list_slots) <= slots
        assert leaves >> host(ranges.shift) <= 1 << bits * FAN_IN_LEVELS


@pytest.mark.usefixtures("memory")
def test_heads_go_to_neighbours() -> None:
    """CTAs with the same first leaves are neighbours, and nearly all CTAs have a range of their own."""
    own = [range_of(8, number, of(8, 64 * 32, 32, 132).own_range) for number in range(132)]
    assert [head_list for head_list, *_ in own[:128]] == [*range(8)] * 16
    assert all(len({first for _, first, _ in own[i : i + 8]}) == 1 for i in range(0, 128, 8))
    assert all(first == end for _, first, end in own[128:])


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("leaves", "requests", "handed_out"),
    [(64 * 32, 32, False), (8 * 256, 256, True), (1024, 1, False), (32 * 8, 8, False)],
    ids=["long lines", "lines of a subtree", "one line", "few leaves"],
)
def test_what_is_handed_out(leaves: int, requests: int, handed_out: bool) -> None:
    assert bool(host(of(8, leaves, requests, 132).has_tickets)) == handed_out
    # A third of the CTAs would have no leaf.
    assert host(of(88, leaves, requests, 132).has_tickets)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("leaves", [16, 32, 61, 64, 128, 1024])
def test_nodes_of_a_single_request_are_combined_at_once(leaves: int) -> None:
    """Every CTA leaves one node, which fills one slot of the only fan-in group."""
    ranges = of(8, leaves, 1, 132)
    subtree = 1 << host(ranges.shift)
    assert host(ranges.own) == subtree
    assert -(-leaves // subtree) <= 1 << FAN_IN_BITS
    assert 1 << host(of(8, leaves, 2, 132).shift) <= max(subtree // 16, 1)


@dataclass
class Batch:
    kv_lens: list[int]
    kv_heads: int = 1
    window: int = -1
    ctas: int = 4
    q_len: int = 1  # of every request, in tiles of 8 rows
    accumulated_levels: int = 0

    @property
    def row_tiles(self) -> int:
        return -(-GROUP * self.q_len // 8)

    def schedule(self, memory: Memory) -> StreamKSchedule:
        a = device_tuple(Addresses, kv_lens=memory.put(self.kv_lens))
        sizes = dict(batch=len(self.kv_lens), q_len=self.q_len, grid=self.ctas, capacity=MAX_KEYS, tokens=MAX_KEYS)
        sizes |= dict(kv_heads=self.kv_heads, group=GROUP, row_tiles=self.row_tiles)
        g = device_tuple(DecodeGeometry, **sizes)
        kind = MaskKind.FULL if self.window < 0 else MaskKind.SLIDING_WINDOW
        mask = IntervalMask(kind, Int32(self.window if self.window >= 0 else WIDEST))
        return StreamKSchedule(g, a, mask, 8, LEAF, SUBTREES, RESIDENT_LEAVES, self.accumulated_levels)

    @property
    def lines(self) -> list[int]:
        """Lines of a head, by the index of their requests."""
        return list(range(len(self.kv_lens)))

    def leaves(self, request: int) -> range:
        """Return the leaves of keys that the request's row sees, counted from the left; one if it sees none."""
        kv_len = self.kv_lens[request]
        first = max(kv_len - 1 - self.window, 0) // LEAF if self.window >= 0 else 0
        return range(first, max(-(-kv_len // LEAF), first + 1))


@dataclass
class ListBatch(Batch):
    """Requests with these numbers of new tokens, each with ``listed`` top-k indices."""

    q_lens: Sequence[int] = ()
    topk: int = 300

    def schedule(self, memory: Memory) -> StreamKSchedule:
        plain, offsets = super().schedule(memory), [0, *itertools.accumulate(self.q_lens)]
        most, tokens, topk = map(Int64, (max(self.q_lens), sum(self.q_lens), self.topk))
        g = plain.geometry._replace(q_len=most, tokens=tokens, topk=topk)
        a = plain.addresses._replace(q_offsets=memory.put(offsets))
        mask = TopkMask(MaskKind.CAUSAL, plain.mask.size)
        return TopkStreamKSchedule(g, a, mask, 16, LEAF, SUBTREES, RESIDENT_LEAVES, 0)

    @property
    def lines(self) -> list[int]:
        return list(range(sum(self.q_lens)))

    def leaves(self, token: int) -> range:
        """Return the leaves of the token's top-k indices, limited by the number of keys up to its own."""
        seen = [kv - q + t + 1 for kv, q in zip(self.kv_lens, self.q_lens, strict=True) for t in range(q)]
        return range(max(-(-min(seen[token], self.topk) // LEAF), 1))


def published(batch: Batch, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[StreamKTile]:
    """Return the posts of all CTAs; the first CTA gets all tickets."""
    found = []
    monkeypatch.setattr(ranges_module, "hand_back_tickets", lambda addresses, ctas: None)
    for cta in range(batch.ctas):
        warp = SchedulingWarp(itertools.count(0 if cta == 0 else 1 << 20))
        warp.use(monkeypatch, ranges_module)
        monkeypatch.setattr(cute.arch, "block_idx", lambda cta=cta: (Int32(cta), 0, 0))
        schedule = batch.schedule(memory)
        warp.run(lambda schedule=schedule, warp=warp: type(schedule).publish.__wrapped__(schedule, warp))
        assert warp.events[-1] == ("end",)
        found += warp.posted
    return found


BATCHES = [
    Batch([0, 1, 128, 129, 700, 0, 5000], kv_heads=3),
    Batch([40_000, 3, 9000], kv_heads=2),
    Batch([40_000, 3, 9000, 1500, 2500], kv_heads=2, ctas=16, accumulated_levels=2),
    Batch([6000], ctas=64, accumulated_levels=2),
    Batch([40_000, 3, 9000], kv_heads=3),
    Batch([9000, 70_000], kv_heads=3, window=20_000),
    Batch([300, 20_000], kv_heads=5),
    Batch([40_000]),
    Batch([9000], kv_heads=2),
    Batch([70_000], window=20_000, ctas=8),
    ListBatch([9000], q_lens=[1], topk=2000),
    Batch([(i * 97) % 1500 for i in range(70)], kv_heads=3, ctas=8),
    ListBatch([0, 5, 100, 260, 9000], q_lens=[0, 3, 1, 3, 2]),
    ListBatch([1, 2, 700], q_lens=[3, 3, 3], topk=64),
    Batch([0, 1, 128, 129, 257, 9000], kv_heads=2, q_len=5),
    Batch([4000], q_len=33, ctas=8),
    ListBatch([900 + i for i in range(70)], q_lens=[i % 4 for i in range(70)], ctas=8, topk=512),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_parts_make_whole_output_tiles(batch: Batch, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every leaf of every line is in one segment; segments begin at subtrees, and shared subtrees have places."""
    found: dict[tuple[int, ...], list[StreamKTile]] = {}
    for tile in published(batch, memory, monkeypatch):
        place = (tile.request.index, tile.kv_head, tile.first_row)
        found.setdefault(tuple(map(host, place)), []).append(tile)
    rows = [8 * i for i in range(batch.row_tiles)]
    assert sorted(found) == [*itertools.product(batch.lines, range(batch.kv_heads), rows)]
    places: list[int] = []
    for (request, *_), segments in found.items():
        segments.sort(key=lambda segment: host(segment.first_leaf))
        leaves, ends = batch.leaves(request), [0]
        for segment in segments:
            first, end = host(segment.first_leaf), host(segment.end_leaf)
            assert first == ends[-1] < end
            level = host(segment.first_level)
            assert level == max(min((len(leaves) - 1).bit_length() - FIRST_LEAVES, batch.accumulated_levels), 0)
            assert first % (1 << max(host(segment.shift), level)) == 0
            assert host(segment.leaves) == len(leaves)
            if host(segment.request.kv_len):
                assert (host(segment.keys.begin), host(segment.keys.end)) == (leaves.stop - end, leaves.stop - first)
            ends.append(end)
        assert ends[-1] == len(leaves)
        if len(segments) > 1:
            tree = SimpleNamespace()
            subtrees = ((len(leaves) - 1) >> host(segments[0].shift)) + 1
            places += [host(Tree._slot(tree, segments[0], Int32(subtree))) for subtree in range(subtrees)]
    assert len(places) == len(set(places))
    assert max(places, default=0) < node_slots(8, batch.kv_heads * batch.row_tiles, 128, batch.ctas)


@pytest.mark.parametrize("more", [0, 1])
def test_what_fits_into_the_cache_stays_there(more: int, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts the leaves of all heads."""
    batch = Batch([LEAF * (RESIDENT_LEAVES // 2 - 2 + more), 2 * LEAF], kv_heads=2)
    policies = {host(segment.cache_policy) for segment in published(batch, memory, monkeypatch)}
    assert policies == {EVICT_FIRST if more else EVICT_NORMAL}


@pytest.mark.parametrize(
    ("shipped", "dims", "kv_type", "token_bytes"),
    [
        (shipped_decode_configs, (128, 128), KvType.WIDE, 2 * 128 * 2),
        (shipped_decode_configs, (64, 64), KvType.WIDE, 2 * 64 * 2),
        (shipped_decode_configs, (128, 128), KvType.INT8, 2 * 128),
        (shipped_mla_configs, (576, 512), KvType.WIDE, 576 * 2),
    ],
)
def test_as_many_leaves_stay_as_have_room(
    shipped: Any, dims: tuple[int, int], kv_type: KvType, token_bytes: int
) -> None:
    wanted = (*dims, kv_type, True)
    config = next(c for c in shipped() if (c.head_dim_qk, c.head_dim_v, c.kv_type, c.has_tree) == wanted)
    kernel, _ = registry.build(config)
    schedule = kernel.schedule(None, None, None, None, None, None)
    leaf_bytes = schedule.tile_n * token_bytes
    assert schedule.resident_leaves * leaf_bytes <= RESIDENT_BYTES < (schedule.resident_leaves + 1) * leaf_bytes


def expected(first: int, leaves: int, level: int, first_level: int = 0) -> Any:
    """Return the node of a line that begins at a leaf. Below ``first_level`` leaves are added one after the other."""
    if level <= first_level:
        return functools.reduce(lambda node, leaf: (node, leaf), range(first, min(first + (1 << level), leaves)))
    right = first + (1 << (level - 1))
    left = expected(first, leaves, level - 1, first_level)
    return left if right >= leaves else (left, expected(right, leaves, level - 1, first_level))


def the_same(passes: list[Any], pairs: int) -> Any:
    """Return the common result of all passes over the columns."""
    assert all(found == passes[0] for found in passes)
    return passes[0]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(lanes=Lanes(), memory={}, stored=[{} for _ in range(LANES)], counters={}, shared={})
    state.lock = threading.Lock()

    def add(address: int, value: Any, **how: str) -> Int32:
        before = state.counters.get(address, 0)
        state.counters[address] = before + host(value)
        return Int32(before)

    exchange = state.lanes.exchange
    for name, function in (
        ("lane_idx", lambda: Int32(state.lanes.own.lane)),
        ("shuffle_sync", lambda value, lane: exchange(value)[host(lane)]),
        ("vote_ballot_sync", lambda held: Int32(sum(bool(v) << i for i, v in enumerate(exchange(bool(held)))))),
        ("clz", lambda value: Int32(32 - host(value).bit_length())),
        ("block_idx", lambda: (Int32(0), 0, 0)),
        ("atomic_add", add),
    ):
        monkeypatch.setattr(cute.arch, name, function)
    monkeypatch.setattr(tree_module, "shared_array", lambda kind, address: SharedInts(state.shared, address))
    monkeypatch.setattr(tree_module, "global_array", lambda kind, address: SharedInts(state.counters, host(address)))
    monkeypatch.setattr(tree_module, "global_pointer", lambda kind, address: host(address))
    monkeypatch.setattr(tree_module, "joined", lambda left, right, pairs, there=True: (left, right) if there else left)
    monkeypatch.setattr(tree_module, "side_by_side", the_same)
    monkeypatch.setattr(tree_module, "_subtree_of", tree_module._subtree_of.__wrapped__)
    for name in ("_add_waiting", "wait", "store", "store_waiting", "rise", "combine", "_with_right"):
        monkeypatch.setattr(Tree, name, vars(Tree)[name].__wrapped__)
    monkeypatch.setattr(leaves_module, "StoredNodes", SimpleNamespace(none=Stored))
    monkeypatch.setattr(cutlass, "range", lambda *bounds, unroll: range(*map(host, bounds)))
    monkeypatch.setattr(HostTree, "state", state)
    return state


class Stored(list[tuple[Any, Any]]):
    """The nodes stored for a combine, (level, leaf) each."""

    def plus(self, level: Any, leaf: Any) -> Stored:
        return Stored([*self, (level, leaf)])

    def of_lane(self, lane: int) -> StoredNodes:
        mine = self[lane] if lane < len(self) else (Int32(0), Int32(0))
        return StoredNodes(Int32(len(self)), *mine)


def keys_of(begin: int, end: int) -> TileRange:
    """Return keys that every row sees."""
    return TileRange(*[Int32(leaf) for leaf in (begin, end, begin, end)], Int32(0))


def attend(tree: HostTree, segment: StreamKTile) -> Any:
    """Process a segment like a CTA; return the line's root if this segment completes it."""
    node, state, leaves = HostNode(), tree.state, host(segment.leaves)
    state.lanes.own.lane = 0

    def next_leaf(n: int, masked: Any, step: Any, begins: Any = True, ends: Any = True) -> Any:
        leaf = leaves - 1 - n
        node.value = leaf if host(begins) else (node.value, leaf)
        return step + 1

    levels = host(segment.first_level)
    kernel = SimpleNamespace(config=SimpleNamespace(accumulated_levels=levels))
    leaf_tree = SimpleNamespace(kernel=kernel, combine=tree)
    leaf_tree.place_node = partial(LeafTree.place_node.__wrapped__, leaf_tree)
    combine_segment = LeafTree.combine_segment.__wrapped__
    step, stored = combine_segment(leaf_tree, next_leaf, node, segment, Int32(0))
    assert host(step) == host(segment.end_leaf) - host(segment.first_leaf)
    commit(state)
    if host(step) == leaves:
        return node.value
    found: list[Any] = [None] * LANES

    def combine() -> None:
        own, lane = HostNode(), state.lanes.own.lane
        if host(tree.combine(own, segment, stored.of_lane(lane), state.lanes.meet)):
            found[lane] = own.value

    state.lanes.run(combine)
    commit(state)
    assert all(value == found[0] for value in found)
    return found[0]


def commit(state: SimpleNamespace) -> None:
    """All lanes have stored the same values, which now become visible to others."""
    state.memory |= state.stored[0]
    state.stored = [{} for _ in range(LANES)]


@pytest.mark.parametrize("seed", range(60))
def test_whoever_combines_finds_the_same_tree(seed: int, state: SimpleNamespace) -> None:
    """Segments of an output tile are processed in any order. The last finds the root; all counters return to zero."""
    random.seed(seed)
    shift, rows, slots = random.choice((0, 0, 1, 3)), random.choice(SWAP_AB_ROWS), 4096
    leaves = random.choice((1, 7, 16, 17, 64, 65, 100, 255, 257, 300)) << random.choice((0, shift))
    addresses = (1 << 20, 1 << 30, Int64(0), Int64(1 << 40))
    # Nodes of few columns have levels in shared memory; nodes of many columns have the first level in registers.
    sizes = random.choice(((shared_levels(rows, 128), rows, 128), (1, LATENT_SWAP_AB_ROWS, 512, HostNode())))
    levels = gmem_levels(1, leaves, sizes[0])  # of requests of this number of keys
    geometry = device_tuple(DecodeGeometry, slots=slots, gmem_levels=levels)
    tree = HostTree(*addresses, geometry, *sizes)
    subtrees = -(-leaves >> shift)
    cuts = sorted(random.sample(range(1, subtrees), random.randint(0, min(subtrees - 1, 12)))) if subtrees > 1 else []
    # Segments consist of whole nodes of the tree's first level.
    first_level = random.choice((0, 0, 1, 2))
    begins = {cut << shift >> first_level << first_level for cut in cuts} - {0}
    bounds = [0, *sorted(begins), leaves]
    whole = StreamKTile.from_ints([Int32(0)] * StreamKTile.INTS)
    output_tile = dict(leaves=Int32(leaves), output_tile_start=Int32(random.choice((0, 5))), shift=Int32(shift))
    output_tile["first_level"] = Int32(first_level)
    segments = [
        replace(
            whole,
            **output_tile,
            first_leaf=Int32(begin),
            end_leaf=Int32(end),
            keys=keys_of(leaves - end, leaves - begin),
        )
        for begin, end in itertools.pairwise(bounds)
    ]
    random.shuffle(segments)
    roots = [attend(tree, segment) for segment in segments]
    assert roots[:-1] == [None] * (len(segments) - 1)
    assert roots[-1] == expected(0, leaves, (leaves - 1).bit_length(), first_level)
    assert not any(state.counters.values())


def test_a_tile_range_is_posted_whole() -> None:
    assert PackedTile.INTS + len(fields(StreamKTile)) - len(fields(PackedTile)) == StreamKTile.INTS
