"""A run's file: the figures, and the GPU and versions behind them, as JSON, Markdown tables and plots."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from hopwell.perf import MissingError, colors, schema
from hopwell.perf.precision import PARTS_OF_FILES, SIXTEEN_BITS, by_precision, name_of, wide_name

PACKAGES = (
    "hopwell",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-attn-4",
    "flashinfer-python",
    "sglang-kernel",
    "nvidia-cudnn-frontend",
)
LONGEST_FAILURE = 120  # characters
SETTINGS = ("HOPWELL_KERNELS",)  # environment variables that change the measured kernels


ROOFLINE = "roofline"
OVER_PEER, OVER_WIDE = "best of hopwell / best peer", "the same form / its 16 bits"
ERROR_UNIT, ERROR_TITLE = 1e-3, "relative error, 1e-3"
CASES_IN_ROW = 6  # of bars
FEWEST_IN_ROW = 4  # bars whose width a title needs
SERIES_IN_ROW = 3
LEGEND_WIDTH = 2.5  # inches


@dataclass(frozen=True)
class Labels:
    """Labels of the tables and plots of a family of workloads."""

    family: str  # in lower case also the name of its files
    unit: str
    counting: str  # how the unit is counted
    x: str  # the size in which cases of a series differ
    ceilings: Sequence[str]  # their rates give the floor of a case; they are no candidates


@dataclass
class Row:
    workload: str
    candidate: str
    series: str = ""
    x: int = 0
    milliseconds: float | None = None  # of a ceiling: time of the case at its rate
    rate: float | None = None  # in the family's unit
    error: float | None = None  # relative, against float64
    failure: str | None = None  # the reason for missing figures
    remark: str = ""  # on the computation


def first_line(what: str, failure: Exception) -> str:
    """Return the reason for missing figures."""
    line = str(failure).strip().partition("\n")[0]
    return shorten(f"{what}: {line}", LONGEST_FAILURE, placeholder=" ...")


@dataclass
class Run:
    gpu: str
    date: str
    versions: dict[str, str]
    labels: Labels
    rows: list[Row] = field(default_factory=list)
    host_microseconds: dict[str, float] = field(default_factory=dict)
    first_call_milliseconds: dict[str, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    # Rates of each ceiling, case by case, by its name and unit.
    ceiling_rates: dict[str, list[float]] = field(default_factory=dict)

    @staticmethod
    def here(labels: Labels) -> Run:
        """Return an empty run of this machine's GPU and installed versions.

        Raises:
            MissingError: torch finds no GPU.
        """
        import torch

        if not torch.cuda.is_available():
            raise MissingError("a sweep needs a GPU, and torch finds none")
        versions = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        for package in PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        settings = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
        return Run(torch.cuda.get_device_name(), time.strftime("%Y-%m-%d"), versions, labels, settings=settings)

    def resumes(self, earlier: Run) -> Run:
        """Return the earlier run with room for further cases, measured in another process on the same kind of GPU.

        Raises:
            ValueError: the earlier run is of another GPU, or of other versions or settings.
        """
        for name in ("gpu", "versions", "settings"):
            was, is_now = getattr(earlier, name), getattr(self, name)
            if was != is_now:
                raise ValueError(f"the earlier run has {name} {was}, and this one {is_now}")
        dates = dict.fromkeys([*earlier.date.split(", "), self.date])
        return replace(earlier, date=", ".join(dates))

    def sort(self, workloads: Sequence[str]) -> None:
        """Sort the rows by the order of these workloads, regardless of the time of measurement; unknown
        ones come last.
        """
        places = {title: place for place, title in enumerate(workloads)}
        self.rows.sort(key=lambda row: places.get(row.workload, len(places)))

    @staticmethod
    def load(path: Path) -> Run:
        """Read a run.

        Raises:
            ValueError: the file is not a run; the message names the field.
        """
        try:
            raw = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name} is not JSON: {error}") from None
        return schema.read(Run, raw, path.name)

    def write(self, path: Path) -> None:
        """Write only the figures, as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def save(self, path: Path) -> None:
        """Write ``path`` (JSON), and the Markdown and the plots next to it."""
        self.write(path)
        path.with_suffix(".md").write_text(self.markdown())
        for group, workloads in by_precision(self.alone).items():
            self._plot_cases(path.with_name(f"{path.stem}{PARTS_OF_FILES[group]}.png"), group, workloads)
        self._plot_series(path.with_name(f"{path.stem}-series.png"))

    @property
    def candidates(self) -> list[str]:
        return [name for name in self._measured if name not in self.labels.ceilings]

    @property
    def ceilings(self) -> list[str]:
        return [name for name in self._measured if name in self.labels.ceilings]

    @property
    def _measured(self) -> list[str]:
        """Measured candidates in the order of the rows; the first case may not have all of them."""
        measured = {row.candidate for row in self.rows if row.rate}
        return list(dict.fromkeys(row.candidate for row in self.rows if row.candidate in measured))

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(row.series for row in self.rows if row.series))

    @property
    def alone(self) -> list[str]:
        """Titles of the workloads outside any series."""
        return list(self._workloads())

    def _workloads(self, series: str = "") -> dict[str, int]:
        """Return the titles of the workloads of a series, or of workloads outside any, and their place on its axis."""
        return {row.workload: row.x for row in self.rows if row.series == series}

    def rate(self, workload: str, candidate: str) -> float | None:
        row = self._row(workload, candidate)
        return None if row is None else row.rate

    def roofline(self, workload: str) -> float | None:
        """Return the rate of a case at its floor, the longest time of a ceiling."""
        return min(filter(None, (self.rate(workload, name) for name in self.ceilings)), default=None)

    def _microseconds(self, workload: str, candidate: str) -> float | None:
        row = self._row(workload, candidate)
        return None if row is None or row.milliseconds is None else row.milliseconds * 1e3

    def _row(self, workload: str, candidate: str) -> Row | None:
        for row in self.rows:
            if (row.workload, row.candidate) == (workload, candidate):
                return row
        return None

    def markdown(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        settings = "".join(f" {name}={value}." for name, value in self.settings.items())
        parts = [f"{self.gpu}, {self.date}. {versions}.{settings}"]
        if self.ceiling_rates:
            ends = (f"{name}: {min(rates):.0f} to {max(rates):.0f}" for name, rates in self.ceiling_rates.items())
            parts.append(f"Ceilings, over all cases of this run: {'; '.join(ends)}.")
        groups = by_precision(self.alone)
        for group, alone in groups.items():
            names = [name_of(title) for title in alone]
            parts += [f"In {group}:"] if len(groups) > 1 else []
            parts.append(self._rate_table(alone, names))
            parts.append(self._time_table(alone, names))
            parts += filter(None, [self._error_table(alone, names)])
            parts.append(_listed(alone))
        for series in self.series:
            points = self._workloads(series)
            parts.append(f"By {self.labels.x}: {series}")
            parts.append(self._rate_table(list(points), list(points.values())))
        host, first = self.host_microseconds, self.first_call_milliseconds
        for title, unit, digits, times in (("warm call on the host", "us", 1, host), ("first call", "ms", 0, first)):
            if times:
                parts.append(_table(title, {name: [value] for name, value in times.items()}, [unit], digits))
        remarks = [f"- {row.candidate} on {name_of(row.workload)}: {row.remark}" for row in self.rows if row.remark]
        if remarks:
            parts.append("\n".join(remarks))
        failures = self._failures()
        if failures:
            parts.append("\n".join(failures))
        return "\n\n".join(parts) + "\n"

    def summary(self, workloads: Sequence[str]) -> str:
        """Return a table of some workloads with one row for each peer's best form.

        Errors of narrow precisions and the list of peers follow.
        """
        headers = [name_of(title) for title in workloads]
        rates = self._shown(workloads) | self._rooflines(workloads)
        table = _table(self.labels.unit, rates, headers, ratios=self._ratios(workloads))
        narrow = by_precision(workloads).keys() - {SIXTEEN_BITS}
        errors = self._error_table(workloads, headers, of_all_forms=True) if narrow else ""
        return "\n\n".join(filter(None, [table, errors, _listed(workloads)]))

    def _shown(self, workloads: Sequence[str]) -> dict[str, list[float | None]]:
        return colors.shown(_measured_rows(self._rates(workloads)))

    def _rate_table(self, workloads: Sequence[str], headers: Sequence[object]) -> str:
        rates = _measured_rows(self._rates(workloads)) | self._rooflines(workloads)
        return _table(self.labels.unit, rates, headers, ratios=self._ratios(workloads))

    def _ratios(self, workloads: Sequence[str]) -> dict[str, list[float | None]]:
        """Return our best form's rate over the best peer's, and over its own in 16 bits, if measured."""
        rates = self._rates(workloads)
        best = [colors.ratio(rates, at) for at in range(len(workloads))]
        over_peers = [found and found[1] for found in best]
        return _measured_rows({OVER_PEER: over_peers, OVER_WIDE: [self._over_wide(each) for each in workloads]})

    def _over_wide(self, workload: str) -> float | None:
        """Return the speed of our best form relative to the same form in 16 bits."""
        name = wide_name(name_of(workload))
        wide = next((title for title in self.alone if name_of(title) == name), None)
        best = colors.best_of_ours(self._rates([workload]), 0)
        if wide in (None, workload) or best is None:
            return None
        narrow_time, wide_time = (self._microseconds(each, best) for each in (workload, str(wide)))
        return wide_time / narrow_time if narrow_time and wide_time else None

    def _error_table(self, workloads: Sequence[str], headers: Sequence[object], *, of_all_forms: bool = False) -> str:
        """Return the table of relative errors of all measured rows, against float64; an empty string if none has one.

        With ``of_all_forms``, a row shows the largest error of all forms of a candidate.
        """
        errors: dict[str, list[float | None]] = {}
        for name in self.candidates:
            found = [_error(self._row(each, name)) for each in workloads]
            title = colors.base(name) if of_all_forms else name
            pairs = zip(errors.get(title, found), found, strict=True)
            errors[title] = [max(filter(None, pair), default=None) for pair in pairs]
        errors = _measured_rows(errors)
        return _table(ERROR_TITLE, errors, headers, digits=2) if errors else ""

    def _time_table(self, workloads: Sequence[str], headers: Sequence[object]) -> str:
        titles = {name: name for name in self.candidates} | {f"floor: {name}": name for name in self.ceilings}
        times = {title: [self._microseconds(each, name) for each in workloads] for title, name in titles.items()}
        times = _measured_rows(times)
        return _table("us", times, headers, digits=1)

    def _rates(self, workloads: Sequence[str]) -> dict[str, list[float | None]]:
        """Return each candidate's rates of the workloads."""
        return {name: [self.rate(workload, name) for workload in workloads] for name in self.candidates}

    def _rooflines(self, workloads: Sequence[str]) -> dict[str, list[float | None]]:
        """Return each ceiling's rates of the workloads, by title; nothing without ceilings.

        A single ceiling keeps its own name, because it may not be the deciding one.
        """
        titles = self.ceilings if len(self.ceilings) < 2 else [ROOFLINE]
        return {title: [self.roofline(workload) for workload in workloads] for title in titles}

    def _failures(self) -> list[str]:
        """Return one line for all candidates that failed in the same way on the same cases."""
        cases: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.failure:
                cases.setdefault((row.candidate, row.failure), []).append(name_of(row.workload))
        candidates: dict[tuple[str, str], list[str]] = {}
        for (candidate, failure), names in cases.items():
            candidates.setdefault((", ".join(names), failure), []).append(candidate)
        return [f"- no figure for {'; '.join(who)} on {names}: {why}" for (names, why), who in candidates.items()]

    def _plot_cases(self, path: Path, group: str, workloads: Sequence[str]) -> None:
        """Plot bars of the workloads of one precision."""
        shown = self._shown(workloads)
        if not shown:
            return
        rows = _in_rows(workloads, CASES_IN_ROW)
        columns = max(len(rows[0]), FEWEST_IN_ROW)
        figure, panels = _panels(len(rows), columns=1, width=1.6 * columns)
        for axes, row in zip(panels, rows, strict=True):
            first = workloads.index(row[0])
            self._bars(axes, row, {name: rates[first : first + len(row)] for name, rates in shown.items()})
            margin = (columns - len(row)) / 2 if len(rows) == 1 else 0  # a short row alone stands in the middle
            axes.set_xlim(-0.5 - margin, columns - 0.5 - margin)
        self._finish(figure, path, "" if group == SIXTEEN_BITS else f" in {group}")

    def _bars(self, axes: Any, workloads: Sequence[str], shown: Figures) -> None:
        palette = colors.colors(list(shown))
        width = 0.85 / len(shown)
        for at, workload in enumerate(workloads):
            # A candidate that cannot run a case leaves no gap.
            present = {name: rate for name, rates in shown.items() if (rate := rates[at])}
            for index, (name, rate) in enumerate(present.items()):
                place = at + (index - (len(present) - 1) / 2) * width
                axes.bar(place, rate, width, label=name, color=palette[name])
                if name == colors.best_of_ours(shown, at):
                    self._annotate(axes, workload, (place, rate), colors.ratio(shown, at))
        for title, rates in self._rooflines(workloads).items():
            for at, rate in enumerate(rates):
                if rate:
                    axes.hlines(rate, at - 0.45, at + 0.45, colors="black", linestyles="dashed", label=title)
        names = [title.replace(": ", "\n").replace(", ", "\n") for title in workloads]
        axes.set_xticks(range(len(workloads)), names, fontsize=7)

    def _annotate(self, axes: Any, workload: str, end: tuple[float, float], ratio: tuple[str, float] | None) -> None:
        """Write the ratio to the best peer at the end of a bar, or, without a peer, the ratio to the same form in 16
        bits.
        """
        over_wide = self._over_wide(workload)
        if ratio is None and over_wide is None:
            return
        text = f"{over_wide:.2f} of its\n16 bits" if ratio is None else f"{ratio[1]:.2f}"
        style = dict(fontsize=6 if ratio is None else 7, bbox=dict(facecolor="white", edgecolor="none", pad=0.5))
        weight = "normal" if ratio is None else "bold"
        axes.annotate(text, end, (0, 2), textcoords="offset points", ha="center", weight=weight, **style)

    def _plot_series(self, path: Path) -> None:
        """Plot a panel for each series, a line for each candidate."""
        if not (self.series and self.candidates):
            return
        columns = len(_in_rows(self.series, SERIES_IN_ROW)[0])
        figure, panels = _panels(len(self.series), columns, width=5.0)
        for axes, series in zip(panels, self.series, strict=True):
            points = self._workloads(series)
            shown = colors.shown(self._rates(list(points)))
            palette = colors.colors(list(shown))
            for name, rates in shown.items():
                # Our lines are drawn above peers' lines, which may coincide with them.
                _line(axes, points, rates, label=name, color=palette[name], marker=".", zorder=2 + colors.is_ours(name))
            for title, rates in self._rooflines(list(points)).items():
                _line(axes, points, rates, label=title, color="black", linestyle="dashed")
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(points.values()), list(map(str, points.values())), fontsize=7)
            axes.set_xlabel(self.labels.x, fontsize=8)
            axes.set_title(series, fontsize=8)
        self._finish(figure, path)

    def _finish(self, figure: Any, path: Path, what: str = "") -> None:
        from matplotlib import pyplot
        from PIL import Image

        drawn: dict[str, Any] = {}
        top = max(axes.get_ylim()[1] for axes in figure.axes)
        for axes in figure.axes:
            if axes.patches:  # readers compare bars by length; lines may begin at any value
                axes.set_ylim(0, top)
            axes.grid(axis="y", alpha=0.3)
            drawn |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(drawn.values(), drawn.keys(), fontsize=7, loc="outside right upper")
        figure.supylabel(f"{self.labels.unit} ({self.labels.counting})", fontsize=9)
        family = self.labels.family
        figure.suptitle(f"{family[0].upper()}{family[1:]}{what} on one {self.gpu}, {self.date}")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
        with Image.open(path) as plot:  # a palette takes a third of the bytes (h200/precisions, 2026-11-25)
            palette = plot.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        palette.save(path, optimize=True)


