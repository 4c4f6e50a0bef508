"""Published rates of B200 (sm_100a) and B300 (sm_103a), with their sources. Nothing here was measured by this project.

Rates are per cycle and SM, and latencies in cycles, unless a row states otherwise. An architecture is a row of
:data:`RATES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hopwell.kernels.hardware import LANES
from hopwell.perf.sass import Timing

DENSE_BF16 = 2250e12  # FLOP/s: NVIDIA's data sheets of B200 and B300 (HGX), without sparsity
MMA_DEPTH_BYTES = 32  # of a row of A or B in one tcgen05.mma, for element types of 16, 8 and 4 bits alike

_SEMIANALYSIS = "github.com/SemiAnalysisAI/microbench-blackwell"
_TRITON = "github.com/facebookexperimental/triton, ModuloScheduling/NVLatencyModel.cpp"
_GB300 = "github.com/Antoniomv7/gb300-microbench"
_GUIDE = "CUDA programming guide, throughput of arithmetic instructions"
_LIKE_OTHERS = "assumption, from measurements on Ampere and Hopper"


def interpolated(points: Mapping[int, float], x: float) -> float:
    """Return the value at ``x`` on the line through the two nearest points."""
    places = sorted(points)
    right = next((i for i, place in enumerate(places) if place >= x), len(places) - 1)
    left, right = places[max(right - 1, 0)], places[max(right, 1)]
    return points[left] + (points[right] - points[left]) * (x - left) / (right - left)


@dataclass(frozen=True)
class MmaInterval:
    """Cycles from one tcgen05.mma to the next of the same kind, by N.

    16-bit, 8-bit and 4-bit elements take the same cycles. Block scales cost nothing.
    """

    rows: int  # M, of both CTAs of a pair together
    pair: bool
    a_in_tensor_memory: bool
    cycles: Mapping[int, float]
    signal: float  # from the end of a burst until a thread has seen its mbarrier


_N = (64, 80, 96, 112, 128, 256)


def _interval(rows: int, where: str, signal: float, *cycles: float, pair: bool = False) -> MmaInterval:
    return MmaInterval(rows, pair, where == "tensor memory", dict(zip(_N, cycles, strict=True)), signal)


MMA_SOURCE = f"{_SEMIANALYSIS}: umma_throughput/tput_results_max.csv, umma_latency/fit_results.csv (B200)"
MMA_INTERVALS = (
    _interval(64, "shared", 140, 32.6, 40.6, 48.6, 56.6, 64.6, 128.6),
    _interval(64, "tensor memory", 116, 32.6, 40.6, 48.6, 56.6, 64.6, 128.6),
    _interval(128, "shared", 140, 48.6, 52.6, 56.6, 60.6, 64.6, 128.6),
    _interval(128, "tensor memory", 116, 32.5, 40.5, 48.5, 56.5, 64.5, 128.5),
    _interval(128, "shared", 170, 25.7, 27.7, 29.7, 30.7, 32.7, 64.7, pair=True),
    _interval(128, "tensor memory", 170, 18.6, 20.7, 24.7, 28.7, 32.7, 64.6, pair=True),
    _interval(256, "shared", 170, 43.7, 46.1, 50.1, 56.7, 64.8, 128.7, pair=True),
)

MEMORY_SOURCE = f"{_SEMIANALYSIS}: tma2d_throughput (B200); B300 reads 6.96e12 by TMA ({_GB300})"
MEMORY_BY_BYTES_IN_FLIGHT = {16 << 10: 3.7e12, 32 << 10: 5.8e12, 64 << 10: 7.2e12, 128 << 10: 7.26e12}  # of an SM

BYTES_IN_FLIGHT = 48 << 10  # of an SM, for the latency of a load; the rate is then nine tenths of the largest

TMA_LOAD_SOURCE = f"{_TRITON}: one load without others beside it"
TMA_LOAD_CYCLES = {16 << 10: 530, 64 << 10: 925}  # by bytes

# Published values that no prediction uses.
OTHER_MEASUREMENTS = (
    ("wait for MMA 128x128x128, 128x128x64, nothing else beside it", "900, 559", "cycles", _TRITON),
    ("TMA load: each further 512 bytes of a row", "240", "cycles", _TRITON),
    ("TMA store", "130 + 52 a KiB", "cycles", _TRITON),
    ("exp2 of 128 x 128 elements by 4 warps", "1140", "cycles", _TRITON),
    ("tcgen05.ld of 128 x 128 float32 by 4 warps; some of it spills", "532", "cycles", _TRITON),
    ("memory by cp.async, 256 threads, 32 KiB in flight (B200)", "5.7e12", "bytes/s", f"{_SEMIANALYSIS}: ldgsts"),
    ("memory by cp.async (B300)", "7.02e12", "bytes/s", _GB300),
    ("access to memory of the other die", "300 more", "cycles", "SemiAnalysis, 2026-03-31"),
    ("distributed shared memory by loads", "slower than own shared memory", "", "SemiAnalysis, 2026-03-31"),
    ("tcgen05.mma on a B300", "8101", "FLOP a cycle and SM", f"{_GB300}: umma_throughput.csv"),
    ("matrix product 8192^3 in 16 bits on a B300", "2118e12", "FLOP/s", f"{_GB300}: cuBLASLt"),
)


def _rate(value: float | str, source: str, **sm_103a: Any) -> Any:
    """Declare a rate of sm_100a with its source. ``sm_103a`` is another value and another source, if any."""
    return field(default=value, metadata={"source": source, **sm_103a})


@dataclass(frozen=True)
class Rates:
    """Rates of an architecture."""

    arch: str = _rate("sm_100a", "compiler's name", sm_103a="sm_103a")
    gpu: str = _rate("B200", "product", sm_103a="B300")
    sms: int = _rate(148, f"{_SEMIANALYSIS}: 74 of the 80 of each die. Assumption for the B300")
    mma_flop: int = _rate(8192, f"16 bits: {MMA_SOURCE}; twice with 8-bit elements, four times with 4-bit elements")
    shared_bytes: int = _rate(
        128,
        f"operands of tcgen05.mma: {MMA_SOURCE}. Assumption: one port, so the writes of TMA and of warps count as well",
    )
    shared_reach: float = _rate(
        0.82, "fit: share of the port that kernels reach; FlashAttention 4's and FlashMLA's MLA kernels on a B200"
    )
    mufu: int = _rate(
        16, f"{_GUIDE}", sm_103a=32, sm_103a_source='twice, NVIDIA\'s blog "Making Softmax More Efficient"'
    )
    fma: int = _rate(128, f"{_GUIDE}. Assumption: f32x2 is two results in one issue slot")
    alu: int = _rate(64, f"{_GUIDE}: compare, minimum, maximum, shift")
    conversion: int = _rate(64, f"{_GUIDE}: float32 to 16 bits; one result packs two elements")
    issue: int = _rate(4, "one instruction for each sub-partition")
    tensor_load: int = _rate(2048, "assumption, bytes: a warp loads 4 columns a cycle")
    tensor_store: int = _rate(1024, f"bytes, {_TRITON}: 128 x 64 float32 in 64 cycles, 128 x 128 in 96")
    l2_bytes: int = _rate(64, "assumption: the width of an SM's port, as since the A100")
    hbm_bytes: float = _rate(7.26e12, "a second, all SMs, 128 KiB in flight in each; " + MEMORY_SOURCE, sm_103a=6.96e12)

    mufu_latency: int = _rate(20, _LIKE_OTHERS)
    tensor_load_latency: int = _rate(
        100, f"{_TRITON}: 179 for 64 columns with a wait, about 115 and a cycle for each column"
    )
    tensor_store_latency: int = _rate(40, f"{_TRITON}: 64 for 64 columns, with the time of the columns")
    shared_latency: int = _rate(29, _LIKE_OTHERS)
    other_latency: int = _rate(12, _LIKE_OTHERS)
    arrival: int = _rate(50, f"{_TRITON}: 20 for an arrival at an mbarrier and 30 for the wait")
    launch: int = _rate(5500, "assumption: 3 us for the start, barriers, descriptors, the first loads, and the end")
    decode_launch: int = _rate(
        8000, "fit: 4.3 us; start, first loads and merge of decode, from published times of 1 x 1024 and 8 x 4096"
    )
    rescaling: float = _rate(
        0.1, "assumption: share of steps in which a warp rescales O; references move by 2^8 at once, so rarely"
    )

    @property
    def clock(self) -> float:
        """Cycles per second at which the dense rate equals the published one; boost clocks are 1.85 to 1.965 GHz."""
        return DENSE_BF16 / (self.sms * self.mma_flop)

    def tma_load(self, size: float) -> float:
        """Return the cycles of one TMA load of ``size`` bytes until its barrier."""
        return interpolated(TMA_LOAD_CYCLES, size)

    def memory_bytes(self, in_flight: float) -> float:
        """Return the bytes of memory per cycle of an SM, with ``in_flight`` bytes requested by each SM."""
        most = max(MEMORY_BY_BYTES_IN_FLIGHT)
        share = interpolated(MEMORY_BY_BYTES_IN_FLIGHT, min(in_flight, most)) / MEMORY_BY_BYTES_IN_FLIGHT[most]
        return share * self.hbm_bytes / self.sms / self.clock

    @property
    def memory_latency(self) -> float:
        """Cycles of a load from memory while all SMs read with :data:`BYTES_IN_FLIGHT` requested by each: these bytes
        over the rate that they reach (Little's law)."""
        return BYTES_IN_FLIGHT / self.memory_bytes(BYTES_IN_FLIGHT)

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

    @staticmethod
    def of(arch: str) -> Rates:
        """Return the row of an architecture."""
        return Rates(**{one.name: one.metadata.get(arch, one.default) for one in fields(Rates)})


B200, B300 = Rates.of("sm_100a"), Rates.of("sm_103a")
RATES = {rates.arch: rates for rates in (B200, B300)}


def mma_interval(rows: int, columns: int, *, pair: bool, a_in_tensor_memory: bool) -> tuple[float, float]:
    """Return the cycles of a tcgen05.mma in a row of such instructions, and of the signal at its end.

    Below N 64 nothing is published. Assumption: both operands are read at 128 bytes a cycle, wherever A is. M 256 with
    A in tensor memory is not published either. Assumption: it takes the cycles of A in shared memory.

    Raises:
        ValueError: no such instruction was measured.
    """
    known = {(one.rows, one.pair, one.a_in_tensor_memory): one for one in MMA_INTERVALS}
    row = known.get((rows, pair, a_in_tensor_memory), known.get((rows, pair, False)))
    if row is None:
        raise ValueError(f"no published interval of M {rows}, pair {pair}, A in tensor memory {a_in_tensor_memory}")
    if columns >= min(_N):
        return interpolated(row.cycles, columns), row.signal
    read = operand_bytes(rows, columns, pair=pair, a_in_tensor_memory=False) / B200.shared_bytes
    return min(read, row.cycles[min(_N)]), row.signal


def operand_bytes(rows: int, columns: int, *, pair: bool, a_in_tensor_memory: bool) -> int:
    """Return the bytes that one CTA's shared memory supplies to a tcgen05.mma; each CTA of a pair has half of both."""
    return MMA_DEPTH_BYTES * (columns + rows * (not a_in_tensor_memory)) // (2 if pair else 1)
