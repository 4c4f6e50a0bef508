"""Sizes of split-KV and stream-K decode, and the memory of partials. Plain numbers for host and device."""

from dataclasses import dataclass

from hopwell.kernels.config.base import BLOCK_COLUMNS, power_of_two_in
from hopwell.kernels.elements import HALFWORD_BYTES

# A chunk of split-KV takes a CTA about 16 us. A partial (4 KiB at 8 rows and 128 columns) is small beside the chunk's
# keys and values (512 KiB), and 1024 tokens are one chunk without a partial. Requests of middle length have half-size
# chunks; whole chunks would be too few for all SMs. bf16, 64/8 heads, us with half and with whole chunks (H200,
# 2026-11-22): 256 x 1024 tokens 258 and 238, 1 x 1024 14.3 and 15.7; 1 x 4096 15.4 and 19.2, 128 x 2048 253 and 258;
# 4 x 16384 78 and 72, 32 x 8192 253 and 250.
CHUNK_ELEMENTS = 1024 * 128  # of 16 bits of K, for small head dims
MIN_CHUNK_TOKENS = 1024
LONG_TOKENS = 8192  # from here on, and up to one chunk, chunks are whole
MAX_CHUNKS = 256  # of a request; longer requests have longer chunks
DOUBLINGS = 20  # 2^31 tokens in no more than MAX_CHUNKS, or two latent ones
FAN_IN = 16  # partials combined at a time, in two levels: the partials of a fan-in group, then the fan-in groups

