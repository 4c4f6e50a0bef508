"""The performance model's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace

from tabulate import tabulate

from hopwell.kernels.jit.toolchain import artifact
from hopwell.perf import blackwell_plans, calibration
from hopwell.perf.blackwell_rates import (
    DENSE_BF16,
    MEMORY_BY_BYTES_IN_FLIGHT,
    MEMORY_SOURCE,
    MMA_INTERVALS,
    MMA_SOURCE,
    OTHER_MEASUREMENTS,
    RATES,
    TMA_LOAD_CYCLES,
    TMA_LOAD_SOURCE,
    Rates,
)
from hopwell.perf.kernel_work import Stretch, Work, work
from hopwell.perf.model import (
    KernelModel,
    OtherShare,
    Prediction,
    cases,
    compiled,
    config_of,
    kernel_model,
    predict,
    softmax_times,
)
from hopwell.perf.prefill_workloads import Prefill
from hopwell.perf.steps import ALU, CONVERSION, FMA, MUFU, StepTime

SHARES = range(6)  # eighths of exp2 evaluated as polynomials
DIMS_CASES = ("P1", "P6", "P7")  # one for each head dim

_INTRODUCTION = f"""# Attention with tcgen05: a model, not a measurement

Nothing here ran on a GPU of this architecture. Predictions of kernels that exist follow from their PTX and machine
code, and predictions of planned kernels from descriptions of their steps. Both use published rates: they are the rates
of a kernel whose units all keep their rate. `python -m hopwell.perf model` writes this file. TFLOP/s count what a mask
leaves; the dense rate is {DENSE_BF16 / 1e12:.0f} TFLOP/s in 16 bits.
"""

_CALIBRATION = """Published kernels of other projects in the same model, described by their tiles, bytes and order. A
speed above 1 means that the model promises more than the kernel reached. The model is believed as far as these agree.
The range of a prediction below is its value divided by the largest and by the least speed of its family. Rows marked
"fit" gave the model a rate, so they confirm nothing.
"""

_DECODES = """A step of decode is a leaf. Its chain belongs to one warpgroup, with keys and values in shared memory:
dequant, S, softmax, P, O, and the node. One node is combined with another for each leaf, or for four leaves if leaves
are added before the tree. The CTAs of an SM have a chain each.
"""

_PLANS = """Steps of kernels that are not written, and of compiled kernels of CTA pairs beside them. Latencies of
softmax and of rescales of O are estimates, checked against the compiled kernels.
"""

_ASSUMPTIONS = """## Assumptions

* A step takes as long as the busiest unit, or the chain of one query tile: its products, its softmax, and the messages
  between the warps. While that chain limits, both softmax warps of a sub-partition run at once for a part of the time.
  They then slow each other down, which the model leaves out.
* The time of a softmax comes from machine code: one warp issues in order, as soon as the stall counts and scoreboards
  of ptxas allow it. That layout is not documented; durations behind scoreboards are assumptions of the table of rates.
  Waits succeed at once.
* MMA, MUFU, FMA, conversions and bytes are counted in PTX, ALU and issue slots in machine code. Machine code alone
  shows which maxima take three operands, which moves are left, and the work of the uniform datapath. Its instructions
  take an issue slot here as well.
* An operand of tcgen05.mma is read from shared memory once for each instruction, and an operand in tensor memory costs
  nothing. TMA and warps write through the same port. All of them together reach 0.82 of its 128 bytes a cycle.
* K and V come from L2: heads of a group and query tiles of a request run side by side and read the same tiles.
* The first S of a work tile follows the last P V of the same query tile, so steps go on without a gap. Loading the next
  Q and storing O count where they take longer than what they run beside. The softmax warps' row results are left out.
* CTAs take work tiles one by one in the kernel's order.
* The clock does not fall under load. A B200 lowers it at its power limit, which dense products reach.
* Decode and MLA spread keys evenly over all SMs, and add one launch. Partials and their combine are left out.
* Issue slots of planned decode are counted in the machine code of the mma.sync kernels. The warp that issues products
  shares no sub-partition with a warp that loads. Compiled decode counts its own machine code.
