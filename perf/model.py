"""A performance model of Blackwell prefill: the rate of a B200 whose units each run at their published rate.

No part was measured on a B200. The steady-state step takes the time of its busiest unit, or of the chain of one query
tile (S, softmax, P V, the next S). The chain restarts only after its end. A work tile adds the part of its first
softmax that overlaps with nothing. A launch adds the time that its CTAs wait for each other at the end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hopwell.kernels.config.base import DTYPES, KvFetch
from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.launch.geometry import head_swizzle_heads
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.sm100.prefill.config import Q_TILE_ROWS, Q_TILES, Sm100PrefillConfig
from hopwell.kernels.support import BLACKWELL
from hopwell.perf.kernel_work import ALU, CONVERSION, ELEMENT_BYTES, FMA, MUFU, Product, Stretch, Work
from hopwell.perf.prefill_workloads import PREFILL, Prefill
from hopwell.perf.sass import Sass, Timing, issue_times

CASES = ("P1", "P2", "P3", "P4", "P6", "P7")
DENSE_BF16 = 2250e12  # FLOP/s: NVIDIA's data sheet of the B200 (HGX), without sparsity
MMA, SHARED, TENSOR_MEMORY, ISSUE = "MMA", "shared memory", "tensor memory", "issue"
L2, CHAIN = "L2", "softmax chain"


def _rate(value: float, source: str) -> Any:
    return field(default=value, metadata={"source": source})


_GUIDE = "CUDA programming guide, throughput of arithmetic instructions"
_LIKE_OTHERS = "assumption, from what is measured on Ampere and Hopper"


@dataclass(frozen=True)
class Rates:
    """Rates of a B200, per cycle and SM unless stated otherwise."""

    sms: int = _rate(148, "published microbenchmarks: 74 of the 80 of each die")
    mma_flop: int = _rate(8192, "2250 TFLOP/s over 148 SMs at 1.856 GHz; FlashAttention-4 paper")
    shared_bytes: int = _rate(
        128,
        "FlashAttention-4 paper; SemiAnalysis measured it for the operands of tcgen05.mma. Assumption: one port, so "
        "that what TMA writes and what products read add up",
    )
    mufu: int = _rate(16, f"{_GUIDE}: special functions; FlashAttention-4 paper")
    fma: int = _rate(
        128,
        f"{_GUIDE}: float32. Assumption: f32x2 is two of them in one issue slot, as far apart as ptxas puts them",
    )
    alu: int = _rate(64, f"{_GUIDE}: compare, minimum, maximum, shift; as far apart as ptxas puts them")
    conversion: int = _rate(64, f"{_GUIDE}: float32 to 16 bits; one packs two")
    issue: int = _rate(4, "one instruction for each sub-partition")
    tensor_load: int = _rate(2048, "assumption: 16 bytes of each of 128 lanes; far from limiting")
    tensor_store: int = _rate(1024, "assumption: half of that")
    l2_bytes: int = _rate(64, "assumption: the width of an SM's port, as since the A100; all SMs at once may get less")
    hbm_bytes: float = _rate(8e12, "NVIDIA's data sheet; a second, for all SMs")

    mufu_latency: int = _rate(20, _LIKE_OTHERS)
    tensor_load_latency: int = _rate(40, "assumption")
    tensor_store_latency: int = _rate(40, "assumption")
    shared_latency: int = _rate(29, _LIKE_OTHERS)
    other_latency: int = _rate(12, _LIKE_OTHERS)
    signal: int = _rate(40, "assumption: from an arrival, or the end of a product, until whoever waits for it runs on")
    mma_latency: int = _rate(40, "assumption: how much longer products take than their multiplications")
    load_latency: int = _rate(1000, "assumption: a TMA load until its barrier")
    launch: int = _rate(5500, "assumption: 3 us for the start, barriers, descriptors, the first loads, and the end")

    rescaling: float = _rate(
        0.1, "assumption: how often a warp rescales O; references move by 2^8 at once, so rarely after the first steps"
    )

    @property
    def clock(self) -> float:
        """Cycles per second at which the dense rate equals the published one; boost clocks are 1.85 to 1.965 GHz."""
        return DENSE_BF16 / (self.sms * self.mma_flop)

    @property
    def timings(self) -> dict[str, Timing]:
        """Duration of each opcode for a warp alone on its sub-partition."""
        return {
            "MUFU": Timing(self.mufu_latency, LANES * self.issue / self.mufu),
            "LDTM": Timing(self.tensor_load_latency, LANES * LANES * 4 * self.issue / self.tensor_load),
            "STTM": Timing(self.other_latency, LANES * LANES // 2 * 4 * self.issue / self.tensor_store),
            "FENCE": Timing(self.tensor_store_latency),
            "SYNCS": Timing(self.shared_latency),
            "LDS": Timing(self.shared_latency, LANES * 16 / self.shared_bytes),
            "STS": Timing(self.shared_latency, LANES * 16 / self.shared_bytes),
        }


B200 = Rates()


@dataclass(frozen=True)
class Step:
    """Cycles of one step of both query tiles, for each unit that may limit it."""

    units: Mapping[str, float]

    @property
    def limiter(self) -> str:
        return max(self.units, key=self.units.__getitem__)

    @property
    def cycles(self) -> float:
        return self.units[self.limiter]


@dataclass(frozen=True)
class KernelModel:
    """Times of a kernel's parts in cycles."""

    steady: Step
    masked: Step
    mma: float  # tensor cores of a step, if operands were ready at once
    drain: float  # of a work tile: from first S to first P, with the tensor cores idle
    q_wait: float  # until the query tiles arrive, beyond the hidden part
    store: float  # until tensor memory has been stored, beyond the hidden part
    keys: int  # of a step

    @property
    def per_work_tile(self) -> float:
        return self.drain + self.q_wait + self.store


