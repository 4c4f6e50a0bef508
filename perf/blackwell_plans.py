"""Predictions of tcgen05 kernels that are not written: a row for each, with a case of :mod:`hopwell.perf`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from hopwell.perf.blackwell_kernels import LATENT_DIMS, NVFP4_BITS, leaves, mla, prefill
from hopwell.perf.blackwell_rates import B200, Rates
from hopwell.perf.calibration import DECODE as DECODE_FAMILY
from hopwell.perf.calibration import MLA as MLA_FAMILY
from hopwell.perf.calibration import PREFILL as PREFILL_FAMILY
from hopwell.perf.calibration import spread, steady_step
from hopwell.perf.decode_workloads import DECODE, Decode
from hopwell.perf.mla_workloads import MLA
from hopwell.perf.model import PrefillLoop, seconds
from hopwell.perf.prefill_workloads import PREFILL, Prefill
from hopwell.perf.quantized import BF16, E4M3
from hopwell.perf.steps import Step

HEADERS = ["kernel", "cycles a step", "limited by", "then", "case", "model", "range"]
_DIMS = {"P7": (64, 64), "P1": (128, 128), "P6": (192, 128)}
_TYPES = {8: ("e4m3", E4M3), 16: ("bf16", BF16)}


@dataclass(frozen=True)
class Plan:
    """A planned kernel and a case for it. Rates are in TFLOP/s, of ``family`` decode in GB/s."""

    name: str
    case: Prefill | Decode
    loop: PrefillLoop | Step
    family: str

    def rate(self, rates: Rates) -> float:
        time = seconds(self.case, self.loop, rates)
        if self.family != DECODE_FAMILY:
            return self.case.work / time / 1e12
        assert isinstance(self.case, Decode)
        return self.case.read_bytes / time / 1e9


def plans(rates: Rates) -> Iterator[Plan]:
    """Yield the planned kernels of an architecture."""
    yield from _prefill_plans(rates)
    named = {case.name: case for case in (*DECODE, *MLA)}
    for name, case, width, share, packed in (
        ("MLA bf16, pair of CTAs", "M1", 16, 2 / 3, False),
        ("MLA bf16, lists by gather4", "S1", 16, 2 / 3, False),
        ("MLA e4m3, pair of CTAs", "M1-fp8", 8, 8 / 9, False),
        ("MLA over rows of 656 bytes, lists", "S1-fp8", 16, 2 / 3, True),
    ):
        yield Plan(name, named[case], mla(width, share, packed_rows=packed), MLA_FAMILY)
    d128 = (128, 128)
    grouped: tuple[tuple[str, str, int, float], ...] = (
        ("decode bf16, 8 rows", "D2", 8, 16),
        ("decode bf16, 32 rows", "D2-q4", 32, 16),
        ("decode e4m3, 8 rows", "D2-fp8", 8, 8),
        ("decode NVFP4, 8 rows", "D2-nvfp4", 8, NVFP4_BITS),
    )
    for name, case, rows, bits in grouped:
        yield Plan(name, named[case], leaves(d128, rows, bits), DECODE_FAMILY)
    for rows, case in ((16, "H16-fp8"), (64, "H64-fp8")):
        for width, (kind, dtype) in _TYPES.items():
            step = leaves(LATENT_DIMS, rows, width, latent=True)
            latent = replace(named[case], name=case.removesuffix("-fp8"), kv_dtype=dtype)
            yield Plan(f"MLA {kind}, {rows} rows", latent, step, DECODE_FAMILY)


def _prefill_plans(rates: Rates) -> Iterator[Plan]:
    named = {case.name: case for case in PREFILL}
    eighths = 2 if rates.mufu == B200.mufu else 0  # a MUFU of twice the rate needs no polynomials beside it
    for bits, half_rows in ((8, False), (8, True), (16, True)):
        kind, dtype = _TYPES[bits]
        for name, dims in _DIMS.items():
            # With 128 keys of 16 bits at 192/128, shared memory has no second stage.
            keys = 96 if bits == 16 and dims == (192, 128) else 128
            loop = prefill(dims, bits, keys=keys, half_rows=half_rows, eighths=eighths)
            title = "d" + "/".join(map(str, dict.fromkeys(dims)))
            case = replace(named[name], q_dtype=dtype, kv_dtype=dtype)
            yield Plan(f"prefill {kind} {title}{', half rows' * half_rows}", case, loop, PREFILL_FAMILY)


def table(rates: Rates) -> str:
    """Return a Markdown table with a row for each planned kernel."""
    return tabulate([_cells(one, rates) for one in plans(rates)], HEADERS, tablefmt="github", disable_numparse=True)


def _cells(one: Plan, rates: Rates) -> list[Any]:
    time, rate = steady_step(one.loop).time(rates), one.rate(rates)
    other, busy = time.next_limiter
    least, largest = spread(one.family)
    unit = "GB/s" if one.family == DECODE_FAMILY else "TFLOP/s"
    return [
        one.name,
        f"{time.cycles:.0f}",
        time.limiter,
        f"{other} {busy:.0%}",
        one.case.name,
        f"{rate:.0f} {unit}",
        f"{rate / largest:.0f} to {rate / least:.0f}",
    ]
