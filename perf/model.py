"""A performance model of tcgen05 prefill: the rate of a GPU whose units each run at their published rate.

Nothing was measured here. The steady-state step takes the time of its busiest unit, or of the chain of one query tile
(S, softmax, P V, the next S). The chain restarts only after its end. A work tile adds the part of its first softmax
that overlaps with nothing. A launch adds the time that its CTAs wait for each other at the end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hopwell.kernels.capability.shipped import kernels_to_ship
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.config.decode import NARROW_TYPES
from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.launch.geometry import head_swizzle_heads
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.sm100.prefill.config import HALVES, Q_TILE_ROWS, Q_TILES, Sm100PrefillConfig
from hopwell.kernels.support import BLACKWELL, TYPES_16BIT, TYPES_FP8
from hopwell.perf.blackwell_rates import B200, DENSE_BF16, Rates
from hopwell.perf.ceilings import READ
from hopwell.perf.decode_workloads import Decode
from hopwell.perf.kernel_work import Stretch, Work
from hopwell.perf.prefill_workloads import PREFILL, Prefill
from hopwell.perf.quantized import E4M3
from hopwell.perf.sass import Sass, Timing, issue_times
from hopwell.perf.steps import (
    ALU,
    CONVERSION,
    FMA,
    LOAD_CHAIN,
    MUFU,
    Arrival,
    Busy,
    Chain,
    Instructions,
    Mma,
    Operation,
    Step,
    StepTime,
    Traffic,
)

CASES = ("P1", "P2", "P3", "P4", "P6", "P7", "P1-fp8", "P2-fp8", "P1-fp8-cache", "P1-nvfp4-cache")
EXCHANGED_BYTES = 2 * 4  # of a softmax thread in a step: a maximum, written and read
FACTOR_BYTES = 2 * Q_TILES * Q_TILE_ROWS * 4  # of a step: a factor for each row, written and read


@dataclass(frozen=True)
class PrefillLoop:
    """A prefill kernel as data: its step, and the ends of a work tile of two query tiles. Times are of one of the
    ``ctas`` CTAs that share a work tile."""

    steady: Step
    masked: Step  # the step with a mask
    first: Operation  # softmax of a work tile's first step, until the first P
    score: Mma  # of a query tile
    value: Mma  # the same, followed by an S
    q_bytes: int  # of a CTA's query tiles
    store: Operation  # of O, half of a CTA's query tiles
    bits: int = 16  # of an element of Q, K and V
    ctas: int = 1
    scores_ahead: bool = False  # whether the first S of a work tile is issued behind the last P V of the one before


@dataclass(frozen=True)
class KernelModel:
    """Times of a kernel's parts in cycles."""

    steady: StepTime
    masked: StepTime
    mma: float  # tensor cores of a step at the dense rate
    drain: float  # of a work tile: from first S to first P, with the tensor cores idle
    q_wait: float  # until the query tiles arrive, beyond the hidden part
    store: float  # until tensor memory has been stored, beyond the hidden part
    keys: int  # of a step
    bits: int = 16
    ctas: int = 1  # that share a work tile

    @property
    def per_work_tile(self) -> float:
        return self.drain + self.q_wait + self.store

    @property
    def flop(self) -> int:
        """FLOP per cycle and SM at the dense rate."""
        return B200.mma_flop * 16 // self.bits


def kernel_model(loop: PrefillLoop, rates: Rates) -> KernelModel:
    """Model the times of a kernel."""
    steady, masked = loop.steady.time(rates), loop.masked.time(rates)
    score, value = loop.score.latency(rates), loop.value.latency(rates)
    signal = score - replace(loop.score, signals=False).latency(rates)
    softmax = signal + loop.first.latency(rates) + Arrival().latency(rates)
    drain = 0.0 if loop.scores_ahead else softmax
    # The load of the next Q starts at the last S. Q is needed after the last softmax and one product with V.
    q_wait = rates.tma_load(loop.q_bytes) - (softmax + value)
    # The store of O starts after its last product. Its tensor memory is needed again after the other tile's product,
    # the next S and its softmax.
    store = Q_TILES * loop.store.latency(rates) - (steady.cycles / Q_TILES + score + softmax)
    ends = drain, max(q_wait, 0.0), max(store, 0.0)
    kernel = KernelModel(steady, masked, 0.0, *ends, loop.steady.keys, loop.bits, loop.ctas)
    return replace(kernel, mma=loop.steady.flop / kernel.flop)