def kernel_model(does: Work, config: Sm100PrefillConfig, rates: Rates) -> KernelModel:
    """Model the time of a kernel with this work."""
    steady, masked = (_step(does, stretch, config, rates) for stretch in (does.softmax, does.masked_softmax))
    drain = softmax_times(does.masked_softmax.code, rates).early + _handshakes(rates)
    score, value = _score_and_value(does, rates)
    # The load of the next Q starts at the last S. Q is needed after the last softmax and one product with V.
    q_bytes = Q_TILES * Q_TILE_ROWS * config.layout.q_columns * ELEMENT_BYTES
    q_wait = rates.load_latency + q_bytes / rates.l2_bytes - (drain + value)
    # The store of O starts after its last product. Its tensor memory is needed again after the other tile's product,
    # the next S and its softmax.
    store = Q_TILES * _cycles(does.store.code, rates) - (steady.cycles / Q_TILES + score + drain)
    mma = Q_TILES * sum(one.flop for one in does.products) / rates.mma_flop
    return KernelModel(steady, masked, mma, drain, max(q_wait, 0.0), max(store, 0.0), config.tile.n)


def _fed(product: Product, rates: Rates) -> float:
    """Return the cycles of a tcgen05.mma, which cannot run ahead of its operands."""
    return max(product.flop / rates.mma_flop, product.shared_bytes / rates.shared_bytes)


def _score_and_value(does: Work, rates: Rates) -> tuple[float, float]:
    """Return the cycles of S and of P V of a query tile."""
    kinds = [[one for one in does.products if one.a_in_shared is kind] for kind in (True, False)]
    score, value = (sum(_fed(one, rates) for one in products) for products in kinds)
    return score, value


def _handshakes(rates: Rates) -> float:
    """Return the cycles from the products to the softmax and back."""
    return 2 * rates.signal + rates.mma_latency


