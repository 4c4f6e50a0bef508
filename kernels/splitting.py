"""How decode cuts the keys of a request, and the memory that the pieces need. Plain numbers, host and device."""

# A chunk takes about 16 us of a CTA: a piece (4 KiB at 8 rows and 128 columns) is little beside its keys and values
# (512 KiB), and 1024 tokens are one chunk without a piece. Requests of middle length have chunks of half of it, without
# which there would not be enough of them for all SMs. bf16, 64/8 heads, us with halves and with whole chunks (H200,
# 2026-11-22): 256 x 1024 tokens 258 and 238, 1 x 1024 14.3 and 15.7; 1 x 4096 15.4 and 19.2, 128 x 2048 253 and 258;
# 4 x 16384 78 and 72, 32 x 8192 253 and 250.
CHUNK_ELEMENTS = 1024 * 128  # of 16 bits of K, for narrow heads
MIN_CHUNK_TOKENS = 1024
LONG_TOKENS = 8192  # from here on, and up to one chunk, chunks are whole
MAX_CHUNKS = 256  # of a request; longer requests have longer chunks
DOUBLINGS = 20  # 2^31 tokens in no more than MAX_CHUNKS, or two latent ones
GROUP_PIECES = 16  # pieces that are merged at a time, in two levels: first those of a group, then the groups

ROWS = 64  # packed rows of a tile, at most
WARP_ROWS = 16  # of which a warp holds
ALIGNMENT = 16  # bytes
COMFORTABLE_BYTES = 8 << 20
# Slots for each CTA besides those of one request: with 2 of them, requests waited for the merge of those before. 32 x
# 8192 tokens and 32 rows took 498 us; with 8, cache hints and dependent launches together 313 (H200, 2026-11-21).
UNDER_WAY = 8
# Of MLA. Twice as many tokens are 7 % faster at 32 x 8192 tokens and 128 heads, and take 70 instead of 43 us for a
# single request of 4096 (H200, 2026-11-22).
LATENT_CHUNK_TOKENS = 1024
# Of a long request and all of its rows: nearly as many as a GPU has multiprocessors. With more of them, and shorter,
# 1 x 65536 tokens, 128 heads and two new tokens took 93 to 100 instead of 83 us (H200, 2026-11-22).
LATENT_UNITS = 128
# Of lists. The usual 2048 entries are one chunk: 64 requests take 91 us, with two chunks 121 to 187 (H200, 2026-11-22).
LISTED_CHUNK_TOKENS = 2048
LATENT_UNDER_WAY = 3
# Of an element of a piece of MLA: float16, each half row times a power of two of its own. Its error is an eighth of
# that of a bfloat16 result, and half as many bytes are stored and merged.
LATENT_PIECE_BYTES = 2
SHARES = 8  # of MLA, that a piece of ROWS comes with: what is left to merge at the end goes to all warps in small parts
# float32 of a row and piece: (reference, sum) of the piece, then those of its group, or of MLA inverse scales
STATISTICS = 4
TICKETS = 3  # int32: units handed out, CTAs or warps done, shares of merges handed out
# int32 of a slot: its generation, pieces that are there (of a group, or of all rows), groups or shares that are done;
# of a share when it may be merged, and which it is: output token, first row, rows, chunk, chunks
SLOT_COUNTERS = 9


def chunk_tokens(columns: int, latent: bool = False, element_bytes: int = 2) -> int:
    """Keys of a whole chunk, a power of two. ``latent`` as in MLA, where the value is part of the key."""
    if latent:
        return LATENT_CHUNK_TOKENS
    return max(1 << ((CHUNK_ELEMENTS // columns).bit_length() - 1), MIN_CHUNK_TOKENS) * 2 // element_bytes


def slot_rows(rows: int, latent: bool = False) -> int:
    """Rows of a slot: those of a tile, which MLA stores a whole warp's at a time."""
    return min(-(-rows // WARP_ROWS) * WARP_ROWS if latent else rows, ROWS)


def slot_bytes(rows: int, columns: int, latent: bool = False) -> int:
    """Scratch of a piece of ``rows``: output, and float32 statistics."""
    return rows * (columns * (LATENT_PIECE_BYTES if latent else 4) + 4 * STATISTICS)


def slot_count(rows: int, kv_heads: int, columns: int, capacity: int, ctas: int, latent: bool = False) -> int:
    """Slots for the pieces of ``rows`` packed rows of each of ``kv_heads``, with ``columns`` of output and at most
    ``capacity`` keys a request, on ``ctas`` multiprocessors.

    Those of one request and some for what is under way besides are a must. More of them save looking whether they are
    free.
    """
    needed = _needed_slots(rows, kv_heads, columns, capacity, ctas, latent)
    return max(needed, COMFORTABLE_BYTES // slot_bytes(slot_rows(rows, latent), columns, latent))


def _needed_slots(rows: int, kv_heads: int, columns: int, capacity: int, ctas: int, latent: bool) -> int:
    # Chunks of 16-bit keys are the shortest.
    least = chunk_tokens(columns, latent) // (1 if latent else 2)
    # Of requests with fewer new tokens than others there are as many units, some of them empty.
    chunks = min(-(-max(capacity, 1) // least) + 1, LATENT_UNITS if latent else MAX_CHUNKS)
    return chunks * kv_heads * -(-rows // ROWS) + (LATENT_UNDER_WAY if latent else UNDER_WAY) * ctas


def scratch_bytes(rows: int, kv_heads: int, columns: int, capacity: int, ctas: int, latent: bool = False) -> int:
    """Memory for the pieces of a launch: ``rows`` packed rows of each of ``kv_heads``, and ``capacity`` keys a request
    at most, on ``ctas`` multiprocessors.

    What is enough for a launch is enough for smaller ones: so it is not that of a whole number of comfortable slots.
    """
    needed = _needed_slots(rows, kv_heads, columns, capacity, ctas, latent)
    return max(needed * slot_bytes(slot_rows(rows, latent), columns, latent), COMFORTABLE_BYTES) + ALIGNMENT


def counter_ints(slots: int) -> int:
    """Counters of a launch, all zero before and after it."""
    return TICKETS + SLOT_COUNTERS * slots