def _error(row: Row | None) -> float | None:
    return row.error / ERROR_UNIT if row and row.rate and row.error else None


Figures = Mapping[str, Sequence["float | None"]]


def _measured_rows(rows: Figures) -> dict[str, list[float | None]]:
    """Return the rows with at least one figure."""
    return {name: list(row) for name, row in rows.items() if any(each is not None for each in row)}


def _listed(titles: Sequence[str]) -> str:
    return "\n".join(f"- {title}" for title in titles)


def _table(title: str, rows: Figures, headers: Sequence[object], digits: int = 0, ratios: Figures | None = None) -> str:
    """Return a table of figures, and below them ratios with two decimal digits."""
    from tabulate import tabulate

    cells = [_cells(name, row, digits) for name, row in rows.items()]
    cells += [_cells(name, row, 2) for name, row in (ratios or {}).items()]
    alignment = ("left", *["right"] * len(headers))
    # Figures are text here, because tabulate would drop trailing zeros of numbers.
    return tabulate(cells, [title, *map(str, headers)], tablefmt="github", colalign=alignment, disable_numparse=True)


def _cells(name: str, row: Sequence[float | None], digits: int) -> list[str]:
    return [name, *("-" if each is None else f"{each:.{digits}f}" for each in row)]


def _in_rows(items: Sequence[str], most: int) -> list[Sequence[str]]:
    """Return rows of at most ``most`` items, as even as possible."""
    count = -(-len(items) // most)
    size = -(-len(items) // count)
    return [items[first : first + size] for first in range(0, len(items), size)]


def _panels(count: int, columns: int, width: float) -> tuple[Any, list[Any]]:
    """Make a figure with room for a legend, and return its axes, row by row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-count // columns)
    figure = pyplot.figure(figsize=(LEGEND_WIDTH + columns * width, 1 + 3.5 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def _line(axes: Any, points: Mapping[str, int], rates: Sequence[float | None], **style: Any) -> None:
    measured = [(x, rate) for x, rate in zip(points.values(), rates, strict=True) if rate]
    if measured:
        axes.plot(*zip(*measured, strict=True), **style)