def _step(does: Work, softmax: Stretch, config: Sm100PrefillConfig, rates: Rates) -> Step:
    lanes = Q_TILES * WARPGROUP
    rescaling = rates.rescaling

    def lane_work(unit: str) -> float:
        # Only machine code shows the remaining integer instructions and the maxima with three operands.
        parts = [
            stretch.sass if unit == ALU else stretch.ptx for stretch in (softmax, does.correction, does.calm_correction)
        ]
        return lanes * (parts[0][unit] + rescaling * parts[1][unit] + (1 - rescaling) * parts[2][unit])

    correction = rescaling * len(does.correction.code) + (1 - rescaling) * len(does.calm_correction.code)
    products = Q_TILES * sum(_fed(one, rates) for one in does.products)
    operands = Q_TILES * sum(one.shared_bytes for one in does.products)
    factors = 2 * lanes * 4  # written and read
    loads, stores = (moved + rescaling * does.rescale_bytes for moved in (does.tensor_load, does.tensor_store))
    score, value = _score_and_value(does, rates)
    times, late = softmax_times(softmax.code, rates), value * (1 - config.early_keys / config.tile.n)
    chain = score + max(times.early + value, times.late + late) + _handshakes(rates)
    units = {
        MMA: products,
        SHARED: (operands + does.loaded_bytes + factors) / rates.shared_bytes,
        MUFU: lane_work(MUFU) / rates.mufu,
        FMA: lane_work(FMA) / rates.fma,
        ALU: lane_work(ALU) / rates.alu,
        CONVERSION: lane_work(CONVERSION) / rates.conversion,
        # A sub-partition has a warp of each softmax and one of correction; the first also has the warp that issues
        # products.
        ISSUE: Q_TILES * (len(softmax.code) + correction) + does.mma_issue,
        TENSOR_MEMORY: lanes * (loads / rates.tensor_load + stores / rates.tensor_store),
        L2: does.loaded_bytes / rates.l2_bytes,
        CHAIN: chain,
    }
    return Step(units)


class SoftmaxTimes(NamedTuple):
    """Cycles from the wait for S to the arrivals that publish P: the early part, and the whole."""

    early: float
    late: float


def softmax_times(code: Sequence[Sass], rates: Rates) -> SoftmaxTimes:
    times = [time for time, one in zip(_times(code, rates), code, strict=True) if one.root == "SYNCS"]
    return SoftmaxTimes(times[-2] - times[0], times[-1] - times[0])


def _cycles(code: Sequence[Sass], rates: Rates) -> float:
    return _times(code, rates)[-1]


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
        return self.tflops * 1e12 / DENSE_BF16


def predict(case: Prefill, kernel: KernelModel, rates: Rates = B200) -> Prediction:
    """Predict the time of ``case``."""
    section = head_swizzle_heads(case.heads, case.kv_heads, rates.sms)
    tiles = list(work_tiles(case, Q_TILES * Q_TILE_ROWS, kernel.keys, section))
    masked, full = (sum(getattr(tile, kind) for tile in tiles) for kind in ("masked", "full"))
    in_steps = masked * kernel.masked.cycles + full * kernel.steady.cycles
    busy = in_steps + len(tiles) * kernel.per_work_tile
    ends = [0.0] * rates.sms
    for tile in tiles:
        cycles = tile.masked * kernel.masked.cycles + tile.full * kernel.steady.cycles + kernel.per_work_tile
        heapq.heapreplace(ends, ends[0] + cycles)
    cycles = max(ends) + rates.launch
    seconds = cycles / rates.clock
    multiplied = (masked + full) * kernel.mma
    rows = case.heads * case.tokens * (case.head_dim + case.v_head_dim)
    kv_rows = case.kv_heads * case.kv_tokens * (case.head_dim + case.v_head_dim)
    return Prediction(
        case=case,
        kernel=kernel,
        seconds=seconds,
        visible=case.work / (multiplied * rates.mma_flop),
        tensor_cores=multiplied / in_steps,
        in_steps=in_steps / busy,
        balance=busy / (rates.sms * max(ends)),
        launch=max(ends) / cycles,
        hbm=ELEMENT_BYTES * (rows + kv_rows) / rates.hbm_bytes / seconds,
    )


def cases() -> list[Prefill]:
    by_name = {case.name: case for case in PREFILL}
    return [by_name[name] for name in CASES]


def config_of(case: Prefill, arch: str) -> Sm100PrefillConfig:
    """Return the kernel of a case with contiguous keys and values."""
    if arch not in BLACKWELL:
        raise ValueError(f"{arch} has no tensor memory; modelled are {', '.join(BLACKWELL)}")
    dtype, mask = DTYPES[torch.bfloat16], MaskKind.CAUSAL if case.causal else MaskKind.FULL
    return Sm100PrefillConfig(arch, dtype, dtype, case.head_dim, case.v_head_dim, mask, KvFetch.CONTIGUOUS, 0)


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
