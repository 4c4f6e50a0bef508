"""Steps of tcgen05 kernels as descriptions: kernels that are planned, and published kernels of other projects.

``perf/blackwell_plans.py`` and ``perf/calibration.py`` name these descriptions. Bytes and counts follow from shapes,
and latencies of softmax are estimates (:class:`hopwell.perf.steps.Softmax`).
"""

from __future__ import annotations

import enum
from dataclasses import replace

from hopwell.kernels.config.base import CTAS
from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.sm100.prefill.config import Q_TILE_ROWS, Q_TILES
from hopwell.perf.blackwell_rates import MMA_DEPTH_BYTES
from hopwell.perf.model import FACTOR_BYTES, PrefillLoop
from hopwell.perf.steps import (
    LOAD_CHAIN,
    OUTPUT_CHAIN,
    Arrival,
    Chain,
    Instructions,
    Load,
    Mma,
    Operation,
    Rescale,
    Softmax,
    Step,
    Traffic,
)

KEYS = 128  # of a step, unless a kernel states another number
CORRECTION_ISSUE = 32  # instructions of a correction warp that rescales nothing, as in the compiled kernel
MMA_ISSUE = 8  # instructions for each MMA
LATENT_DIMS = (576, 512)
PACKED_ROW_BYTES = 656  # 512 e4m3, 4 scales, 64 elements of 16 bits
# Steps of MLA in shared memory beside Q and P, by bits, if half of V is in place. 17 boxes of 8 KiB are 2 x 8 of latent
# columns and one of RoPE. In 8 bits there are 22 boxes: 4 x 4, and 6 of RoPE.
STEPS_IN_PLACE = {16: 2, 8: 4}
NVFP4_BITS = 4.5  # with a scale of 8 bits for 16 elements

# Instructions for each element of K and V that a warp dequantizes to 16 bits. e4m3: counted in the machine code of
# decode by mma.sync. NVFP4: cvt.rn.f16x2.e2m1x2 and a product with the scale, and half an instruction more for V, whose
# words pair two keys. Decode by mma.sync has no such conversion, and its machine code has 2.04 (2026-11-26).
DEQUANT = {8: 0.65, NVFP4_BITS: 1.25}
TO_E4M3 = 0.5  # more for each element, from float16 to e4m3
DEQUANT_ACCESS = 0.25  # for each element: load, store and addresses
PACKED_DEQUANT = 1.9  # of an element of a packed row, to bf16

# Decode: instructions of a warp for a leaf, from scores to weights and from outputs to the tree. The second number
# is added for each row of its tile. Counted in the machine code of decode by mma.sync without its products and
# conversions (2026-11-26).
LEAF_ISSUE, LEAF_ROW_ISSUE = 210, 27.5
LEAST_PRODUCT_ROWS = 16  # N of an MMA with M 128; M 64 takes 8
MOST_HALF_TILE_ROWS = 32  # packed rows up to which scores of 64 keys are an MMA of their own, as on Hopper


def _depth(elements: int, bits: int) -> int:
    """Return the number of MMA over ``elements`` of the reduction."""
    return elements * bits // 8 // MMA_DEPTH_BYTES


def _dequant(elements: float, cache_bits: float, bits: int) -> Operation:
    """Describe the instructions that dequantize ``elements`` of K and V to operands of ``bits`` bits."""
    each = DEQUANT[cache_bits] + DEQUANT_ACCESS + TO_E4M3 * (bits == 8)
    return Instructions(issue=each * elements / WARPGROUP)


