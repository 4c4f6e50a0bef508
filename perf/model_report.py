"""The performance model's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from tabulate import tabulate

from hopwell.kernels.jit.toolchain import artifact
from hopwell.perf.kernel_work import ALU, CONVERSION, FMA, MUFU, Stretch, Work, work
from hopwell.perf.model import (
    B200,
    DENSE_BF16,
    OtherShare,
    Prediction,
    Rates,
    cases,
    config_of,
    kernel_model,
    predict,
    softmax_times,
)
from hopwell.perf.prefill_workloads import Prefill

SHARES = range(6)  # eighths of exp2 evaluated as polynomials
DIMS_CASES = ("P1", "P6", "P7")  # one for each head dim

_INTRODUCTION = f"""# Blackwell prefill on a B200: a model, not a measurement

No B200 was at hand. These figures follow from the compiled kernels (their PTX and machine code) and from published
rates, and say what the kernels would reach if every unit kept its rate. Written by `python -m hopwell.perf model`.
TFLOP/s count what a mask leaves; the dense rate is {DENSE_BF16 / 1e12:.0f} TFLOP/s.
"""

_ASSUMPTIONS = """## Assumptions

* A step takes as long as the busiest unit, or the chain of one query tile: its products, its softmax, and what passes
  between the warps. While that chain limits, both softmax warps of a sub-partition run at once for a part of the time;
  that they then slow each other down is left out.
* How long a softmax takes is read from machine code: one warp issues in order, not before the stall counts and
  scoreboards that ptxas has written allow it. That layout is not documented; durations behind scoreboards are
  assumptions of the table of rates. Waits succeed at once.
* MMA, MUFU, FMA, conversions and bytes are counted in PTX, ALU and issue slots in machine code: only there it shows
  which maxima take three operands, which moves are left, and what the uniform datapath does (its instructions take an
  issue slot here as well).
* An operand of tcgen05.mma is read from shared memory once for each instruction, P from tensor memory for nothing, and
  an instruction takes as long as the slower of multiplication and reading. TMA writes through the same port.
* K and V come from L2: heads of a group and query tiles of a request run side by side and read the same tiles.
* The first softmax of a work tile, with a mask, overlaps with nothing, because the last P V of the tile before has been
  waited for. Loading the next Q and storing O count where they take longer than what they run beside.
