"""Predictions of the mma.sync model for the loops shipped for sm_120, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from hopwell.kernels.config.base import KernelConfig, KvFetch, KvType
from hopwell.kernels.config.splitting import LATENT_SWAP_AB_ROWS
from hopwell.kernels.hardware import WARPS
from hopwell.kernels.jit.toolchain import artifact
from hopwell.kernels.problem import Family, MaskKind
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig, Sm120MlaConfig
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig
from hopwell.perf import resources
from hopwell.perf.decode_workloads import DECODE
from hopwell.perf.mla_workloads import MLA
from hopwell.perf.model import work_tiles
from hopwell.perf.prefill_workloads import PREFILL
from hopwell.perf.results import Run
from hopwell.perf.sass import disassemble
from hopwell.perf.warp_model import CARDS, HOPPER_CARD, Card, LoopWork, Prediction, Shape, loop_work, predict

ARCH, HOPPER = "sm_120a", "sm_90a"
CANDIDATE = "hopwell, pages of 64"
BOXES32, BOXES64 = (KvFetch.PAGE_BOXES, 32), (KvFetch.PAGE_BOXES, 64)  # pages of 64 tokens as tiles
PAGE_ROWS = (KvFetch.PAGE_ROWS, 0)
RESULTS = Path(__file__).parent / "results" / "h200" / "sm120"


@dataclass(frozen=True)
class Loop:
    """A kernel's loop."""

    name: str
    config: KernelConfig
    rows: int  # of queries that an SM multiplies with a key
    warps: int  # that multiply them
    key_bytes: float  # memory bytes of a key and its value

    @property
    def streams(self) -> bool:
        """Whether keys come from memory and not from the L2 cache."""
        return self.config.family is not Family.PREFILL

    def keys(self, does: LoopWork) -> int:
        """Return the number of keys in a step."""
        of_a_key = 2 * self.rows * (self.config.head_dim_qk + self.config.head_dim_v)
        return round(self.warps * sum(does.flop.values()) / of_a_key)

    @property
    def converting(self) -> int:
        """Number of warps that convert K and V for the warps that multiply."""
        return WARPS if self.config.family is Family.PREFILL and self.config.converts else 0

    def predict(self, does: LoopWork, card: Card) -> Prediction:
        loaded = round(self.keys(does) * self.key_bytes)
        return predict(does, Shape(self.warps, loaded, self.streams, self.converting), card)