@dataclass(frozen=True)
class Code:
    """Compiled code of a warp of each sub-partition, until one of its last arrivals.

    MUFU, FMA, conversions and bytes are counted in PTX. Only machine code shows the remaining integer instructions and
    the maxima with three operands.
    """

    stretch: Stretch
    lanes: int
    repeated: float = 1.0  # executions in a step
    until: int = -1  # index of the arrival that the latency counts to
    loaded: float = 0.0  # bytes of a lane's tensor memory
    stored: float = 0.0
    sharers: int = 1  # warps of a sub-partition that execute it at the same time

    def busy(self, rates: Rates) -> Busy:
        lanes, ptx = self.repeated * self.lanes, self.stretch.ptx
        results = {unit: lanes * ptx[unit] for unit in (MUFU, FMA, CONVERSION)} | {ALU: lanes * self.stretch.sass[ALU]}
        issue = self.repeated * len(self.stretch.code) * self.lanes / WARPGROUP
        return Instructions(results, issue, lanes * self.loaded, lanes * self.stored).busy(rates)

    def latency(self, rates: Rates) -> float:
        code = self.stretch.code
        arrivals = [(time, i) for i, time in enumerate(_times(code, rates)) if code[i].root == "SYNCS"]
        (begin, first), (end, last) = arrivals[0], arrivals[self.until]
        # Warps that share a sub-partition take turns at its issue slots and at its MUFU.
        exponentials = sum(one.root == "MUFU" for one in code[first:last])
        busy = self.sharers * max(last - first, exponentials * LANES * rates.issue / rates.mufu)
        return max(end - begin, busy)


def compiled(does: Work, config: Sm100PrefillConfig, rates: Rates) -> PrefillLoop:
    """Describe a compiled kernel by what its code does."""
    lanes, rows = Q_TILES * WARPGROUP, Q_TILES * Q_TILE_ROWS
    threads = HALVES * lanes  # of softmax
    score, value = (next(one for one in does.products if one.a_in_tensor_memory is kind) for kind in (False, True))
    value = replace(value, signals=False)
    late = replace(value, count=round(value.count * (1 - config.early_keys / config.half_keys)))
    work = 2 * rows * config.tile.n * (config.head_dim_qk + config.head_dim_v)
    correction = (
        Code(does.correction, lanes, rates.rescaling, loaded=does.rescale_bytes, stored=does.rescale_bytes),
        Code(does.calm_correction, lanes, 1 - rates.rescaling),
    )

    def step(softmax: Stretch) -> Step:
        moved_bytes = does.tensor_load, does.tensor_store
        early, whole = (Code(softmax, threads, 1.0, until, *moved_bytes, HALVES) for until in (-2, -1))
        # The first sub-partition also has the warp that issues the products.
        issues = Instructions(issue=does.mma_issue)
        moved = Traffic(
            shared=does.filled_bytes + FACTOR_BYTES + does.exchanges * EXCHANGED_BYTES * HALVES * lanes,
            l2=does.loaded_bytes,
        )
        chains = Chain((score, early, Arrival(), value)), Chain((score, whole, Arrival(), late))
        operations: tuple[Operation, ...] = (*[score, value] * Q_TILES, moved, whole, *correction, issues)
        step = Step(config.tile.n, work, operations, chains)
        return step if does.dequantization is None else _with_dequantization(step, does, config, rates)

    store = Instructions(cycles=_times(does.store.code, rates)[-1])
    q_bytes = rows * config.layout.q_columns * 2  # the config counts halfwords
    bits = 8 if config.uses_fp8_mma else 16
    first = Code(does.masked_softmax, threads, until=-2, sharers=HALVES)
    return PrefillLoop(
        step(does.softmax), step(does.masked_softmax), first, score, value, q_bytes, store, bits, scores_ahead=True
    )


