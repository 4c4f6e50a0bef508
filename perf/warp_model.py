"""A performance model of kernels that multiply with mma.sync on sm_120: what published rates allow a compiled loop.

No sm_120 card was available, so no figure was measured on one. A step of the loop takes the time of the busiest unit of
an SM. Assumptions:

* Enough warps are resident to hide latencies and waits for each other, so the model gives an upper bound of the rate.
* Every warp that multiplies runs the loop once a step, and so does every warp that converts K and V for prefill. Warps
  that load cost nothing. The warp that dequantizes MLA keys costs nothing either.
* The units are listed in the CUDA programming guide, have the rates of compute capability 12.0, and run side by side.
* ldmatrix, loads, stores and TMA writes share one port of shared memory, without bank conflicts.
* Conversions from e4m3 to 16 bits run at a third of the rate of other conversions. A Hopper GPU does not have an e4m3
  product for one warp and converts instead. It reaches half of the speed that the full rate would allow. With a third
  of the rate, the unhidden part of a step on Hopper is as large as in 16 bits.
* The assumed numbers of SMs, clocks and FLOP per cycle have the published TFLOP/s as their product. The split between
  SMs and clock does not matter, because a step is counted in cycles of one SM. Only the bytes of memory per SM and
  cycle, bandwidth / (SMs x clock), depend on their product. The clock does not fall under load.
* GeForce halves products of 16 and 8 bits that accumulate in float32, and does not halve block-scaled ones.
* The data of a step comes from memory if ``streams``, as in decode; otherwise from the L2 cache, which is not modelled.
  Decode then reaches the listed share of the bandwidth, less than all of it if another unit is busier than memory.
  Enough loads are in flight. The cost of combines and of the ends of requests is not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from hopwell.kernels.hardware import LANES
from hopwell.perf.kernel_work import sass_results
from hopwell.perf.loops import Loop, innermost
from hopwell.perf.sass import Sass, disassemble, sass_loops
from hopwell.perf.steps import ALU, CONVERSION, FMA, ISSUE, MEMORY, MMA, MUFU, SHARED, StepTime

UNPACKING = "unpacking of e4m3"
PLAIN_16, PLAIN_8, SCALED_8, SCALED_4 = "16-bit", "8-bit", "block-scaled 8-bit", "block-scaled 4-bit"
SHARED_BYTES = 128  # per cycle
LANE_RATES = {MUFU: 16, FMA: 128, ALU: 64, CONVERSION: 64, UNPACKING: 64 / 3}  # a cycle
ISSUE_RATE = 4  # instructions per cycle

_PRODUCT = re.compile(r"(?P<kind>[HQO]MMA)(?P<scaled>\.SF)?\.168(?P<depth>\d+)")
_SHARED_ACCESS = re.compile(r"(?P<op>LDSM|STSM|LDS|STS)\b(?P<rest>\S*)")
_MATRICES = re.compile(r"\.MT?(?P<shape>88|816|1616)(?:\.(?P<count>\d))?")
_ROWS = {"88": 8, "816": 8, "1616": 16}  # of 16 bytes, by the matrix's shape
_FULL, _HALVED = {PLAIN_16: 1024, PLAIN_8: 2048}, {PLAIN_16: 512, PLAIN_8: 1024}
_SCALED = {SCALED_8: 2048, SCALED_4: 4096}


@dataclass(frozen=True)
class Card:
    """A card and its rates.

    ``sms``, ``clock`` and ``products``, the FLOP per cycle and SM by kind, are assumptions that give the published
    TFLOP/s. ``published`` has one fact of a source each, in Markdown.
    """

    name: str
    sms: int
    clock: float  # Hz
    memory_bytes: float  # per second
    products: Mapping[str, int]
    published: tuple[str, ...]

    @property
    def sources(self) -> str:
        """The published facts as a list in Markdown, under the card's name."""
        return "\n".join([f"**{self.name}**\n", *(f"* {fact}" for fact in self.published)])


