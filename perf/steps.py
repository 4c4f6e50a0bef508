"""A step of a kernel's loop as data: the operations on an SM, and the chains of operations that wait for each other.

An operation has two numbers: the cycles that it keeps units of the SM busy, and its latency. The latency ends when an
operation that waits for it can start. A step takes as long as its busiest unit or its slowest chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.perf.blackwell_rates import Rates, mma_interval, operand_bytes

MUFU, FMA, ALU, CONVERSION = "MUFU", "FMA", "ALU", "conversion"  # units of a lane
MMA, SHARED, TENSOR_MEMORY, ISSUE = "MMA", "shared memory", "tensor memory", "issue"
L2, MEMORY, CHAIN, OUTPUT_CHAIN = "L2", "memory", "softmax chain", "chain of O"
LOAD_CHAIN = "chain of loads"
UNITS = (MMA, SHARED, MUFU, FMA, ALU, CONVERSION, ISSUE, TENSOR_MEMORY, L2, MEMORY, CHAIN, OUTPUT_CHAIN, LOAD_CHAIN)

Busy = Mapping[str, float]


@dataclass(frozen=True)
class StepTime:
    """Cycles of a step, for each unit that may limit it."""

    units: Busy

    @property
    def limiter(self) -> str:
        return max(self.units, key=self.units.__getitem__)

    @property
    def cycles(self) -> float:
        return self.units[self.limiter]

    @property
    def next_limiter(self) -> tuple[str, float]:
        """Second busiest unit, and the share of a step that it is busy."""
        others = {unit: cycles for unit, cycles in self.units.items() if unit != self.limiter}
        name = max(others, key=others.__getitem__)
        return name, others[name] / self.cycles


class Operation(Protocol):
    def busy(self, rates: Rates) -> Busy: ...
    def latency(self, rates: Rates) -> float: ...


@dataclass(frozen=True)
class Mma:
    """A burst of ``count`` tcgen05.mma of M ``rows`` and N ``columns``, each over 32 bytes of a row of A and B.

    ``rows`` and ``columns`` count both CTAs of a pair. Times and bytes are of one SM. ``signals`` is whether a warp
    waits for the end of the burst; a later burst of the same warp does not.
    """

    count: int
    rows: int
    columns: int
    a_in_tensor_memory: bool = False
    pair: bool = False
    signals: bool = True

    def _interval(self) -> tuple[float, float]:
        return mma_interval(self.rows, self.columns, pair=self.pair, a_in_tensor_memory=self.a_in_tensor_memory)

    @property
    def interval(self) -> float:
        """Cycles from one MMA of the burst to the next."""
        return self._interval()[0]

    @property
    def shared_bytes(self) -> int:
        sizes = dict(pair=self.pair, a_in_tensor_memory=self.a_in_tensor_memory)
        return self.count * operand_bytes(self.rows, self.columns, **sizes)

    def busy(self, rates: Rates) -> Busy:
        return {MMA: self.count * self._interval()[0], **Traffic(shared=self.shared_bytes).busy(rates)}

    def latency(self, rates: Rates) -> float:
        interval, signal = self._interval()
        return self.count * interval + signal * self.signals


@dataclass(frozen=True)
class Traffic:
    """Bytes that an SM moves. ``in_flight`` is the number of bytes that it has requested from memory at any time."""

    shared: float = 0.0
    l2: float = 0.0
    memory: float = 0.0
    in_flight: int = 128 << 10

    def busy(self, rates: Rates) -> Busy:
        return {
            SHARED: self.shared / rates.shared_bytes / rates.shared_reach,
            L2: (self.l2 + self.memory) / rates.l2_bytes,
            MEMORY: self.memory / rates.memory_bytes(self.in_flight) if self.memory else 0.0,
        }

    def latency(self, rates: Rates) -> float:
        return rates.tma_load(self.l2 + self.memory)


@dataclass(frozen=True)
class Load:
    """The latency of a load from memory until its barrier, while all SMs read; :class:`Traffic` has its bytes."""

    def busy(self, rates: Rates) -> Busy:
        return {}

    def latency(self, rates: Rates) -> float:
        return rates.memory_latency


@dataclass(frozen=True)
class Instructions:
    """Instructions of warps. Fields are results of all lanes by unit, issue slots of the busiest sub-partition, bytes
    of tensor memory, and the latency of the first warp."""

    results: Mapping[str, float] = field(default_factory=dict)
    issue: float = 0.0
    loaded: float = 0.0
    stored: float = 0.0
    cycles: float = 0.0

    def busy(self, rates: Rates) -> Busy:
        speeds = {MUFU: rates.mufu, FMA: rates.fma, ALU: rates.alu, CONVERSION: rates.conversion}
        return {
            **{unit: results / speeds[unit] for unit, results in self.results.items()},
            ISSUE: self.issue,
            TENSOR_MEMORY: self.loaded / rates.tensor_load + self.stored / rates.tensor_store,
        }

    def latency(self, rates: Rates) -> float:
        return self.cycles


@dataclass(frozen=True)
class Arrival:
    """An arrival at an mbarrier that a warp waits for."""

    def busy(self, rates: Rates) -> Busy:
        return {}

    def latency(self, rates: Rates) -> float:
        return rates.arrival


@dataclass(frozen=True)
class Softmax:
    """Softmax by threads that have ``columns`` columns of a row of S in tensor memory each.

    This estimates the code that ptxas makes. ``tests/perf/test_calibration.py`` compares it with the compiled 16-bit
    kernel.

    Attributes:
        columns: of a thread.
        lanes: threads of the SM that do this in a step.
        eighths: of exp2, evaluated as polynomials.
        p_bits: of an element of P.
        sharers: warps of a sub-partition that work on the same rows at the same time.
        exchanges: whether the threads of a row exchange their maxima.
        again: columns that are read twice.
        masked: whether a mask is applied.
        share: of the columns, until the arrival that the latency counts to.
    """

    columns: int
    lanes: int
    eighths: int = 0
    p_bits: int = 16
    sharers: int = 1
    exchanges: bool = False
    again: int = 0
    masked: bool = False
    share: float = 1.0

    # Instructions and results of a lane, for each column and for each polynomial. They were counted in the compiled
    # kernel of head dim 128 with none and with two eighths as polynomials (2026-11-26).
    _INSTRUCTIONS, _FMA, _ALU, _CONVERSION = 3.6, 2.16, 0.7, 0.5
    _POLYNOMIAL = 4.5, 7.0, 2.0  # instructions, FMA and ALU results
    _BLOCK, _BLOCK_CYCLES = 32, 80  # columns of a store of P, and the cycles until its pipeline is empty
    _SPACING = 1.25  # ptxas puts two MUFU of a warp 10 cycles apart, not 8
    _REFERENCE = 90  # cycles to choose the reference and to post the factor
    _EXCHANGE = 80  # cycles to exchange maxima of two warps
    _MASK_CYCLES = 6  # of a column
    _MAXIMUM_CYCLES = 1  # of a column: three-operand maxima

    @property
    def _evaluated(self) -> float:
        """Columns whose exp2 the MUFU evaluates."""
        return self.columns * (8 - self.eighths) / 8

    def busy(self, rates: Rates) -> Busy:
        polynomials = self.columns * self.eighths / 8
        each = self._POLYNOMIAL
        results = {
            MUFU: self._evaluated,
            FMA: self._FMA * self.columns + each[1] * polynomials,
            ALU: self._ALU * self.columns + each[2] * polynomials,
            CONVERSION: self._CONVERSION * self.columns,
        }
        return Instructions(
            {unit: self.lanes * amount for unit, amount in results.items()},
            self.lanes / WARPGROUP * (self._INSTRUCTIONS * self.columns + each[0] * polynomials),
            loaded=4 * self.lanes * (self.columns + self.again),
            stored=self.lanes * self.columns * self.p_bits / 8,
        ).busy(rates)

    def latency(self, rates: Rates) -> float:
        mufu = LANES * rates.issue / rates.mufu  # cycles of an instruction
        blocks = max(self.columns // self._BLOCK, 1)
        read = rates.tensor_load_latency + 16 * LANES * self.columns / rates.tensor_load
        read += self.again // self._BLOCK * rates.tensor_load_latency
        alone = self._evaluated * mufu * self._SPACING + blocks * self._BLOCK_CYCLES
        exponentials = max(alone, self.sharers * self._evaluated * mufu)
        maximum = (self._MAXIMUM_CYCLES + self._MASK_CYCLES * self.masked) * self.columns
        store = rates.tensor_store_latency + self.columns * self.p_bits / 64
        exchange = self._EXCHANGE * self.exchanges
        return read + maximum + exchange + self._REFERENCE + self.share * exponentials + store


@dataclass(frozen=True)
class Rescale:
    """Correction of O in tensor memory by a warpgroup: each thread loads, multiplies and stores columns of its lane.

    This estimates the code that ptxas makes. ``tests/perf/test_calibration.py`` compares it with the compiled MLA
    kernel.

    Attributes:
        columns: of a lane.
        at_once: columns that a thread has in registers between load and store.
        packed: whether an instruction multiplies two columns.
        always: whether rows move in every step, and not only in the steps that ``Rates.rescaling`` counts.
    """

    columns: int
    at_once: int
    packed: bool = False
    always: bool = False

    _AROUND = 150  # cycles: the decision to rescale before the first load, the fences behind the last store
    _CHUNK = 3  # cycles between a load and its first product

    def _share(self, rates: Rates) -> float:
        return 1.0 if self.always else rates.rescaling

    def busy(self, rates: Rates) -> Busy:
        columns, size = self._share(rates) * self.columns, 4 * WARPGROUP
        multiplies = columns / (2 if self.packed else 1)
        return Instructions({FMA: WARPGROUP * columns}, multiplies, size * columns, size * columns).busy(rates)

    def latency(self, rates: Rates) -> float:
        products = self.at_once / (2 if self.packed else 1)
        chunk = rates.tensor_load_latency + products + self._CHUNK
        return self._AROUND + self._share(rates) * self.columns / self.at_once * chunk


@dataclass(frozen=True)
class Chain:
    """Operations that wait for each other, from one step to the next; ``in_flight`` such chains run side by side.
    ``name`` is the unit of :data:`UNITS` that they count as."""

    operations: tuple[Operation, ...]
    in_flight: int = 1
    name: str = CHAIN

    def cycles(self, rates: Rates) -> float:
        return sum(one.latency(rates) for one in self.operations) / self.in_flight


@dataclass(frozen=True)
class Step:
    """A step of an SM: ``keys`` keys, ``flop`` useful operations, all operations, and the chains."""

    keys: int
    flop: float
    operations: tuple[Operation, ...]
    chains: tuple[Chain, ...] = ()

    def time(self, rates: Rates) -> StepTime:
        total = dict.fromkeys(UNITS, 0.0)
        for one in self.operations:
            for unit, cycles in one.busy(rates).items():
                total[unit] += cycles
        for chain in self.chains:
            total[chain.name] = max(total[chain.name], chain.cycles(rates))
        return StepTime(total)

    def rate(self, rates: Rates) -> float:
        """Return the FLOP/s of all SMs in their steps."""
        return self.flop / self.time(rates).cycles * rates.clock * rates.sms
