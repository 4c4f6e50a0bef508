"""Published rates of kernels of other projects beside the rates that the model gives these kernels.

The model is believed as far as these agree: :data:`BANDS` states how far, and a test holds it to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from hopwell.perf.blackwell_kernels import leaves, mla, pair_prefill, prefill
from hopwell.perf.blackwell_rates import RATES, Rates
from hopwell.perf.decode_workloads import Decode
from hopwell.perf.mla_workloads import Mla
from hopwell.perf.model import PrefillLoop, seconds
from hopwell.perf.prefill_workloads import Prefill
from hopwell.perf.quantized import E4M3
from hopwell.perf.steps import Step

PREFILL, MLA, DECODE = "prefill", "MLA", "decode"
# Largest distance of model / published from 1, over all rows of a family.
BANDS = {PREFILL: 0.25, MLA: 0.15, DECODE: 0.35}


@dataclass(frozen=True)
class Published:
    """A published rate: TFLOP/s, or microseconds for decode."""

    kernel: str
    case: Prefill | Decode
    value: float
    source: str
    loop: PrefillLoop | Step
    arch: str = "sm_100a"
    fitted: bool = False  # a rate of the model was chosen to match this row

    @property
    def family(self) -> str:
        return family_of(self.case)

    @property
    def rates(self) -> Rates:
        return RATES[self.arch]

    @property
    def model(self) -> float:
        """Rate or time of the model, in the unit of ``value``."""
        time = seconds(self.case, self.loop, self.rates)
        return time * 1e6 if self.family == DECODE else self.case.work / time / 1e12

    @property
    def speed(self) -> float:
        """Speed of the model over the published speed."""
        return self.value / self.model if self.family == DECODE else self.model / self.value


def family_of(case: Prefill | Decode) -> str:
    return PREFILL if isinstance(case, Prefill) else MLA if isinstance(case, Mla) else DECODE


def steady_step(loop: PrefillLoop | Step) -> Step:
    """Return the steady step of a kernel."""
    return loop.steady if isinstance(loop, PrefillLoop) else loop


def _prefill(batch: int, length: int, *, causal: bool, heads: int = 16, dim: int = 128, **types: Any) -> Prefill:
    name, lengths = f"{batch} x {length}", (length,) * batch
    return Prefill(name, name, lengths, lengths, heads, heads, dim, dim, causal=causal, **types)


def _decode(batch: int, length: int, kv_heads: int = 8, **options: Any) -> Decode:
    return Decode(f"{batch} x {length}", f"{batch} x {length}", (length,) * batch, kv_heads=kv_heads, **options)


def _mla(batch: int, length: int, **options: Any) -> Mla:
    return Mla(f"{batch} x {length}", f"{batch} x {length}", (length,) * batch, **options)


_D128 = (128, 128)
_LONG = _prefill(1, 32768, causal=True)  # the authors name highest figures, and not their case
_FA4 = prefill(_D128, 16, early=0.75, reads_twice=False)
_FA4_WITHOUT_POLYNOMIALS = prefill(_D128, 16, early=0.75, reads_twice=False, eighths=0)
_CUDNN = prefill(_D128, 8, reads_twice=False)
_E4M3: dict[str, Any] = dict(q_dtype=E4M3, kv_dtype=E4M3)
_DECODE_TIMES = {
    (1, 1024): 4.9,
    (1, 4096): 8.1,
    (8, 4096): 22.9,
    (8, 16384): 77.7,
    (64, 4096): 152.0,
    (64, 16384): 598.0,
}
_DECODE_FITS = ((1, 1024), (8, 4096))
# Its sources are the result files of 2026-09: decode_sweep of a B200, qwen35 of a GB200.
_CUDNN_RESULTS = "cudnn-frontend, benchmark/attention_inference/results"
_CUDNN_DECODE_TIMES = {
    (1, 8192): 10.9,
    (1, 131072): 94.5,
    (8, 8192): 54.8,
    (32, 8192): 172.2,
    (128, 8192): 615.0,
    (128, 131072): 9494.0,
}
PUBLISHED = (
    *(
        Published(
            "cuDNN, bf16, head dim 256",
            _prefill(1, length, causal=True, dim=256, heads=heads),
            rate,
            f"{_CUDNN_RESULTS}, GB200",
            pair_prefill(256, 16),
        )
        for length, heads, rate in ((8192, 32, 1722), (32768, 16, 1934))
    ),
    Published("FlashAttention 4, bf16", _LONG, 1605, "the authors' highest figure, 71 %", _FA4),
    Published("FlashAttention 4, bf16", _LONG, 1882, "flash-attention #2605", _FA4_WITHOUT_POLYNOMIALS, "sm_103a"),
    *(
        Published("cuDNN, e4m3", _prefill(2, length, causal=causal, **_E4M3), rate, "cudnn-frontend, GB200", _CUDNN)
        for length, causal, rate in ((8192, True, 2047), (16384, False, 2263))
    ),
    Published("FlashAttention 4 MLA, bf16", _mla(128, 32768), 1259, "flash-attention #2468", mla(16), fitted=True),
    Published("FlashMLA sparse prefill, bf16", _mla(4096, 2048), 1450, "FlashMLA README", mla(16, 2 / 3), fitted=True),
    *(
        Published(kernel, _mla(128, 16384, kv_dtype=E4M3), rate, "vLLM #41778", mla(8))
        for kernel, rate in (("trtllm-gen MLA, e4m3", 2630), ("TOKENSPEED MLA, e4m3", 2906))
    ),
    *(
        Published(
            "best of trtllm-gen and CuTe DSL decode, bf16",
            _decode(*shape),
            time,
            "flashinfer #3360",
            leaves(_D128, 8),
            fitted=shape in _DECODE_FITS,
        )
        for shape, time in _DECODE_TIMES.items()
    ),
    Published(
        "trtllm-gen decode, bf16, 4 new tokens",
        _decode(64, 16384, q_len=4),
        621,
        "flashinfer #3360",
        leaves(_D128, 32),
    ),
    Published("cuDNN decode, bf16", _decode(32, 4096, 4), 44, "cudnn-frontend #1094", leaves(_D128, 16)),
    *(
        Published("cuDNN decode, bf16", _decode(*shape), time, _CUDNN_RESULTS, leaves(_D128, 8))
        for shape, time in _CUDNN_DECODE_TIMES.items()
    ),
)


def spread(family: str) -> tuple[float, float]:
    """Return the least and the largest speed of the model over the published one in a family."""
    speeds = [one.speed for one in PUBLISHED if one.family == family]
    return min(speeds), max(speeds)


def table() -> str:
    """Return a Markdown table with a row for each published figure."""
    rows = [
        [
            f"{one.kernel}, {one.rates.gpu}",
            one.case.name + (", causal" if isinstance(one.case, Prefill) and one.case.causal else ""),
            f"{one.value:g} {'us' if one.family == DECODE else 'TFLOP/s'}",
            f"{one.model:.3g}" if one.family == DECODE else f"{one.model:.0f}",
            f"{one.speed:.2f}{' (fit)' * one.fitted}",
            steady_step(one.loop).time(one.rates).limiter,
            one.source,
        ]
        for one in PUBLISHED
    ]
    headers = ["kernel", "case", "published", "model", "speed of the model / published", "limited by", "source"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