ROWS = 64  # packed rows of a tile, at most
WARP_ROWS = 16  # of which a warp holds
ALIGNMENT = 16  # bytes
COMFORTABLE_BYTES = 8 << 20
# Slots for each CTA besides the slots of one request. With 2, requests waited for earlier requests to be combined:
# 32 x 8192 tokens and 32 rows took 498 us; with 8, cache hints and dependent launches together 313 (H200, 2026-11-21).
IN_FLIGHT = 8
# Keys of a chunk of MLA. Twice that is 7 % faster at 32 x 8192 tokens and 128 heads, and takes 70 instead of 43 us for
# a single request of 4096 tokens (H200, 2026-11-22).
LATENT_CHUNK_TOKENS = 1024
# Work tiles of a long MLA request at most, over all of its rows: nearly one for each multiprocessor. With more and
# shorter work tiles, 1 x 65536 tokens, 128 heads and two new tokens took 93 to 100 instead of 83 us (H200, 2026-11-22).
LATENT_WORK_TILES = 128
# Top-k indices in a chunk. The usual 2048 are one chunk: 64 requests take 91 us, with two chunks 121 to 187 (H200,
# 2026-11-22).
TOPK_CHUNK_TOKENS = 2048
LATENT_IN_FLIGHT = 3
# CTA parts of MLA's keys, see parts/partition/cta_parts.py. Positions are counted in fractions of a step, so that equal
# requests are cut at equal positions. A request costs about one step besides its keys, for Q and results. A cut moves
# by up to SNAP_STEPS to the beginning or end of a request. A CTA part grows by up to 1 / UNEVEN if the longest requests
# are then cut evenly. A CTA has up to MOST_CTA_PART_ROUNDS CTA parts if row tiles are many. A CTA part has at least
# LEAST_CTA_PART_STEPS if each CTA gets more than one.
FRACTION_BITS = 5
FRACTIONS = 1 << FRACTION_BITS
REQUEST_STEPS = 1
SNAP_STEPS = 2
UNEVEN = 16
LEAST_CTA_PART_STEPS = 2
MOST_CTA_PART_KEYS = 1 << 32  # of all requests: fractions of their steps have to fit 32 bits
MOST_CTA_PART_ROUNDS = 4
# A launch uses CTA parts if its new tokens are at least this share of batch times the bound. With fewer, CTAs of the
# first row tile have more work than others by that share. Chunks by each request's own length reach 0.8 of the rate of
# CTA parts for equal numbers of new tokens (M1 and M2, H200, 2026-11-24).
LEAST_TOKENS_SHARE = 0.75
# Bytes of an element of an MLA partial: a float16, with a power of two of its own for each half row. Its error is an
# eighth of the error of a bfloat16 result. Half the bytes of float32 are stored and combined.
LATENT_PARTIAL_BYTES = 2
# Row shares of MLA for each partial of ROWS. The work left to combine at the end goes to all warps in small parts.
SHARES = 8
# float32 statistics of a row of a partial: (row max, row sum) of the partial, then of its fan-in group, or MLA's
# inverse scales.
STATISTICS = 4
# The constants below are for swap-AB decode. Keys are cut into leaves, which are combined as a binary tree, see
# parts/combine/tree.py.
SWAP_AB_ROWS = (8, 16, 32)  # of a warpgroup's tile; a CTA with two warpgroups has twice the most
MOST_TREE_COLUMNS, MOST_TREE_ELEMENTS = 256, 32 * 128  # of head dims, and of Q: more would not fit into shared memory
MOST_TILED_COLUMNS = 512  # of head dims, in kernels that cut any number of rows into tiles of few
# Rows over 8-bit and 4-bit caches, and the widest head dim with these rows. 16 rows of 256 columns spill 11 to 125
# registers in a step.
EIGHT_BIT_SWAP_AB_ROWS = {8: 512, 16: 128, 32: 128, ROWS: 128}
LATENT_SWAP_AB_ROWS = 16  # of MLA
LEAF_TILE = 64  # keys of a tile in shared memory
# KV tiles of a leaf. More tiles pay off if tiles are small, or if combining leaves of many rows takes long. 32 x 8192
# tokens with 32 rows take 258 instead of 263 us, with 8 rows of 8 bits 128 instead of 131. With 8 rows of 16 bits the
# gain would be 0.6 %, with half the CTAs for 1 x 1024 tokens. MLA has 8 tiles, because its nodes are large beside its
# keys. With 4 tiles 128 x 4096 tokens and 16 heads take 156 instead of 151 us, but 1 x 4096 tokens 19 instead of 27
# (H200, 2026-11-23).
LEAF_TILES, MORE_LEAF_TILES, LATENT_LEAF_TILES = 2, 4, 8
LATENT_LEAF_TOKENS = LEAF_TILE * LATENT_LEAF_TILES
# Levels of the tree, at most, that a CTA accumulates in registers when two warpgroups share the rows. Shared memory has
# room for one level of such large nodes. A request with up to 2^FIRST_LEAVES leaves accumulates none.
ACCUMULATED_LEVELS, FIRST_LEAVES = 2, 3
LATENT_REGISTER_LEVELS = 1  # of MLA's tree, in registers of the warpgroup that combines
LEAST_SMEM_LEVELS = 1  # where rows are in tiles of few, however many there are
MOST_NODES_BYTES = 54 << 10  # of shared memory, for levels of the tree
# Bytes of K and V that a launch still finds in the 50 MB L2 cache after a launch that read the same keys. Larger K and
# V are marked evict-first. 1 x 8192 tokens, 34 MB, launch after launch: 13.1 us, and 16.3 with evict-first; 256 x 1024,
# 1.1 GB: 249 and 242 us; MLA with 16 heads, 1 x 4096 tokens, 5 MB: 23.7 and 27.3 us, 8 x 4096: 28.3 and 26.7 (H200,
# 2026-11-23).
RESIDENT_BYTES = 34 << 20
# CTAs on a multiprocessor, by the bytes of an element of K and V. While one CTA waits for memory or for its other
# warps, the other one dequantizes. 32 x 8192 tokens of 8 bits in leaves of 128 keys took 131 us, with one CTA 157
# (H200, 2026-11-23).
CTAS_PER_SM = {1: 2, HALFWORD_BYTES: 1}
OWN_SHARE = 8  # 1 / 8 of a CTA's equal share of all leaves is handed out by ticket; the rest is its own
WASTE = 16  # idling for 1 / 16 of a CTA's time costs less than tickets do
# Subtrees in a CTA's equal share at most. Tickets hand out single subtrees, and nodes in memory are subtrees.
MOST_SUBTREES, SUBTREES_BYTES = 16, 16 * 8704
MOST_LARGE_NODE_SUBTREES = 4  # of nodes of many columns, whose fan-in groups are small: see FAN_IN_LEVELS
FAN_IN_BITS, LARGE_NODE_FAN_IN_BITS = 4, 2  # log2 of the nodes in memory that are combined at a time
FAN_IN_LEVELS = 5  # of fan-in groups: 4^5 are more than the subtrees of all CTAs
TICKETS = 3  # int32: work tiles handed out, CTAs or warps done, shares of combines handed out
# int32 counters of a slot: its epoch, the partials that are there (of a fan-in group or of all rows), and the finished
# groups. A row share has seven more: a flag that it may be combined, output token, first row, rows, chunk, chunks,
# partials of a chunk.
SLOT_COUNTERS = 10