CARDS = (
    Card(
        "RTX PRO 6000", 188, 2.617e9, 1792e9, _FULL | _SCALED,
        (
            "24064 CUDA cores, 1792 GB/s, and 4000 TFLOP/s in 4 bits with sparsity ([NVIDIA's data sheet]("
            "https://www.nvidia.com/content/dam/en-zz/Solutions/data-center/rtx-pro-6000-blackwell-workstation-edition/workstation-blackwell-rtx-pro-6000-workstation-edition-nvidia-us-3519208-web.pdf"
            "), in a [copy](https://github.com/atineoSE/coding-model-seeks-gpu)).",
            "Boost clock 2.617 GHz, and 4030.4 TFLOP/s in 4 bits with sparsity, less rounded (Table 4 of "
            "[NVIDIA RTX Blackwell PRO GPU Architecture]("
            "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
            "), as others quote it). Without sparsity this is 4096 FLOP in 4 bits a cycle and SM.",
            "467.8 TFLOP/s in bfloat16 at 2.43 GHz for the Server Edition, which is 1024 FLOP a cycle and SM. That "
            "edition has 1597 GB/s ([aiconfigurator](https://github.com/ai-dynamo/aiconfigurator), "
            "rtx_pro_6000_server.yaml).",
        ),
    ),
    Card(
        "RTX 5090", 170, 2.407e9, 1792e9, _HALVED | _SCALED,
        (
            "170 SMs, boost clock 2.407 GHz, 1792 GB/s, and 209.5 TFLOP/s in 16 bits accumulated in float32 (pages 46 "
            "and 47 of [NVIDIA RTX Blackwell GPU Architecture V1.1]("
            "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
            "), as [learn-cuda](https://github.com/gau-nernst/learn-cuda) and others quote it).",
            "A smaller GeForce card: 51, 102 and 202 TFLOP/s measured in 16 bits, 8 bits and block-scaled 8 bits "
            "([flashinfer #3628](https://github.com/flashinfer-ai/flashinfer/issues/3628)).",
            "An RTX 5060 Ti with 36 SMs at 2.57 GHz: 47 TFLOP/s measured in bfloat16, which is 508 FLOP a cycle and "
            "SM. In cuBLAS 185 in e4m3 and 342 in NVFP4 ([BLACKWALL](https://github.com/QuantumDrizzy/BLACKWALL)).",
            "Block-scaled 4-bit MMA: 4096 FLOP a cycle measured ([ninfer #160]("
            "https://github.com/Neroued/ninfer/pull/160)).",
        ),
    ),
    Card(
        "DGX Spark", 48, 2.5e9, 273e9, _FULL | _SCALED,
        (
            "48 SMs and 273 GB/s ([dgx-spark-playbooks](https://github.com/NVIDIA/dgx-spark-playbooks), "
            "nvidia/cutile-kernels).",
            "1000 TFLOP/s in 4 bits with sparsity ([NVIDIA](https://docs.nvidia.com/dgx/dgx-spark/hardware.html), as "
            "others quote it). The clock is assumed so that half of these come out.",
            "16 bits: NVIDIA publishes no rate, and measurements disagree. In a [thread of its forum]("
            "https://forums.developer.nvidia.com/t/detailed-compute-performance-metrics-for-dgx-spark/351993"
            "), as others quote it, a loop of MMA alone gave 213 TFLOP/s in 16 bits, 214 in 8 and 427 in 4. Large "
            "matrix products gave 100 in bfloat16 and 208 in 8 bits.",
            "Others measured 92 TFLOP/s in 16 bits, and 218 GB/s "
            "([kernels #283](https://github.com/huggingface/kernels/pull/283)).",
            "Assumed: 123 TFLOP/s in 16 bits, which is 1024 FLOP a cycle and SM as on the RTX PRO 6000.",
        ),
    ),
)  # fmt: skip

# A Hopper GPU can run the same loops, compiled for Hopper, to check the model.
HOPPER_CARD = Card(
    "H200", 132, 1.98e9, 4800e9, {PLAIN_16: 2048},
    ("4800 GB/s and 1.98 GHz.", "Assumed: `mma.sync` has half of the rate of `wgmma`."),
)  # fmt: skip


@dataclass(frozen=True)
class LoopWork:
    """Work of one warp in a step."""

    flop: Mapping[str, int]  # by kind of product
    results: Mapping[str, float]  # of a lane, by unit
    shared_bytes: int
    instructions: int
    converting: LoopWork | None = None  # work of a warp that converts for the warps that multiply


def product_of(one: Sass) -> tuple[str, int] | None:
    """Return the kind and the FLOP of a matrix instruction."""
    found = _PRODUCT.match(one.op)
    if found is None:
        return None
    plain = {"HMMA": PLAIN_16, "QMMA": PLAIN_8}
    scaled = {"QMMA": SCALED_8, "OMMA": SCALED_4}
    kind = (scaled if found["scaled"] else plain)[found["kind"]]
    return kind, 2 * 16 * 8 * int(found["depth"])


def shared_bytes_of(one: Sass) -> int:
    """Count the bytes of shared memory that an instruction of a warp reads or writes."""
    found = _SHARED_ACCESS.match(one.op)
    if found is None:
        return 0
    matrices = _MATRICES.search(found["rest"])
    if matrices:
        return _ROWS[matrices["shape"]] * 16 * int(matrices["count"] or 1)
    width = re.search(r"\.(64|128|U8|S8|U16|S16)\b", found["rest"])
    bits = int(width[1].lstrip("US")) if width else 32
    return LANES * bits // 8