def prefill(name: str, dims: tuple[int, int], dtype: str = "bf16", **options: Any) -> Loop:
    config = Sm120PrefillConfig(ARCH, dtype, "bf16", *dims, MaskKind.CAUSAL, *BOXES32, **options)
    return Loop(name, config, config.tile.m, config.tile.m // 16, bytes_of(config, sum(dims)))


def decode(name: str, dim: int, rows: int, kv_type: KvType = KvType.WIDE) -> Loop:
    config = Sm120DecodeConfig(ARCH, "bf16", "bf16", dim, dim, MaskKind.FULL, *BOXES64, kv_type, rows)
    return Loop(name, config, rows, 4, bytes_of(config, 2 * dim))


def mla(name: str, kv_type: KvType = KvType.WIDE) -> Loop:
    pages, rows = BOXES64 if kv_type is KvType.WIDE else PAGE_ROWS, LATENT_SWAP_AB_ROWS
    config = Sm120MlaConfig(ARCH, "bf16", "bf16", 576, 512, MaskKind.CAUSAL, *pages, kv_type, rows)
    return Loop(name, config, rows, 4, bytes_of(config, 576))


def bytes_of(config: KernelConfig, elements: int) -> float:
    """Return the bytes of ``elements`` elements of K or V, with their block scales."""
    element = config.kv_element
    return elements * element.bits / 8 + (elements / element.block if element.block else 0)


def loops() -> list[Loop]:
    """Return the loops of the tables, with head dims and types of real models."""
    return [
        *(prefill(f"prefill bf16 d{dim}", (dim, dim)) for dim in (64, 128, 256)),
        prefill("prefill bf16 d192/128", (192, 128)),
        prefill("prefill e4m3 d128", (128, 128), "e4m3"),
        prefill("prefill bf16 over e4m3 d128", (128, 128), kv_type=KvType.E4M3),
        prefill("prefill bf16 over e4m3 d256", (256, 256), kv_type=KvType.E4M3),
        prefill("prefill bf16 over NVFP4 d128", (128, 128), kv_type=KvType.NVFP4),
        prefill("prefill bf16 over NVFP4 d192/128", (192, 128), kv_type=KvType.NVFP4),
        *(prefill(f"prefill bf16 over NVFP4 d{dim}", (dim, dim), kv_type=KvType.NVFP4) for dim in (192, 256)),
        *(decode(f"decode bf16 d{dim}, 8 rows", dim, 8) for dim in (64, 128, 256)),
        decode("decode bf16 d128, 32 rows", 128, 32),
        decode("decode over e4m3 d128, 8 rows", 128, 8, KvType.E4M3),
        decode("decode over int8 d128, 8 rows", 128, 8, KvType.INT8),
        decode("decode over NVFP4 d128, 8 rows", 128, 8, KvType.NVFP4),
        mla("MLA bf16 576/512, 16 rows"),
        mla("MLA over e4m3 576/512, 16 rows", KvType.E4M3),
    ]


def work_of(loop: Loop, compiled_for: str = "") -> LoopWork:
    """Return the work of the compiled loop; ``compiled_for`` may name another architecture."""
    config = replace(loop.config, compiled_for=compiled_for) if compiled_for else loop.config
    return loop_work(disassemble(artifact(config).cubin))


INTRODUCTION = """A cell begins with the share that a loop can reach. In prefill it is the share of the MMA rate, in
decode and MLA of the memory bandwidth. The unit that limits the loop follows. Last comes the next busiest unit, with
the share of a step in which it is busy.
"""
UNHIDDEN = """Measurements of the same loops on an H200, compiled for it, beside the model's predictions. Unhidden
cycles are the measured cycles of a step beyond the model's. The last columns are the shares of the first table if
these GPUs leave as many cycles unhidden.
"""
RESOURCES = """Registers and spills that ptxas reports for these kernels. Spills are instructions that store or load a
register.
"""


def report() -> str:
    """Return all tables."""
    known = [(loop, work_of(loop)) for loop in loops()]
    published = "\n\n".join(card.sources for card in (*CARDS, HOPPER_CARD))
    used = resources.table(loop.config for loop in loops())
    return "\n".join([INTRODUCTION, table(known), "", UNHIDDEN, hopper(), "", published, "", RESOURCES, used]) + "\n"


def table(known: Iterable[tuple[Loop, LoopWork]]) -> str:
    """Return a table with a row for each loop."""
    rows = []
    for loop, does in known:
        cells = []
        for one in (loop.predict(does, card) for card in CARDS):
            name, busy = one.step.next_limiter
            cells.append(f"{_share(loop, one):.0%}, {one.step.limiter}; {name} {busy:.0%}")
        rows.append([loop.name, str(loop.keys(does)), str(does.instructions), *cells])
    return _table(rows, ["loop", "keys of a step", "instructions of a warp", *(card.name for card in CARDS)])


def _share(loop: Loop, one: Prediction) -> float:
    return one.memory_share if loop.streams else one.product_share


def hopper() -> str:
    """Return a table of a Hopper GPU's measurements of these loops beside the model's predictions for it."""
    headers = ["case", "limited by", "model", "measured", "measured / model", "cycles of a step unhidden"]
    return _table([*_measured_prefill(), *_measured_streams()], [*headers, *(card.name for card in CARDS)])


def _measured_prefill() -> Iterator[list[str]]:
    measured = rates("prefill")
    by_name = {case.name: case for case in PREFILL}
    for name, dtype in (("P1", "bf16"), ("P1-fp8", "e4m3")):
        loop, case = prefill("", (128, 128), dtype), by_name[name]
        does = work_of(loop, HOPPER)
        one, keys = loop.predict(does, HOPPER_CARD), loop.keys(does)
        steps = sum(tile.masked + tile.full for tile in work_tiles(case, loop.rows, keys, 1))
        seconds = steps * one.step.cycles / HOPPER_CARD.clock / HOPPER_CARD.sms
        figures = case.work / seconds / 1e12, measured[name, CANDIDATE]
        yield _row(loop, case.title, one, figures, "TFLOP/s")


def _measured_streams() -> Iterator[list[str]]:
    """Yield decode against the bandwidth that its run measured for reads, then MLA.

    MLA's figure is the difference between longer and shorter requests. A CTA begins, ends and combines once at any
    length, so the difference contains only steps.
    """
    loop, measured = decode("", 128, 8), rates("decode")
    one = loop.predict(work_of(loop, HOPPER), HOPPER_CARD)
    for case in (case for case in DECODE if case.name in ("D1", "D2", "D3", "D4")):
        figures = one.memory_share * measured[case.name, "memory read"], measured[case.name, CANDIDATE]
        yield _row(loop, case.title, one, figures, "GB/s")
    loop, measured = mla(""), rates("mla")
    one = loop.predict(work_of(loop, HOPPER), HOPPER_CARD)
    short, long = (next(case for case in MLA if case.name == name) for name in ("H16", "H16-deep"))
    seconds = long.work / measured[long.name, CANDIDATE] - short.work / measured[short.name, CANDIDATE]
    figures = one.memory_share * measured[long.name, "memory read"], (long.work - short.work) / seconds
    yield _row(loop, f"{long.title}; beyond {short.name}", one, figures, "TFLOP/s")


def _row(loop: Loop, title: str, one: Prediction, figures: tuple[float, float], unit: str) -> list[str]:
    model, found = figures
    unhidden = one.step.cycles * (model / found - 1)
    cells = [title, one.step.limiter, f"{model:.0f} {unit}", f"{found:.0f} {unit}", f"{found / model:.2f}"]
    cells.append(f"{unhidden:.0f} of {one.step.cycles + unhidden:.0f}")
    if loop.config.uses_fp8_mma:
        return [*cells, *["-"] * len(CARDS)]  # Hopper computes this in another way
    does = work_of(loop)
    for card in CARDS:
        there = loop.predict(does, card)
        cells.append(f"{_share(loop, there) * there.step.cycles / (there.step.cycles + unhidden):.0%}")
    return cells


def rates(family: str) -> dict[tuple[str, str], float]:
    """Return the measured rates of a family, by case and candidate."""
    run = Run.load(RESULTS / f"{family}.json")
    return {(row.workload.partition(":")[0], row.candidate): row.rate for row in run.rows if row.rate}


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
