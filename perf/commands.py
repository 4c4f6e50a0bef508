"""Measure hopwell's kernels beside their peers. Only `sweep` needs a GPU."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hopwell.kernels.hardware import DEFAULT_ARCH
from hopwell.kernels.support import ARCHS, BLACKWELL
from hopwell.perf.results import Labels, Row, Run, first_line

if TYPE_CHECKING:
    from hopwell.kernels.registry import Buildable
    from hopwell.perf.family import Case, Family

app = typer.Typer(help=__doc__, no_args_is_help=True)
console = Console(stderr=True)


def _one_of(archs: Sequence[str]) -> str:
    return f"architecture that kernels are compiled for: {', '.join(archs)}"


def _among(archs: Sequence[str]) -> Callable[[str], str]:
    """Return a check that an option is one of ``archs``."""

    def check(arch: str) -> str:
        if arch not in archs:
            raise typer.BadParameter(f"it must be one of {', '.join(archs)}, got {arch!r}")
        return arch

    return check


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise typer.BadParameter(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


@app.command()
def sweep(
    out: Annotated[Path, typer.Option(help="folder for each family's JSON, Markdown and plots")],
    cases: Annotated[str, typer.Option(help="names or globs of cases, with commas between them")] = "*",
    candidates: Annotated[
        list[str] | None, typer.Option(help="name or glob of candidates; may be repeated; all if left out")
    ] = None,
    limit: Annotated[
        float, typer.Option(min=0, help="seconds after which no case begins; those left are named")
    ] = math.inf,
    resume: Annotated[bool, typer.Option(help="keep what the folder has, and measure the cases that it lacks")] = False,
    host: Annotated[bool, typer.Option(help="time calls on the host as well, and first calls of processes")] = True,
) -> None:
    """Throughput: check every candidate against float64, then time all of them in turns, case by case. Needs a GPU.

    Each case is written as soon as it is measured.
    """
    deadline = time.monotonic() + limit
    for family, chosen, titles in _chosen(cases, candidates):
        _sweep(family, chosen, titles, Options(out, deadline, resume, host))


@app.command()
def generate(
    out: Annotated[Path, typer.Option(help="folder for the JSON, Markdown and plot")],
    cases: Annotated[str, typer.Option(help="names or globs of cases, with commas between them")] = "*",
    candidates: Annotated[list[str] | None, typer.Option(help="name or glob of candidates; may be repeated")] = None,
    limit: Annotated[
        float, typer.Option(min=0, help="seconds after which no case begins; those left are named")
    ] = math.inf,
    resume: Annotated[bool, typer.Option(help="keep what the folder has, and measure the cases that it lacks")] = False,
) -> None:
    """New tokens per second: transformers' generate_batch, and decode steps of models. Needs a GPU, and transformers.

    Each case takes up to 40 s on an H100, and is written as soon as it is measured.
    """
    from hopwell.perf.generate import CASES, LABELS

    deadline, path = time.monotonic() + limit, out / "generate.json"
    run, known = _begun(LABELS, path, resume), {case.name: case for case in CASES}
    done = {row.workload for row in run.rows}
    chosen = [known[name] for name in _matching("case", [*known], cases.split(","))]
    chosen = [case for case in chosen if case.title not in done]
    every = dict.fromkeys(title for case in CASES for title in case.candidates)
    titles = _matching("candidate", [*every], candidates or ["*"])
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    left = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(len(titles & case.candidates.keys()) for case in chosen))
        for case in chosen:
            if time.monotonic() >= deadline:
                left.append(case.name)
                continue
            of_case = [title for title in case.candidates if title in titles]
            rows = case.measure(of_case, lambda step: progress.update(task, advance=1, description=step))
            run.rows += rows
            run.write(path)
            figures = (
                f"{row.candidate} {row.rate:.0f}" if row.rate else f"{row.candidate} {row.failure}" for row in rows
            )
            progress.print(f"{case.title}: {', '.join(figures)}", highlight=False, markup=False)
    run.save(path)
    console.print(f"{path} and its .md and .png", highlight=False)
    if left:
        console.print(f"left out, as the limit had passed: {','.join(left)}", highlight=False)


@app.command("compile")
def compile_ahead(
    cases: Annotated[str, typer.Option(help="names or globs of cases, with commas between them")] = "*",
    candidates: Annotated[list[str] | None, typer.Option(help="name or glob of candidates; may be repeated")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; one for each CPU if left out")] = None,
) -> None:
    """Compile the kernels that a sweep launches, into the folder that HOPWELL_CACHE_DIR names; needs no GPU.

    HOPWELL_EMULATE names the architecture. HOPWELL_KERNELS may name another, whose kernels are compiled for it.
    """
    from hopwell.kernels.jit.ahead import compile_and_report
    from hopwell.perf.ahead import configs_of

    configs: dict[str, Buildable] = {}
    for family, chosen, titles in _chosen(cases, candidates):
        configs |= configs_of(family, chosen, titles)
    compile_and_report([*configs.values()], jobs, typer.echo)


@app.command()
def show(path: Annotated[Path, typer.Argument(help="JSON file of a run")]) -> None:
    """Write a run's Markdown and plots again, with cases in the order of their family; needs no GPU."""
    try:
        run = Run.load(path)
    except ValueError as fault:
        raise typer.BadParameter(str(fault)) from None
    for family in _families():
        if family.labels.family == run.labels.family:
            run.sort([case.title for case in family.cases])
    run.save(path)