def loop_work(code: Sequence[Sass]) -> LoopWork:
    """Return the work of the steady-state loop.

    Among loops that multiply, it compares and selects least in proportion to its products.

    Raises:
        ValueError: no loop multiplies.
    """
    loops = innermost(sass_loops(code), lambda loop: any(product_of(code[i]) for i in loop.path))
    if not loops:
        raise ValueError("no loop of the kernel has a matrix instruction of one warp (HMMA, QMMA, OMMA)")

    def masking(path: Sequence[int]) -> float:
        compares = sum(code[i].root in ("FSEL", "ISETP") for i in path)
        return compares / sum(product_of(code[i]) is not None for i in path)

    instructions = [code[i] for i in min((loop.path for loop in loops), key=masking)]
    return replace(_work(instructions), converting=_converting_work(code))


def _converting_work(code: Sequence[Sass]) -> LoopWork | None:
    """Return the work of the loop that reads, converts and writes back data in shared memory, or None."""

    def converts(loop: Loop) -> bool:
        found = {code[i].root for i in loop.path}
        return {"LDS", "F2FP", "STS"} <= found and not any(product_of(code[i]) for i in loop.path)

    found = innermost(sass_loops(code), converts)
    return max(
        (_work([code[i] for i in loop.path]) for loop in found), key=lambda does: does.instructions, default=None
    )


def _work(instructions: Sequence[Sass]) -> LoopWork:
    flop: Counter[str] = Counter()
    for kind, amount in filter(None, map(product_of, instructions)):
        flop[kind] += amount
    results = sass_results(instructions)
    unpacked = sum(one.root == "F2FP" and "UNPACK" in one.op for one in instructions)
    if unpacked:
        results.subtract({CONVERSION: unpacked})
        results[UNPACKING] = unpacked
    return LoopWork(flop, results, sum(map(shared_bytes_of, instructions)), len(instructions))


@dataclass(frozen=True)
class Shape:
    """Conditions of a loop on an SM.

    ``warps`` multiply, over all CTAs of the SM. Their steps together load ``loaded_bytes`` of K and V. ``converting``
    further warps convert K and V for them.
    """

    warps: int
    loaded_bytes: int
    streams: bool = False
    converting: int = 0


@dataclass(frozen=True)
class Prediction:
    card: Card
    step: StepTime

    @property
    def product_share(self) -> float:
        """Share of the card's rate of these products that the model reaches."""
        return self.step.units[MMA] / self.step.cycles

    @property
    def memory_share(self) -> float:
        """Share of the card's bandwidth that the model reaches."""
        return self.step.units[MEMORY] / self.step.cycles


def predict(does: LoopWork, shape: Shape, card: Card) -> Prediction:
    """Predict the cycles of an SM for a step, by unit."""
    bytes_a_cycle = card.memory_bytes / card.clock / card.sms
    beside = does.converting or LoopWork({}, {}, 0, 0)

    def together(amount: Callable[[LoopWork], float]) -> float:
        return shape.warps * amount(does) + shape.converting * amount(beside)

    units = {
        MMA: shape.warps * sum(amount / card.products[kind] for kind, amount in does.flop.items()),
        SHARED: (together(lambda each: each.shared_bytes) + shape.loaded_bytes) / SHARED_BYTES,
        ISSUE: together(lambda each: each.instructions) / ISSUE_RATE,
        MEMORY: shape.loaded_bytes / bytes_a_cycle if shape.streams else 0.0,
    }
    lanes = {unit: together(lambda each, unit=unit: each.results.get(unit, 0)) for unit in LANE_RATES}  # type: ignore[misc]
    units |= {unit: LANES * lanes[unit] / rate for unit, rate in LANE_RATES.items()}
    return Prediction(card, StepTime(units))


def report(cubin: Path, shape: Shape) -> str:
    """Return a Markdown table with a row for each card."""
    does = loop_work(disassemble(cubin))
    found = [predict(does, shape, card) for card in CARDS]
    units = list(found[0].step.units)
    rows = [
        [
            one.card.name,
            one.step.limiter,
            "{} {:.0%}".format(*one.step.next_limiter),
            f"{one.product_share:.0%}",
            f"{one.memory_share:.0%}" if shape.streams else "-",
            *(f"{one.step.units[unit]:.0f}" for unit in units),
        ]
        for one in found
    ]
    table = tabulate(
        rows,
        ["card", "limited by", "then", "of mma.sync", "of memory", *units],
        tablefmt="github",
        disable_numparse=True,
    )
    sources = "\n\n".join(f"{card.sources}\n* Assumed: {card.sms} SMs at {card.clock / 1e9:.3f} GHz." for card in CARDS)
    return f"{(__doc__ or '').strip()}\n\nCycles of an SM a step, by unit:\n\n{table}\n\n{sources}\n"
