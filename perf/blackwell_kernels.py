"""Steps of tcgen05 kernels as descriptions: kernels that are planned, and published kernels of other projects.

``perf/blackwell_plans.py`` and ``perf/calibration.py`` name these descriptions. Bytes and counts follow from shapes,
and latencies of softmax are estimates (:class:`hopwell.perf.steps.Softmax`).
"""

from __future__ import annotations

from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.sm100.prefill.config import Q_TILE_ROWS, Q_TILES
from hopwell.perf.blackwell_rates import MMA_DEPTH_BYTES
from hopwell.perf.model import FACTOR_BYTES, PrefillLoop
from hopwell.perf.steps import Arrival, Chain, Instructions, Mma, Operation, Softmax, Step, Traffic

KEYS = 128  # of a step, unless a kernel states another number
CORRECTION_ISSUE = 32  # instructions of a correction warp that rescales nothing, as in the compiled kernel
MMA_ISSUE = 8  # instructions for each MMA
WIDENING = 1.9  # instructions for each element that a warp widens to 16 bits
LATENT_DIMS = (576, 512)
PACKED_ROW_BYTES = 656  # 512 e4m3, 4 scales, 64 elements of 16 bits
NVFP4_BITS = 4.5  # with a scale of 8 bits for 16 elements


def _depth(elements: int, bits: int) -> int:
    """Return the number of MMA over ``elements`` of the reduction."""
    return elements * bits // 8 // MMA_DEPTH_BYTES


def prefill(
    dims: tuple[int, int],
    bits: int,
    *,
    keys: int = KEYS,
    half_rows: bool = False,
    eighths: int = 2,
    early: float = 0.5,
    reads_twice: bool = True,
) -> PrefillLoop:
    """Describe prefill of two query tiles of 128 rows with P in tensor memory.

    Args:
        dims: head dims of Q and K, and of V.
        bits: of an element of Q, K, V and P.
        keys: of a step.
        half_rows: four softmax warpgroups; a thread has half of a row's columns, all in registers.
        eighths: of exp2, evaluated as polynomials.
        early: share of a step's P whose product starts before the rest is ready.
        reads_twice: whether late columns of S are read from tensor memory again.
    """
    rows, threads = Q_TILES * Q_TILE_ROWS, 2 if half_rows else 1
    score = Mma(_depth(dims[0], bits), Q_TILE_ROWS, keys)
    value = Mma(_depth(keys, bits), Q_TILE_ROWS, dims[1], a_in_tensor_memory=True, signals=False)
    late = Mma(round(value.count * (1 - early)), Q_TILE_ROWS, dims[1], a_in_tensor_memory=True, signals=False)
    loaded = keys * sum(dims) * bits // 8
    moved = Traffic(shared=loaded + FACTOR_BYTES, l2=loaded)
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
        return Step(keys, work, (*[score, value] * Q_TILES, moved, whole, issue), chains)

    # O leaves 32 columns at a time: read, scaled, converted, staged and stored.
    store = Instructions(cycles=dims[1] // LANES * 250)
    q_bytes = rows * dims[0] * bits // 8
    return PrefillLoop(step(False), step(True), softmax(True, early), score, value, q_bytes, store, bits)


def mla(bits: int, q_in_tensor_memory: float = 0.0, *, packed_rows: bool = False) -> Step:
    """Describe MLA of 128 heads on a pair of CTAs with 64 rows each; times and bytes are of one CTA.

    Args:
        bits: of an element as it is multiplied.
        q_in_tensor_memory: share of the columns of Q that are in tensor memory.
        packed_rows: the cache has rows of 656 bytes, which warps widen to 16 bits.
    """
    rows, (dim, rank) = 128, LATENT_DIMS
    depth = _depth(dim, bits)
    resident = round(depth * q_in_tensor_memory)
    scores = [Mma(depth - resident, rows, KEYS, pair=True)]
    if resident:
        scores.insert(0, Mma(resident, rows, KEYS, a_in_tensor_memory=True, pair=True, signals=False))
    value = Mma(2 * _depth(KEYS, bits), rows, rank // 2, pair=True, signals=False)
    # A CTA loads half of the keys for Q K^T, and half of the columns of all keys for P V; the latter from L2.
    elements = [KEYS // 2 * dim, KEYS * rank // 2]
    key_bytes, value_bytes = (count * bits / 8 for count in elements)
    p_bytes = rows // 2 * KEYS * bits / 8
    moved: list[Operation] = [Traffic(shared=key_bytes + value_bytes + p_bytes, l2=value_bytes, memory=key_bytes)]
    if packed_rows:
        narrow = KEYS // 2 * PACKED_ROW_BYTES, KEYS * (rank // 2 + 8)
        widened = sum(elements) - KEYS // 2 * (dim - rank)
        moved = [
            Traffic(shared=key_bytes + value_bytes + p_bytes + 2 * sum(narrow), l2=narrow[1], memory=narrow[0]),
            Instructions(issue=WIDENING * widened / WARPGROUP),
        ]
    softmax = Softmax(KEYS // 2, WARPGROUP, p_bits=bits, exchanges=True)
    chain = Chain((*scores, softmax, Arrival(), value), in_flight=2)  # S of the next step precedes P V
    issue = Instructions(issue=CORRECTION_ISSUE + MMA_ISSUE * (depth + value.count))
    work = 2 * rows // 2 * KEYS * (dim + rank)
    return Step(KEYS, work, (*scores, value, softmax, issue, *moved), (chain,))


def leaves(
    dims: tuple[int, int], rows: int, bits: float = 16, *, latent: bool = False, in_flight: int = 128 << 10
) -> Step:
    """Describe decode with keys as M: S^T = K Q^T and O^T = V^T P^T, with ``rows`` query rows as N.

    Args:
        dims: head dims of K and of V.
        rows: query heads of a KV head, times new tokens.
        bits: of a cached element, scales included; below 8 warps widen K into tensor memory and V into shared memory.
        latent: V is the first columns of K, as in MLA.
        in_flight: bytes that stages of K and V request from memory.
    """
    narrow = bits < 8
    wide = 16 if narrow else int(bits)
    columns = max(rows, 8 if wide == 16 else 16)  # an 8-bit operand with M or N contiguous needs N 16
    score = Mma(_depth(dims[0], wide), Q_TILE_ROWS, columns, a_in_tensor_memory=narrow)
    value = Mma(_depth(KEYS, wide) * dims[1] // Q_TILE_ROWS, Q_TILE_ROWS, columns)
    elements = KEYS * (dims[0] if latent else sum(dims))
    loaded = elements * bits / 8
    p_bytes = 2 * KEYS * columns * wide / 8
    moved: list[Operation] = [Traffic(shared=loaded + p_bytes, memory=loaded, in_flight=in_flight)]
    if narrow:  # read again, and V written; K goes to tensor memory
        moved.append(Traffic(shared=loaded + KEYS * dims[1] * 2))
        moved.append(Instructions(issue=WIDENING * elements / WARPGROUP, stored=KEYS * dims[0] * 2))
    # A leaf's softmax reads S by fragments and exchanges maxima of four warps: synchronisation, not arithmetic.
    leaf = KEYS * (1 if bits == 16 else 2)
    softmax = Instructions(issue=2.0 * rows * WARPS, cycles=(800 + 8.5 * rows) * KEYS / leaf)
    chain = Chain((score, softmax, Arrival(), value), in_flight=2)
    return Step(KEYS, 2 * rows * KEYS * sum(dims), (score, value, softmax, *moved), (chain,))