def _with_dequantization(step: Step, does: Work, config: Sm100PrefillConfig, rates: Rates) -> Step:
    """Return a step whose K and V a warpgroup dequantizes in place.

    The warpgroup takes K and V in turn, so its own step is a chain. A stage goes through a longer one: it is loaded,
    dequantized, multiplied for both query tiles with a product with V between them, and released.
    """
    assert does.dequantization is not None
    code = Code(does.dequantization, WARPGROUP)
    whole = Instructions(cycles=_times(does.dequantization.code, rates)[-1])
    half = replace(whole, cycles=whole.cycles / 2)
    score, value = (one for one in step.operations[:2] if isinstance(one, Mma))
    load = Traffic(l2=does.loaded_bytes / 2)
    stage = (load, Arrival(), half, Arrival(), replace(score, signals=False), value, score)
    chains = Chain((whole, Arrival()), name=LOAD_CHAIN), Chain(stage, config.tile.kv_stages, LOAD_CHAIN)
    vectors = Traffic(shared=does.dequantized_bytes)
    return replace(step, operations=(*step.operations, code, vectors), chains=(*step.chains, *chains))


class SoftmaxTimes(NamedTuple):
    """Cycles from the wait for S to the arrivals that publish P: the early part, and the whole."""

    early: float
    late: float


def softmax_times(code: Sequence[Sass], rates: Rates) -> SoftmaxTimes:
    first, *_, early, late = _arrivals(code, rates)
    return SoftmaxTimes(early - first, late - first)


def _arrivals(code: Sequence[Sass], rates: Rates) -> list[float]:
    return [time for time, one in zip(_times(code, rates), code, strict=True) if one.root == "SYNCS"]


def _times(code: Sequence[Sass], rates: Rates) -> list[float]:
    return issue_times(code, rates.timings, Timing(rates.other_latency))


@dataclass(frozen=True)
class WorkTile:
    """Steps of two query tiles."""

    masked: int
    full: int