def chunk_tokens(columns: int, latent: bool = False, element_bytes: int = HALFWORD_BYTES) -> int:
    """Return the keys of a whole chunk, a power of two. ``latent`` as in MLA, where the value is part of the key."""
    if latent:
        return LATENT_CHUNK_TOKENS
    return max(power_of_two_in(CHUNK_ELEMENTS // columns), MIN_CHUNK_TOKENS) * HALFWORD_BYTES // element_bytes


def tree_columns(tiled: bool) -> int:
    """Return the widest head dim of kernels with a tree; ``tiled`` as in :func:`scratch_bytes`."""
    return MOST_TILED_COLUMNS if tiled else MOST_TREE_COLUMNS


def tree_rows(columns: int, element_bytes: int = HALFWORD_BYTES, tiled: bool = False) -> tuple[int, ...]:
    """Return the rows of tiles for which there are kernels; ``tiled`` as in :func:`scratch_bytes`."""
    if element_bytes == 1:
        rows = tuple(m for m, most in EIGHT_BIT_SWAP_AB_ROWS.items() if columns <= most)
        return rows[:1] if tiled else rows
    if columns > tree_columns(tiled):
        return ()
    rows = tuple(m for m in SWAP_AB_ROWS if m * columns <= MOST_TREE_ELEMENTS)
    return (*rows, ROWS) if not tiled and SWAP_AB_ROWS[-1] in rows else rows


def tree_warpgroups(rows: int) -> int:
    """Return the warpgroups that share the ``rows`` of a tile in kernels with a tree."""
    return 2 if rows > SWAP_AB_ROWS[1] else 1


def ctas_per_sm(rows: int, columns: int, element_bytes: int = HALFWORD_BYTES) -> int:
    """Return the CTAs on a multiprocessor of kernels with a tree for tiles of ``rows`` rows and values of ``columns``
    columns."""
    shares = tree_warpgroups(rows) == 1 and columns <= MOST_TREE_COLUMNS
    return CTAS_PER_SM[element_bytes] if shares else 1


def leaf_tiles(rows: int, columns: int, element_bytes: int = HALFWORD_BYTES, tiled: bool = False) -> int:
    """Return the KV tiles of a leaf in kernels for ``rows`` rows; ``tiled`` as in :func:`scratch_bytes`."""
    small = element_bytes == 1 or _padded(columns) == BLOCK_COLUMNS
    return MORE_LEAF_TILES if small or (rows >= SWAP_AB_ROWS[-1] and not tiled) else LEAF_TILES


def leaf_tokens(rows: int, columns: int, element_bytes: int = HALFWORD_BYTES, tiled: bool = False) -> int:
    """Return the keys of a leaf."""
    return LEAF_TILE * leaf_tiles(rows, columns, element_bytes, tiled)


def _padded(columns: int) -> int:
    return -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS


def node_bytes(rows: int, columns: int) -> int:
    """Count the bytes of a node of the tree, which holds output in float32, and for each row four warps' (reference,
    sum)."""
    return rows * (4 * _padded(columns) + 32)


def shared_levels(rows: int, columns: int, ctas_per_sm: int = 1) -> int:
    """Return the levels of the tree in shared memory."""
    return MOST_NODES_BYTES // ctas_per_sm // node_bytes(rows, columns)


def fan_in_bits(columns: int) -> int:
    """Return the log2 of the nodes in memory that are combined at a time."""
    return FAN_IN_BITS if columns <= MOST_TREE_COLUMNS else LARGE_NODE_FAN_IN_BITS


def gmem_levels(leaf: int, capacity: int, in_smem: int) -> int:
    """Return the levels of a CTA's tree in global memory, beyond the ``in_smem`` levels, below the root of the
    longest request. Leaves have ``leaf`` keys, requests up to ``capacity``."""
    leaves = -(-max(capacity, 1) // leaf)
    return max((leaves - 1).bit_length() - in_smem, 0)


def share_subtrees(rows: int, columns: int, ctas_per_sm: int = 1) -> int:
    """Count the subtrees in a CTA's equal share: fewer of larger nodes, and where CTAs share a multiprocessor."""
    most = MOST_SUBTREES if columns <= MOST_TREE_COLUMNS else MOST_LARGE_NODE_SUBTREES
    return power_of_two_in(min(SUBTREES_BYTES // node_bytes(rows, columns), most) // ctas_per_sm)


def node_slots(rows: int, row_tiles: int, columns: int, sms: int, ctas_per_sm: int = 1) -> int:
    """Return the slots for nodes that several CTAs combine.

    Each subtree has two, and so has the last one of each of the ``row_tiles`` of all KV heads.
    """
    return 2 * ((share_subtrees(rows, columns, ctas_per_sm) + 1) * sms * ctas_per_sm + row_tiles)


def tree_bytes(
    rows: int, kv_heads: int, columns: int, capacity: int, sms: int, tiled: bool = False, most_ctas: int = 0
) -> int:
    """Return the bytes of scratch for the tree of a launch of up to ``rows`` rows, see :func:`scratch_bytes`."""

    def of(tile: int, width: int, size: int, ctas: int) -> int:
        in_smem = LEAST_SMEM_LEVELS if tiled else shared_levels(tile, width, ctas)
        # Ragged drafts have leaves as short as with the fewest rows.
        in_gmem, tiles = gmem_levels(leaf_tokens(SWAP_AB_ROWS[0], width, size, tiled), capacity, in_smem), 1
        if tiled or tile == max(tree_rows(width, size)):  # more rows take more tiles
            tiles = -(-rows // tile)
        return _nodes_bytes(tile, kv_heads * tiles, width, sms, in_gmem, ctas)

    def ctas(tile: int, width: int, size: int) -> range:
        least = ctas_per_sm(tile, width, size)
        return range(least, max(least, most_ctas if tile == SWAP_AB_ROWS[0] else 0) + 1)

    def tiles(width: int, size: int) -> list[int]:
        all_rows = tree_rows(width, size, tiled)
        most = min((m for m in all_rows if m >= rows), default=max(all_rows, default=0))
        return [m for m in all_rows if m <= most]

    widths = range(BLOCK_COLUMNS, min(_padded(columns), MOST_TILED_COLUMNS) + 1, BLOCK_COLUMNS)
    kinds = [(m, width, size) for width in widths for size in CTAS_PER_SM for m in tiles(width, size)]
    return max(of(*kind, each) for kind in kinds for each in ctas(*kind))


def latent_tree_bytes(row_tiles: int, columns: int, capacity: int, sms: int) -> int:
    """Return the bytes of scratch for the trees of ``row_tiles`` of an MLA launch with up to ``columns`` of output."""
    in_gmem = gmem_levels(LATENT_LEAF_TOKENS, capacity, LATENT_REGISTER_LEVELS)
    widths = range(BLOCK_COLUMNS, _padded(columns) + 1, BLOCK_COLUMNS)
    return max(_nodes_bytes(LATENT_SWAP_AB_ROWS, row_tiles, width, sms, in_gmem) for width in widths)


def _nodes_bytes(rows: int, row_tiles: int, columns: int, sms: int, in_gmem: int, ctas_per_sm: int = 1) -> int:
    """Count the bytes of the nodes that several CTAs combine, and of the ``in_gmem`` levels that each CTA has in
    memory."""
    slots = node_slots(rows, row_tiles, columns, sms, ctas_per_sm)
    return (slots + in_gmem * sms * ctas_per_sm) * node_bytes(rows, columns)


def tree_counter_ints(slots: int, warpgroups: int = 1) -> int:
    """Return the counters of a swap-AB launch, whose ``warpgroups`` share the rows of a tile. All are zero before and
    after it."""
    return TICKETS + FAN_IN_LEVELS * slots * warpgroups


def most_new_tokens(max_q_len: int, tokens: int, group: int) -> int:
    """Return the new tokens of a request that a launch has room for, given the caller's bound.

    No request has more than the ``tokens`` of the whole batch. The bound selects the kernel, so there is always room
    for one full tile of rows: ``group`` heads of each token.
    """
    return min(max_q_len, max(tokens, -(-ROWS // group)))


def slot_rows(rows: int, latent: bool = False, tile_rows: int = ROWS) -> int:
    """Return the rows of a slot, for tiles of ``tile_rows``. MLA stores the rows of a whole warp at a time."""
    return min(-(-rows // WARP_ROWS) * WARP_ROWS if latent else rows, tile_rows)


def slot_bytes(rows: int, columns: int, latent: bool = False) -> int:
    """Return the bytes of scratch of a partial of ``rows``: output and float32 statistics."""
    return rows * (columns * (LATENT_PARTIAL_BYTES if latent else 4) + 4 * STATISTICS)


@dataclass(frozen=True)
class LaunchSizes:
    """Sizes of a launch that decide its slots for partials, and the memory that these take.

    Attributes:
        rows: packed rows of a KV head of a request.
        kv_heads: KV heads.
        columns: output columns of a head.
        capacity: keys of a request at most.
        sms: multiprocessors of the device, or pairs of them if two take each work tile together.
        latent: whether the launch is MLA decode.
        by_cta_parts: whether keys are cut into CTA parts, not into chunks by each request's own length.
        tile_rows: rows of a work tile.
    """

    rows: int
    kv_heads: int
    columns: int
    capacity: int
    sms: int
    latent: bool = False
    by_cta_parts: bool = False
    tile_rows: int = ROWS

    @property
    def needed_slots(self) -> int:
        """Slots without which the launch could not end: the slots of one request, and of chunks in flight beside it."""
        row_tiles = self.kv_heads * -(-max(self.rows, 1) // self.tile_rows)
        if self.by_cta_parts:
            return cta_part_slots(row_tiles, self.sms)
        # Chunks of 16-bit keys are the shortest.
        least = chunk_tokens(self.columns, self.latent) // (1 if self.latent else 2)
        chunks = -(-max(self.capacity, 1) // least) + 1
        if self.latent:
            return min(chunks * row_tiles, max(LATENT_WORK_TILES, 2 * row_tiles)) + LATENT_IN_FLIGHT * self.sms
        return min(chunks, MAX_CHUNKS) * row_tiles + IN_FLIGHT * self.sms

    @property
    def slots(self) -> int:
        """Slots of the launch. More than the needed ones save looking whether they are free."""
        rows = slot_rows(max(self.rows, 1), self.latent, self.tile_rows)
        return max(self.needed_slots, COMFORTABLE_BYTES // slot_bytes(rows, self.columns, self.latent))

    def partial_bytes(self, rows: int) -> int:
        """Return the bytes of the slots, of ``rows`` each."""
        return max(self.needed_slots * slot_bytes(rows, self.columns, self.latent), COMFORTABLE_BYTES)


def scratch_bytes(sizes: LaunchSizes, tiled: bool = False, most_ctas: int = 0) -> int:
    """Return the bytes of scratch of a launch of ``sizes``. It is ``tiled`` if the kernel has a tree for each tile of
    few rows, for any number of rows. Kernels for the fewest rows may have up to ``most_ctas`` CTAs on an SM, if these
    are more than :func:`ctas_per_sm`.

    The result is enough for smaller launches as well. It is therefore not rounded to whole slots.
    """
    rows, kv_heads, common = sizes.rows, sizes.kv_heads, (sizes.columns, sizes.capacity, sizes.sms)
    if sizes.latent:
        tree = latent_tree_bytes(kv_heads * -(-rows // LATENT_SWAP_AB_ROWS) if tiled else kv_heads, *common)
    else:
        tree = tree_bytes(rows, kv_heads, *common, tiled, most_ctas)
    if tiled:
        return tree + ALIGNMENT
    return max(sizes.partial_bytes(slot_rows(rows, sizes.latent, sizes.tile_rows)), tree) + ALIGNMENT


def counter_ints(slots: int) -> int:
    """Return the counters of a launch. All are zero before and after it."""
    return TICKETS + SLOT_COUNTERS * slots


def cta_part_slots(row_tiles: int, ctas: int) -> int:
    """Count the slots of a launch that cuts keys into CTA parts. There are more slots than partials, and with 128 heads
    and eight new tokens they take 30 MB."""
    return 2 * row_tiles + LATENT_IN_FLIGHT * ctas


def cta_parts(row_tiles: int, ctas: int) -> int:
    """Return the number of CTA parts that the keys of all requests are cut into.

    One CTA part for each row tile keeps the most CTAs busy, in one round or in several. A CTA part has two
    partials at most, and all find a slot.
    """
    slots = cta_part_slots(row_tiles, ctas)
    rounds = [k for k in range(1, MOST_CTA_PART_ROUNDS + 1) if k == 1 or k * ctas // row_tiles * row_tiles * 2 <= slots]
    best = max(rounds, key=lambda k: k * ctas // row_tiles * row_tiles / (k * ctas))
    return max(best * ctas // row_tiles, 1)
