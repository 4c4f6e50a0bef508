"""Predictions of tcgen05 kernels that are not written: a row for each, with a case of :mod:`hopwell.perf`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from hopwell.perf.blackwell_kernels import LATENT_DIMS, NVFP4_BITS, leaves, mla
from hopwell.perf.blackwell_rates import Rates
from hopwell.perf.calibration import DECODE as DECODE_FAMILY
from hopwell.perf.calibration import MLA as MLA_FAMILY
from hopwell.perf.calibration import spread, steady_step
from hopwell.perf.decode_workloads import DECODE, Decode
from hopwell.perf.mla_workloads import MLA
from hopwell.perf.model import PrefillLoop, seconds
from hopwell.perf.prefill_workloads import Prefill
from hopwell.perf.quantized import BF16, E4M3
from hopwell.perf.steps import Step

HEADERS = ["kernel", "cycles a step", "limited by", "then", "case", "model", "range"]
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