def prefill(
    dims: tuple[int, int],
    bits: int,
    *,
    keys: int = KEYS,
    half_rows: bool = False,
    eighths: int = 2,
    early: float = 0.5,
    reads_twice: bool = True,
    cache_bits: float = 0,
) -> PrefillLoop:
    """Describe prefill of two query tiles of 128 rows with P in tensor memory.

    Args:
        dims: head dims of Q and K, and of V.
        bits: of an element of Q, K, V and P, as multiplied.
        keys: of a step.
        half_rows: four softmax warpgroups; a thread has half of a row's columns, all in registers.
        eighths: of exp2, evaluated as polynomials.
        early: share of a step's P whose product starts before the rest is ready.
        reads_twice: whether late columns of S are read from tensor memory again.
        cache_bits: of a cached element, scales included, if a warpgroup dequantizes K and V in shared memory.
    """
    rows, threads = Q_TILES * Q_TILE_ROWS, 2 if half_rows else 1
    score = Mma(_depth(dims[0], bits), Q_TILE_ROWS, keys)
    value = Mma(_depth(keys, bits), Q_TILE_ROWS, dims[1], a_in_tensor_memory=True, signals=False)
    late = replace(value, count=round(value.count * (1 - early)))
    elements = keys * sum(dims)
    loaded = elements * (cache_bits or bits) / 8
    moved: list[Operation] = [Traffic(shared=loaded + FACTOR_BYTES, l2=loaded)]
    if cache_bits:  # lanes read the narrow tile, and write the tile to multiply
        moved += [Traffic(shared=loaded + elements * bits / 8), _dequant(elements, cache_bits, bits)]
    issue = Instructions(issue=Q_TILES * (CORRECTION_ISSUE + MMA_ISSUE * (score.count + value.count)))

    def softmax(masked: bool, share: float = 1.0) -> Softmax:
        again = keys // 2 if reads_twice and not half_rows else 0
        columns, lanes = keys // threads, rows * threads
        return Softmax(columns, lanes, eighths, bits, threads, half_rows, again, masked, share)

    def step(masked: bool) -> Step:
        whole = softmax(masked)
        chains = (
            Chain((score, softmax(masked, early), Arrival(), value)),
            Chain((score, whole, Arrival(), late)),
        )
        work = 2 * rows * keys * sum(dims)
        return Step(keys, work, (*[score, value] * Q_TILES, *moved, whole, issue), chains)

    # O leaves 32 columns at a time: read, scaled, converted, staged and stored.
    store = Instructions(cycles=dims[1] // LANES * 250)
    q_bytes = rows * dims[0] * bits // 8
    return PrefillLoop(step(False), step(True), softmax(True, early), score, value, q_bytes, store, bits)


def pair_prefill(dim: int, bits: int, *, eighths: int = 2) -> PrefillLoop:
    """Describe prefill by a pair of CTAs with a query tile of 128 rows each, for head dims whose O fills half of tensor
    memory. Times and bytes are of one CTA.

    A CTA has half of K and half of V of each step. S has two buffers, so that S of the next step precedes P V, and P
    takes the place of S. Two threads share a row.
    """
    rows, threads = CTAS * Q_TILE_ROWS, 2
    score = Mma(_depth(dim, bits), rows, KEYS, pair=True)
    value = Mma(_depth(KEYS, bits), rows, dim, a_in_tensor_memory=True, pair=True, signals=False)
    loaded = KEYS * 2 * dim * bits / 8 / CTAS
    moved = Traffic(shared=loaded + FACTOR_BYTES / Q_TILES, l2=loaded)
    issue = Instructions(issue=CORRECTION_ISSUE + MMA_ISSUE * (score.count + value.count))

    def softmax(masked: bool) -> Softmax:
        return Softmax(KEYS // threads, Q_TILE_ROWS * threads, eighths, bits, 1, True, masked=masked)

    def step(masked: bool) -> Step:
        chains = (
            Chain((score, softmax(masked), Arrival(), value), in_flight=2),
            Chain((replace(value, signals=True), Rescale(dim, LANES), Arrival()), name=OUTPUT_CHAIN),
        )
        operations = (score, value, moved, softmax(masked), Rescale(dim, LANES), issue)
        return Step(KEYS, 2 * Q_TILE_ROWS * KEYS * 2 * dim, operations, chains)

    store = Instructions(cycles=dim // LANES * 250 / Q_TILES)  # of one query tile
    q_bytes = Q_TILE_ROWS * dim * bits // 8
    return PrefillLoop(step(False), step(True), softmax(True), score, value, q_bytes, store, bits, CTAS)


def mla(
    bits: int,
    q_in_tensor_memory: float = 0.0,
    *,
    packed_rows: bool = False,
    in_place: Order | None = None,
    rescaled_at_once: int = 128,
) -> Step:
    """Describe MLA of 128 heads on a pair of CTAs with 64 rows each; times and bytes are of one CTA.

    Args:
        bits: of an element as it is multiplied.
        q_in_tensor_memory: share of the columns of Q that are in tensor memory.
        packed_rows: the cache has rows of 656 bytes, which warps dequantize to 16 bits.
        in_place: order of the products, if P V reads a CTA's own columns of its own keys where Q K^T has read them. The
            other half of its V is loaded over the rest of K.
        rescaled_at_once: columns of O that a thread rescales at once.
    """
    rows, (dim, rank) = 128, LATENT_DIMS
    depth = _depth(dim, bits)
    resident = round(depth * q_in_tensor_memory)
    scores = [Mma(depth - resident, rows, KEYS, pair=True)]
    if resident:
        scores.insert(0, Mma(resident, rows, KEYS, a_in_tensor_memory=True, pair=True, signals=False))
    value = Mma(2 * _depth(KEYS, bits), rows, rank // 2, pair=True, signals=False)
    # A CTA loads half of the keys for Q K^T, and half of the columns of all keys for P V; the latter from L2.
    elements = [KEYS // 2 * dim, KEYS * rank // 2 // (2 if in_place else 1)]
    key_bytes, value_bytes = (count * bits / 8 for count in elements)
    p_bytes = rows // 2 * KEYS * bits / 8
    moved: list[Operation] = [Traffic(shared=key_bytes + value_bytes + p_bytes, l2=value_bytes, memory=key_bytes)]
    if packed_rows:
        narrow = KEYS // 2 * PACKED_ROW_BYTES, KEYS * (rank // 2 + 8)
        dequantized = sum(elements) - KEYS // 2 * (dim - rank)
        moved = [
            Traffic(shared=key_bytes + value_bytes + p_bytes + 2 * sum(narrow), l2=narrow[1], memory=narrow[0]),
            Instructions(issue=PACKED_DEQUANT * dequantized / WARPGROUP),
        ]
    softmax = Softmax(KEYS // 2, WARPGROUP, p_bits=bits, exchanges=True)
    # In e4m3 each step has references of its own.
    rescale = Rescale(rank // 2, rescaled_at_once, always=bits == 8)
    chains = (
        Chain((*scores, softmax, Arrival(), value), in_flight=2),  # S of the next step precedes P V
        Chain((replace(value, signals=True), rescale, Arrival()), name=OUTPUT_CHAIN),
        *_reloads(in_place, bits, scores, value, softmax),
    )
    issue = Instructions(issue=CORRECTION_ISSUE + MMA_ISSUE * (depth + value.count))
    work = 2 * rows // 2 * KEYS * (dim + rank)
    return Step(KEYS, work, (*scores, value, softmax, rescale, issue, *moved), chains)


class Order(enum.Enum):
    """Order of the products of MLA, if a part of V is where K was."""

    STEPS = "steps"  # S of a step, then P V of the step before it, as in the compiled kernel
    BOXES = "boxes"  # a pair of boxes for S, then one for P V of the step before it, by turns


def _reloads(order: Order | None, bits: int, scores: list[Mma], value: Mma, softmax: Softmax) -> tuple[Chain, ...]:
    """Return the chain from the products of a step to the products of the next step in the same boxes.

    P V releases a pair of boxes at a time, and K of a later step is loaded into them.
    """
    if order is None:
        return ()
    first = replace(value, count=value.count // 4, signals=True)  # of four pairs of boxes
    load, held = Load(), STEPS_IN_PLACE[bits]
    if order is Order.STEPS:  # P V follows S of the next step, and S of the step after it waits for its own K
        return (Chain((*(replace(one, signals=False) for one in scores), first, load), held - 1, LOAD_CHAIN),)
    others = replace(value, count=value.count * 3 // 4, signals=False)
    return (Chain((*scores, others, softmax, Arrival(), first, load), held, LOAD_CHAIN),)


def leaves(
    dims: tuple[int, int], rows: int, bits: float = 16, *, latent: bool = False, in_flight: int = 128 << 10
) -> Step:
    """Describe decode with keys as M: S^T = K Q^T and O^T = V^T P^T, with ``rows`` query rows as N.

    Warps dequantize K and V^T of narrow caches into tensor memory, as operand A of 16-bit products. Latent keys of 8
    bits are multiplied as they are.

    Args:
        dims: head dims of K and of V.
        rows: query heads of a KV head, times new tokens.
        bits: of a cached element, scales included.
        latent: V is the first columns of K, as in MLA.
        in_flight: bytes that stages of K and V request from memory.
    """
    narrow = bits < 16 and not latent
    wide = 16 if narrow else int(bits)
    halves = 1 if narrow or wide == 8 or rows > MOST_HALF_TILE_ROWS else 2  # MMA for the M of one of 128
    columns = rows if halves == 2 else max(rows, LEAST_PRODUCT_ROWS)
    shape = (Q_TILE_ROWS // halves, columns, narrow)
    score = Mma(halves * _depth(dims[0], wide), *shape)
    value = Mma(_depth(KEYS, wide) * -(-dims[1] // shape[0]), *shape)
    elements = KEYS * (dims[0] if latent else sum(dims))
    loaded = elements * bits / 8
    moved: list[Operation] = [
        Traffic(shared=loaded + KEYS * columns * wide / 8, memory=loaded, in_flight=in_flight),
        Instructions(issue=MMA_ISSUE * (score.count + value.count)),
    ]
    if narrow:
        moved += [
            Traffic(shared=loaded),
            Instructions(stored=elements * wide / 8),
            _dequant(elements, bits, wide),
        ]
    # A leaf's softmax reads S by fragments and exchanges maxima of four warps: synchronisation, not arithmetic.
    leaf = KEYS * (1 if bits == 16 else 2)
    per_step = KEYS / leaf
    softmax = Instructions(issue=(LEAF_ISSUE + LEAF_ROW_ISSUE * rows) * per_step, cycles=(800 + 8.5 * rows) * per_step)
    chain = Chain((score, softmax, Arrival(), value), in_flight=2)
    return Step(KEYS, 2 * rows * KEYS * sum(dims), (score, value, softmax, *moved), (chain,))