@app.command()
def document(path: Annotated[Path, typer.Argument(help="Markdown file")]) -> None:
    """Write the tables of a Markdown file anew, from the runs that its comments name; needs no GPU."""
    from hopwell.perf.documents import with_tables

    try:
        path.write_text(with_tables(path))
    except ValueError as missing:
        raise typer.BadParameter(str(missing)) from None


@app.command()
def model(
    arch: Annotated[str, typer.Option(help=_one_of(BLACKWELL), callback=_among(BLACKWELL))] = "sm_100a",
    out: Annotated[Path | None, typer.Option(help="folder for the tables in Markdown")] = None,
    document: Annotated[Path | None, typer.Option(help="Markdown file whose predictions to write anew")] = None,
) -> None:
    """Predict kernels with tcgen05 on B200 and B300, beside published kernels; needs no GPU.

    Compiles what is not in the cache: minutes.
    """
    from hopwell.perf import documents, model_report

    if document is not None:
        documents.write_predictions(document, model_report.summary())
        return
    text = model_report.report(arch)
    typer.echo(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "model.md").write_text(text)


@app.command()
def warp_model(
    cubin: Annotated[Path | None, typer.Argument(help="kernel.cubin; all shipped loops if left out")] = None,
    warps: Annotated[int, typer.Option(min=1, help="warps of a multiprocessor that multiply")] = 8,
    loaded_bytes: Annotated[int, typer.Option(min=0, help="of K and V that a step of them loads")] = 0,
    streams: Annotated[bool, typer.Option(help="K and V come from memory, as in decode")] = False,
    document: Annotated[Path | None, typer.Option(help="Markdown file whose tables to write anew")] = None,
) -> None:
    """Predict what kernels of mma.sync reach on cards of sm_120 from their machine code; needs no GPU."""
    from hopwell.perf import documents, warp_report
    from hopwell.perf.warp_model import Shape, report

    text = warp_report.report() if cubin is None else report(cubin, Shape(warps, loaded_bytes, streams))
    if document is None:
        typer.echo(text)
    else:
        documents.write_predictions(document, text)


@app.command()
def resources(
    arch: Annotated[str, typer.Option(help=_one_of(ARCHS), callback=_among(ARCHS))] = DEFAULT_ARCH,
    match: Annotated[str, typer.Option(help="regular expression over kernel names", callback=_check_pattern)] = "",
) -> None:
    """List registers, spills, shared and tensor memory of shipped kernels; needs no GPU.

    Compiles what is not in the cache.
    """
    from hopwell.perf.resources import shipped, table

    configs = [*shipped(arch, match)]
    if not configs:
        raise typer.BadParameter(f"no attention kernel for {arch} has a name that matches {match!r}")
    typer.echo(table(configs))


def _families() -> Sequence[Family]:
    from hopwell.perf.append import APPEND
    from hopwell.perf.decode import DECODE
    from hopwell.perf.mla import MLA
    from hopwell.perf.prefill import PREFILL

    return (PREFILL, DECODE, MLA, APPEND)


def _chosen(cases: str, candidates: Sequence[str] | None) -> Iterator[tuple[Family, list[Case], list[str]]]:
    """Yield the cases of each family in the order of the patterns, and the titles to measure them with."""
    families = _families()
    named = _matching("case", [case.name for family in families for case in family.cases], cases.split(","))
    titles = _matching("candidate", [title for family in families for title in family.measured], candidates or ["*"])
    for family in families:
        known = {case.name: case for case in family.cases}
        chosen = [known[name] for name in named if name in known]
        if chosen:
            yield family, chosen, [title for title in family.measured if title in titles]