def work_tiles(case: Prefill, rows: int, keys: int, section: int) -> Iterator[WorkTile]:
    """Yield the work tiles in the order of the CTAs' list (kernels/parts/partition/tiles.py).

    All tiles of ``section`` heads of a request precede the tiles of its next heads.
    """
    if case.window_left >= 0:
        raise ValueError(f"{case.name}: windows are not modelled")
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        for _, first in itertools.product(range(case.heads // section), reversed(range(0, q_len, rows))):
            last = min(first + rows, q_len) - 1
            position = kv_len - q_len
            first_end, last_end = (position + row + 1 if case.causal else kv_len for row in (first, last))
            steps = -(-last_end // keys)
            full = min(first_end // keys, steps - 1)
            yield from [WorkTile(steps - full, full)] * section


@dataclass(frozen=True)
class Prediction:
    """Prediction for a case, with the successive losses of the dense rate as shares."""

    case: Prefill
    kernel: KernelModel
    seconds: float
    visible: float  # share of the products' FLOP that a mask leaves visible
    tensor_cores: float  # share of the steps' time with the tensor cores busy
    in_steps: float  # share of the work tiles' time that is steps
    balance: float  # share of the SMs' time, until the last CTA ends, in work tiles
    launch: float  # share of the whole time before that end
    hbm: float  # share of the whole time to read and write everything once

    @property
    def tflops(self) -> float:
        return self.case.work / self.seconds / 1e12

    @property
    def fraction(self) -> float:
        """Share of the dense rate of the case's element type."""
        return self.tflops * 1e12 / (DENSE_BF16 * 16 / self.kernel.bits)


def predict(case: Prefill, kernel: KernelModel, rates: Rates = B200) -> Prediction:
    """Predict the time of ``case``."""
    section = head_swizzle_heads(case.heads, case.kv_heads, rates.sms)
    tiles = list(work_tiles(case, Q_TILES * Q_TILE_ROWS, kernel.keys, section))
    masked, full = (sum(getattr(tile, kind) for tile in tiles) for kind in ("masked", "full"))
    in_steps = masked * kernel.masked.cycles + full * kernel.steady.cycles
    busy = in_steps + len(tiles) * kernel.per_work_tile
    ends = [0.0] * (rates.sms // kernel.ctas)
    for tile in tiles:
        cycles = tile.masked * kernel.masked.cycles + tile.full * kernel.steady.cycles + kernel.per_work_tile
        heapq.heapreplace(ends, ends[0] + cycles)
    cycles = max(ends) + rates.launch
    seconds = cycles / rates.clock
    multiplied = (masked + full) * kernel.mma
    return Prediction(
        case=case,
        kernel=kernel,
        seconds=seconds,
        visible=case.work / (multiplied * kernel.flop * kernel.ctas),
        tensor_cores=multiplied / in_steps,
        in_steps=in_steps / busy,
        balance=busy * kernel.ctas / (rates.sms * max(ends)),
        launch=max(ends) / cycles,
        hbm=case.demand[READ] / rates.hbm_bytes / seconds,
    )


def seconds(case: Prefill | Decode, loop: PrefillLoop | Step, rates: Rates) -> float:
    """Return the time of a case. Keys of decode are spread evenly over all SMs."""
    if isinstance(case, Prefill):
        assert isinstance(loop, PrefillLoop)
        return predict(case, kernel_model(loop, rates), rates).seconds
    assert isinstance(loop, Step)
    return case.flop / loop.rate(rates) + rates.decode_launch / rates.clock


def cases() -> list[Prefill]:
    by_name = {case.name: case for case in PREFILL}
    return [by_name[name] for name in CASES]


def config_of(case: Prefill, arch: str) -> Sm100PrefillConfig | None:
    """Return the tcgen05 kernel of a case, or None if there is none. Keys and values are contiguous, and NVFP4 ones are
    in pages of 64."""
    if arch not in BLACKWELL:
        raise ValueError(f"{arch} has no tensor memory; modelled are {', '.join(BLACKWELL)}")
    dtype, mask = "e4m3" if case.q_dtype is E4M3 else "bf16", MaskKind.CAUSAL if case.causal else MaskKind.FULL
    narrow = NARROW_TYPES.get(case.kv_dtype) if dtype == "bf16" else None
    if narrow is not None:
        fetch = (KvFetch.PAGE_BOXES, 64) if narrow is KvType.NVFP4 else (KvFetch.CONTIGUOUS, 0)
        return Sm100PrefillConfig(arch, dtype, dtype, case.head_dim, case.v_head_dim, mask, *fetch, kv_type=narrow)
    wanted = (dtype, "bf16", case.head_dim, case.v_head_dim, mask, KvFetch.CONTIGUOUS)
    for config in kernels_to_ship(arch, (TYPES_16BIT, TYPES_FP8)):
        if not isinstance(config, Sm100PrefillConfig):
            continue
        has = (config.dtype, config.out_dtype, config.head_dim_qk, config.head_dim_v, config.mask, config.kv_fetch)
        if has == wanted:
            return config
    return None


@dataclass(frozen=True)
class OtherShare(Sm100PrefillConfig):
    """A kernel with a different share of exponentials evaluated as polynomials."""

    eighths: int = 0

    @property
    def polynomial_eighths(self) -> int:
        return self.eighths

    @property
    def name(self) -> str:
        return f"{super().name}_polynomials{self.eighths}"