* A load from memory takes 1.1 us while all SMs read: 48 KiB in flight in each, over the rate that this reaches.
* An arrival at a barrier of another CTA costs what an arrival at an own barrier costs. The GPU-wide fence that ptxas
  makes of a release in cluster scope is left out.
"""


def report(arch: str) -> str:
    """Return all tables for an architecture."""
    rates = RATES[arch]
    known = _known(arch)
    predictions = [_predict(case, does, arch, rates) for case, does in known.values()]
    decodes = list(blackwell_plans.compiled_decodes(rates))
    parts = [
        _INTRODUCTION,
        f"GPU: {rates.gpu} ({arch}).",
        "## Calibration\n",
        _CALIBRATION,
        calibration.table(),
        "## Predictions of compiled kernels\n",
        prediction_table(predictions),
        "Losses one after the other; their product is the share of the dense rate.\n",
        _losses(predictions),
        "\n".join(f"- {prediction.case.title}" for prediction in predictions),
        _DECODES,
        blackwell_plans.table(rates, decodes),
        "## Planned kernels\n",
        _PLANS,
        blackwell_plans.table(rates),
        "## Cycles of a step, by unit\n\nPrefill: both query tiles of 128 rows, without a mask. MLA, and prefill at "
        "head dim 256: one CTA of a pair. The largest limits.\n",
        unit_table(
            {one.case.name: one.kernel.steady for one in predictions}
            | {
                one.name: calibration.steady_step(one.loop).time(rates)
                for one in (*decodes, *blackwell_plans.plans(rates))
            }
        ),
        "## PTX beside machine code\n\nA warp's step of one query tile: instructions, results of a lane by unit, and "
        "the cycles that the warp takes alone.\n",
        _counts({name: known[name][1] for name in DIMS_CASES}, rates),
        "## Share of exponentials as polynomials\n\nPredicted share of the dense rate, by eighths; in brackets the "
        "cycles of a softmax, and * if its loop spills registers.\n",
        _shares([known[name][0] for name in DIMS_CASES], arch, rates),
        "## If assumptions are wrong\n\nPredicted share of the dense rate.\n",
        _variations(known.values(), arch, rates),
        "## Rates\n\nA cycle and SM unless stated otherwise; latencies in cycles.\n",
        rate_table(),
        "tcgen05.mma: cycles from issue to issue by N, and from the end of a burst until its waiting thread runs. "
        f"{MMA_SOURCE}\n",
        _interval_table(),
        "Published, and used by no prediction:\n",
        _table(OTHER_MEASUREMENTS, ["", "value", "unit", "source"], left=(0, 1, 2, 3)),
        _ASSUMPTIONS,
    ]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def summary() -> str:
    """Return the tables of a documentation page: both architectures, without units and rates."""
    parts = [_CALIBRATION, calibration.table()]
    for rates in RATES.values():
        predictions = [_predict(case, does, rates.arch, rates) for case, does in _known(rates.arch).values()]
        parts += [f"Compiled kernels, {rates.gpu}:\n", prediction_table(predictions)]
        decodes = blackwell_plans.table(rates, blackwell_plans.compiled_decodes(rates))
        parts += [f"Compiled decode kernels, {rates.gpu}:\n", decodes]
        parts += [f"Planned kernels, {rates.gpu}:\n", blackwell_plans.table(rates)]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def _known(arch: str) -> dict[str, tuple[Prefill, Work]]:
    """Return the work of the compiled kernel of each case that has one."""
    configs = {case.name: (case, config_of(case, arch)) for case in cases()}
    return {
        name: (case, work(config, artifact(config))) for name, (case, config) in configs.items() if config is not None
    }


def _model(case: Prefill, does: Work, arch: str, rates: Rates) -> KernelModel:
    config = config_of(case, arch)
    assert config is not None
    return kernel_model(compiled(does, config, rates), rates)


def _predict(case: Prefill, does: Work, arch: str, rates: Rates) -> Prediction:
    return predict(case, _model(case, does, arch, rates), rates)


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


def unit_table(times: Mapping[str, StepTime]) -> str:
    """Return a table with a row for each step and a column for each unit."""
    units = list(next(iter(times.values())).units)
    rows = [[name, *(f"{time.units[unit]:.0f}" for unit in units)] for name, time in times.items()]
    return _table(rows, ["step", *units])


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
        assert config is not None
        for eighths in SHARES:
            other = OtherShare(**vars(config), eighths=eighths)
            does = work(other, artifact(other))
            share = predict(case, kernel_model(compiled(does, other, rates), rates), rates).fraction
            spills = "*" if any(one.root in ("LDL", "STL") for one in does.softmax.code) else ""
            cells.append(f"{share:.1%} ({softmax_times(does.softmax.code, rates).late:.0f}{spills})")
        rows.append([case.name, config.polynomial_eighths, *cells])
    return _table(rows, ["shape", "in the kernel", *map(str, SHARES)])


def _variations(known: Iterable[tuple[Prefill, Work]], arch: str, rates: Rates) -> str:
    variations = {
        "as below": rates,
        "arrivals at barriers take twice as long": replace(rates, arrival=2 * rates.arrival),
        "latencies of tensor memory doubled": replace(
            rates,
            tensor_load_latency=2 * rates.tensor_load_latency,
            tensor_store_latency=2 * rates.tensor_store_latency,
        ),
        "a column of tensor memory a cycle": replace(rates, tensor_load=rates.tensor_load // 4),
        "all of the port of shared memory": replace(rates, shared_reach=1.0),
        "half of L2's bandwidth": replace(rates, l2_bytes=rates.l2_bytes // 2),
        "O rescaled in every step": replace(rates, rescaling=1.0),
    }
    known = list(known)
    rows = [
        [what, *(f"{_predict(case, does, arch, changed).fraction:.1%}" for case, does in known)]
        for what, changed in variations.items()
    ]
    return _table(rows, ["", *(case.name for case, _ in known)])


def rate_table() -> str:
    """Return a table of every rate of every architecture, and its source."""
    clocks = [f"{rates.clock / 1e9:.3f}e9" for rates in RATES.values()]
    source = "a second, at which the dense rate is the published one; boost is 1.85 to 1.965"
    rows = [["clock", *clocks, source]]
    for one in fields(Rates)[2:]:
        sources = [one.metadata["source"], one.metadata.get("sm_103a_source")]
        values = [f"{getattr(rates, one.name):g}" for rates in RATES.values()]
        rows.append([one.name, *values, "; B300: ".join(filter(None, sources))])
    in_flight = {f"{size >> 10} KiB": f"{rate / 1e12:g}" for size, rate in MEMORY_BY_BYTES_IN_FLIGHT.items()}
    rows.append(["memory, TB/s, by bytes in flight", _listed(in_flight), "", MEMORY_SOURCE])
    loads = {f"{size >> 10} KiB": f"{cycles}" for size, cycles in TMA_LOAD_CYCLES.items()}
    rows.append(["TMA load", _listed(loads), "", TMA_LOAD_SOURCE])
    return _table(rows, ["", *(rates.gpu for rates in RATES.values()), "source"], left=(0, 3))


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{size}: {value}" for size, value in values.items())


def _interval_table() -> str:
    columns = list(MMA_INTERVALS[0].cycles)
    rows = [
        [
            f"{'pair' if one.pair else '1 CTA'}, M {one.rows}",
            "tensor memory" if one.a_in_tensor_memory else "shared memory",
            *(f"{one.cycles[n]:g}" for n in columns),
            f"{one.signal:g}",
        ]
        for one in MMA_INTERVALS
    ]
    return _table(rows, ["", "A in", *(f"N {n}" for n in columns), "signal"], left=(0, 1))


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str], left: Sequence[int] = (0,)) -> str:
    alignment = ["left" if column in left else "right" for column in range(len(headers))]
    return tabulate(rows, headers, tablefmt="github", colalign=alignment, disable_numparse=True)