def _matching(what: str, names: Sequence[str], patterns: Iterable[str]) -> dict[str, None]:
    """Return the names that match, pattern by pattern."""
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = dict.fromkeys(name for name in names if fnmatchcase(name, pattern))
        if not matches:
            raise typer.BadParameter(f"no {what} is named {pattern!r}; there are {', '.join(names)}")
        found |= matches
    return found


class Options(NamedTuple):
    """Settings of a sweep, for any family."""

    out: Path
    deadline: float  # of time.monotonic
    resume: bool
    host: bool


def _sweep(family: Family, cases: Sequence[Case], candidates: Sequence[str], options: Options) -> None:
    import torch

    from hopwell.perf.measure import first_call_milliseconds, host_microseconds

    path = options.out / f"{family.labels.family.lower()}.json"
    run = _begun(family.labels, path, options.resume)
    if options.resume:
        cases = [case for case in cases if case.title not in {row.workload for row in run.rows}]
    left = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(cases) * (len(candidates) + 1))
        for case in cases:
            if time.monotonic() >= options.deadline:
                left.append(case.name)
                continue
            # The preparation of each candidate is a step, and the timing of all of them is one more.
            rows = _measure(family, case, candidates, lambda step: progress.update(task, advance=1, description=step))
            torch.cuda.empty_cache()
            run.rows += rows
            run.sort([each.title for each in family.cases])
            for title, ceiling in family.ceilings.items():
                for row in rows:
                    if row.candidate == title and row.milliseconds:
                        rate = case.demand[title] / row.milliseconds * 1e3 / ceiling.unit_size
                        run.ceiling_rates.setdefault(f"{title}, {ceiling.unit}", []).append(rate)
            run.write(path)  # remains if a later case ends the process; ``show`` writes the rest
            figures = ", ".join(f"{row.candidate} {row.rate:.0f}" for row in rows if row.rate)
            progress.print(f"{case.title} [{family.labels.unit}]: {figures}", highlight=False, markup=False)
    if options.host and time.monotonic() < options.deadline:
        run.host_microseconds = host_microseconds(family.host_calls())
        for name in run.host_microseconds:
            if name.startswith("hopwell."):
                run.first_call_milliseconds[name] = first_call_milliseconds(family.host_calls, name)
    run.save(path)
    console.print(f"{path} and its .md and .png", highlight=False)
    if left:
        console.print(f"left out, as the limit had passed: {','.join(left)}", highlight=False)


def _begun(labels: Labels, path: Path, resume: bool) -> Run:
    """Return a new run, or the run at ``path``."""
    run = Run.here(labels)
    if resume and path.exists():
        try:
            run = run.resumes(Run.load(path))
        except ValueError as difference:
            raise typer.BadParameter(f"{path} cannot be resumed: {difference}") from None
    return run


def _measure(family: Family, case: Case, candidates: Sequence[str], advance: Callable[[str], None]) -> list[Row]:
    import torch

    from hopwell.perf.measure import interleaved

    calls: dict[str, Callable[[], Any]] = {}
    rows: dict[str, Row] = {}
    try:
        inputs = family.inputs(case)
    except torch.OutOfMemoryError:  # smaller cards have room for other cases
        return [Row(case.title, title, case.series, case.x, failure="out of memory") for title in candidates]
    for title in candidates:
        if title in family.ceilings and title not in case.demand:
            continue
        rows[title] = row = Row(case.title, title, case.series, case.x)
        try:
            call = family.measured[title](inputs)
            result = call()
            row.error = None if title in family.ceilings else inputs.error(result)
            if row.error is None or row.error < case.max_error:
                row.remark = family.remarks[title](inputs) if title in family.remarks else ""
                calls[title] = call
            else:
                row.failure = "wrong result"
        except NotImplementedError as refusal:
            row.failure = first_line("not served", refusal)
        except Exception as failure:  # a peer may fail in any way; the others are still worth measuring
            row.failure = first_line(type(failure).__name__, failure)
        advance(f"{case.name}: {title}")
    times = interleaved(calls)
    for title in calls.keys() - times.keys():
        rows[title].failure = "it cannot be captured in a CUDA graph"
    for title, milliseconds in times.items():
        if title in family.ceilings:
            milliseconds *= case.demand[title] / family.ceilings[title].amount
        rows[title].milliseconds, rows[title].rate = milliseconds, case.work / milliseconds * 1e3 / family.unit_size
    advance(f"{case.name}: timed")
    return list(rows.values())


if __name__ == "__main__":
    app()