* CTAs take work tiles one by one in the kernel's order.
* The clock does not fall under load. A B200 lowers it at its power limit, which dense products reach.
"""


def report(arch: str, rates: Rates = B200) -> str:
    """Return all tables."""
    known = {case.name: (case, _work(case, arch)) for case in cases()}
    predictions = [_predict(case, does, arch, rates) for case, does in known.values()]
    parts = [
        _INTRODUCTION,
        "## Predictions\n",
        prediction_table(predictions),
        "What is lost one after the other; the product is the share of the dense rate.\n",
        _losses(predictions),
        "\n".join(f"- {prediction.case.title}" for prediction in predictions),
        "## Cycles of a step, by unit\n\nOf both query tiles of 128 rows, without a mask; the largest limits.\n",
        unit_table(predictions),
        "## PTX beside machine code\n\nA warp's step of one query tile: instructions, results of a lane by unit, and "
        "the cycles that the warp takes alone.\n",
        _counts({name: known[name][1] for name in DIMS_CASES}, rates),
        "## Share of exponentials as polynomials\n\nPredicted share of the dense rate, by eighths; in brackets the "
        "cycles of a softmax, and * where its loop spills registers.\n",
        _shares([known[name][0] for name in DIMS_CASES], arch, rates),
        "## If assumptions are wrong\n\nPredicted share of the dense rate.\n",
        _variations(known.values(), arch, rates),
        "## Rates\n\nA cycle and SM unless said; latencies in cycles.\n",
        rate_table(rates),
        _ASSUMPTIONS,
    ]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def _work(case: Prefill, arch: str) -> Work:
    config = config_of(case, arch)
    return work(config, artifact(config))


def _predict(case: Prefill, does: Work, arch: str, rates: Rates) -> Prediction:
    return predict(case, kernel_model(does, config_of(case, arch), rates), rates)


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """Return a table with a row for each shape."""
    rows = [
        [
            one.case.name,
            one.kernel.keys,
            f"{one.kernel.steady.cycles:.0f}",
            one.kernel.steady.limiter,
            f"{one.kernel.masked.cycles:.0f}",
            f"{one.kernel.per_work_tile:.0f}",
            f"{one.seconds * 1e6:.0f}",
            f"{one.tflops:.0f}",
            f"{one.fraction:.1%}",
        ]
        for one in predictions
    ]
    headers = ["shape", "keys a step", "cycles a step", "limited by", "with a mask", "a work tile more", "us"]
    return _table(rows, [*headers, "TFLOP/s", "of dense"], left=(0, 3))


def _losses(predictions: Sequence[Prediction]) -> str:
    rows = [
        [one.case.name, *(f"{share:.1%}" for share in shares)]
        for one in predictions
        for shares in [(one.visible, one.tensor_cores, one.in_steps, one.balance, one.launch, one.hbm)]
    ]
    headers = [
        "visible",
        "tensor cores in a step",
        "steps in a work tile",
        "SMs busy",
        "after the launch",
        "(HBM busy)",
    ]
    return _table(rows, ["shape", *headers])


def unit_table(predictions: Sequence[Prediction]) -> str:
    """Return a table with a row for each shape and a column for each unit."""
    units = list(predictions[0].kernel.steady.units)
    rows = [[one.case.name, *(f"{one.kernel.steady.units[unit]:.0f}" for unit in units)] for one in predictions]
    return _table(rows, ["shape", *units])


def _counts(known: dict[str, Work], rates: Rates) -> str:
    rows = []
    for name, does in known.items():
        for what, stretch in (("softmax", does.softmax), ("with a mask", does.masked_softmax)):
            rows.append([name, what, *_counted(stretch), f"{softmax_times(stretch.code, rates).late:.0f}"])
        for what, stretch in (("rescaling", does.correction), ("no rescaling", does.calm_correction)):
            rows.append([name, what, *_counted(stretch), "-"])
    units = [MUFU, FMA, ALU, CONVERSION]
    headers = ["instructions", *(f"{unit} (PTX / SASS)" for unit in units), "cycles"]
    return _table(rows, ["shape", "loop", *headers], left=(0, 1))


def _counted(stretch: Stretch) -> list[str]:
    units = (MUFU, FMA, ALU, CONVERSION)
    return [str(len(stretch.code)), *(f"{stretch.ptx[unit]:.0f} / {stretch.sass[unit]:.0f}" for unit in units)]


def _shares(chosen: Sequence[Prefill], arch: str, rates: Rates) -> str:
    rows = []
    for case in chosen:
        config, cells = config_of(case, arch), []
        for eighths in SHARES:
            other = OtherShare(**vars(config), eighths=eighths)
            does = work(other, artifact(other))
            share = predict(case, kernel_model(does, other, rates), rates).fraction
            spills = "*" if any(one.root in ("LDL", "STL") for one in does.softmax.code) else ""
            cells.append(f"{share:.1%} ({softmax_times(does.softmax.code, rates).late:.0f}{spills})")
        rows.append([case.name, config.polynomial_eighths, *cells])
    return _table(rows, ["shape", "in the kernel", *map(str, SHARES)])


def _variations(known: Iterable[tuple[Prefill, Work]], arch: str, rates: Rates) -> str:
    variations = {
        "as below": rates,
        "signals and the products' latency doubled": replace(
            rates, signal=2 * rates.signal, mma_latency=2 * rates.mma_latency
        ),
        "latencies of tensor memory doubled": replace(
            rates,
            tensor_load_latency=2 * rates.tensor_load_latency,
            tensor_store_latency=2 * rates.tensor_store_latency,
        ),
        "half of L2's bandwidth": replace(rates, l2_bytes=rates.l2_bytes // 2),
        "O rescaled in every step": replace(rates, rescaling=1.0),
    }
    known = list(known)
    rows = [
        [what, *(f"{_predict(case, does, arch, changed).fraction:.1%}" for case, does in known)]
        for what, changed in variations.items()
    ]
    return _table(rows, ["", *(case.name for case, _ in known)])


def rate_table(rates: Rates) -> str:
    """Return a table of every rate and its source."""
    clock = [
        "clock",
        f"{rates.clock / 1e9:.3f} GHz",
        "at which the dense rate is the published one; boost is 1.85 to 1.965",
    ]
    rows = [[one.name, f"{getattr(rates, one.name):g}", one.metadata["source"]] for one in fields(rates)]
    return _table([clock, *rows], ["", "", "source"], left=(0, 2))


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str], left: Sequence[int] = (0,)) -> str:
    alignment = ["left" if column in left else "right" for column in range(len(headers))]
    return tabulate(rows, headers, tablefmt="github", colalign=alignment, disable_numparse=True)
