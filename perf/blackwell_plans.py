"""Predictions of tcgen05 kernels from descriptions of their steps: planned kernels, and compiled ones of CTA pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from hopwell.kernels.capability.shipped import kernels_to_ship
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig
from hopwell.kernels.support import TYPES_16BIT, TYPES_FP8
from hopwell.perf.blackwell_kernels import LATENT_DIMS, NVFP4_BITS, Order, leaves, mla, pair_prefill, prefill
from hopwell.perf.blackwell_rates import Rates
from hopwell.perf.calibration import DECODE as DECODE_FAMILY
from hopwell.perf.calibration import MLA as MLA_FAMILY
from hopwell.perf.calibration import PREFILL as PREFILL_FAMILY
from hopwell.perf.calibration import spread, steady_step
from hopwell.perf.decode_workloads import DECODE, Decode
from hopwell.perf.leaf_work import compiled_decode, packed_rows
from hopwell.perf.mla_workloads import MLA
from hopwell.perf.model import PrefillLoop, seconds
from hopwell.perf.prefill_workloads import PREFILL, Prefill
from hopwell.perf.quantized import BF16, E4M3, NVFP4
from hopwell.perf.steps import Step

HEADERS = ["kernel", "cycles a step", "limited by", "then", "case", "model", "range"]
_TYPES = {8: ("e4m3", E4M3), 16: ("bf16", BF16)}
_CACHES = {BF16: "bf16", E4M3: "e4m3", NVFP4: "NVFP4"}
_ALL_CASES: tuple[Prefill | Decode, ...] = (*PREFILL, *DECODE, *MLA)
_CASES: dict[str, Any] = {case.name: case for case in _ALL_CASES}


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
    """Yield the planned kernels of an architecture, and the compiled kernels of CTA pairs, which rows describe."""
    yield from _prefill_plans()
    yield from _mla_plans(rates.arch)
    yield from _decode_plans()


def _prefill_plans() -> Iterator[Plan]:
    d128 = (128, 128)
    for name, case, loop in (
        ("prefill bf16, head dim 256, pair of CTAs, compiled", "d256-16384", pair_prefill(256, 16)),
        ("prefill bf16, head dim 256, pair of CTAs, compiled", "P8", pair_prefill(256, 16)),
        ("prefill e4m3 over NVFP4", "P1-fp8-nvfp4", prefill(d128, 8, half_rows=True, cache_bits=NVFP4_BITS)),
    ):
        yield Plan(name, _CASES[case], loop, PREFILL_FAMILY)


def _mla_plans(arch: str) -> Iterator[Plan]:
    shipped = (c for c in kernels_to_ship(arch, (TYPES_16BIT, TYPES_FP8)) if isinstance(c, Sm100MlaConfig))
    by_type: dict[str, Any] = {c.dtype: dict(rescaled_at_once=c.rescaled_columns) for c in shipped}
    wide, fp8 = by_type["bf16"], by_type["e4m3"]
    for name, case, step in (
        ("MLA bf16, Q in shared memory", "M1", mla(16, **wide)),
        ("MLA bf16, 2/3 of Q in tensor memory, compiled", "M1", mla(16, 2 / 3, **wide)),
        ("MLA bf16, half of V in place, Q in shared memory", "M1", mla(16, in_place=Order.STEPS, **wide)),
        ("MLA bf16, half of V in place, 2/3 of Q in tensor memory", "M1", mla(16, 2 / 3, in_place=Order.STEPS)),
        ("MLA bf16, and S and P V box by box", "M1", mla(16, 2 / 3, in_place=Order.BOXES)),
        ("MLA bf16, lists by gather4", "S1", mla(16, 2 / 3)),
        ("MLA e4m3, Q in shared memory", "M1-fp8", mla(8, **fp8)),
        ("MLA e4m3, Q in tensor memory, compiled", "M1-fp8", mla(8, 1.0, **fp8)),
        ("MLA e4m3, and half of V in place", "M1-fp8", mla(8, 1.0, in_place=Order.STEPS)),
        ("MLA over rows of 656 bytes, lists", "S1-fp8", mla(16, 2 / 3, packed_rows=True)),
    ):
        yield Plan(name, _CASES[case], step, MLA_FAMILY)


def _decode_plans() -> Iterator[Plan]:
    d128 = (128, 128)
    rows: tuple[tuple[str, str, tuple[int, int], int, float], ...] = (
        ("decode e4m3, 8 rows, two leaves in flight", "D2-fp8", d128, 8, 8),
        ("decode e4m3, 32 rows, two leaves in flight", "D2-q4-fp8", d128, 32, 8),
        ("decode NVFP4, 8 rows, two leaves in flight", "D2-nvfp4", d128, 8, NVFP4_BITS),
        ("decode NVFP4, 16 rows, two leaves in flight", "D2-q2-nvfp4", d128, 16, NVFP4_BITS),
    )
    for name, case, dims, packed, bits in rows:
        yield Plan(name, _CASES[case], leaves(dims, packed, bits), DECODE_FAMILY)
    for packed, case in ((16, "H16-fp8"), (64, "H64-fp8")):
        for width, (kind, dtype) in _TYPES.items():
            step = leaves(LATENT_DIMS, packed, width, latent=True)
            latent = replace(_CASES[case], name=case.removesuffix("-fp8"), kv_dtype=dtype)
            yield Plan(f"MLA {kind}, {packed} rows", latent, step, DECODE_FAMILY)


def compiled_decodes(rates: Rates) -> Iterator[Plan]:
    """Yield the compiled decode kernels."""
    wide = [_CASES[name] for name in ("D2", "L8", "b1-4096", "D2-q2", "D2-q4", "D2-q8", "D2-d64", "D2-d256")]
    wide += [_CASES[name] for name in ("D2-fp8", "D2-q2-fp8", "D2-q4-fp8", "D2-q8-fp8")]
    wide += [_CASES[name] for name in ("D2-nvfp4", "D2-q2-nvfp4", "D2-q4-nvfp4", "D2-q8-nvfp4")]
    for case in wide:
        yield Plan(_name(case), case, compiled_decode(case, rates.arch), DECODE_FAMILY)


def _name(case: Decode) -> str:
    dim = "" if case.head_dim == 128 else f", head dim {case.head_dim}"
    return f"decode {_CACHES[case.kv_dtype]}{dim}, {packed_rows(case)} rows"


def table(rates: Rates, chosen: Iterable[Plan] | None = None) -> str:
    """Return a Markdown table with a row for each of these kernels, or for each planned kernel."""
    rows = [_cells(one, rates) for one in (plans(rates) if chosen is None else chosen)]
    return tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)


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
