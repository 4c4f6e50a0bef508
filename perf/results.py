"""A run's file: what was measured, on what; as JSON, as Markdown tables, as plots."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hopwell.perf import colors

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
SETTINGS = ("HOPWELL_KERNELS",)  # variables of the environment that change what is measured


ROOFLINE = "roofline"
CASES_IN_ROW = 6  # of bars
SERIES_IN_ROW = 3
LEGEND_WIDTH = 2.5  # inches


@dataclass(frozen=True)
class Labels:
    """What the tables and plots of a family of workloads say."""

    family: str  # in lower case also the name of its files
    unit: str
    counting: str  # how the unit is counted
    x: str  # what the cases of a series differ in
    ceilings: Sequence[str]  # whose rates tell the floor of a case; no candidates


@dataclass
class Row:
    workload: str
    candidate: str
    series: str = ""
    x: int = 0
    milliseconds: float | None = None  # of a ceiling: what the case takes at its rate
    rate: float | None = None  # in the family's unit
    error: float | None = None  # relative, against float64
    failure: str | None = None  # why there are no figures
    remark: str = ""  # of how it was computed


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
        import torch

        versions = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        for package in PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        settings = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
        return Run(torch.cuda.get_device_name(), time.strftime("%Y-%m-%d"), versions, labels, settings=settings)

    def resumes(self, earlier: Run) -> Run:
        """Return the earlier run, to which cases are added that were measured in another process on the same kind of
        GPU.

        Raises:
            ValueError: the earlier run is of another GPU, or of other versions or settings.
        """
        for name in ("gpu", "versions", "settings"):
            was, is_now = getattr(earlier, name), getattr(self, name)
            if was != is_now:
                raise ValueError(f"the earlier run has {name} {was}, and this one {is_now}")
        dates = dict.fromkeys([*earlier.date.split(", "), self.date])
        return replace(earlier, date=", ".join(dates))

    @staticmethod
    def load(path: Path) -> Run:
        raw: dict[str, Any] = json.loads(path.read_text())
        return Run(**(raw | {"labels": Labels(**raw["labels"]), "rows": [Row(**row) for row in raw["rows"]]}))

    def write(self, path: Path) -> None:
        """Write the figures alone, as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def save(self, path: Path) -> None:
        """Write ``path`` (JSON), and the Markdown and the plots next to it."""
        self.write(path)
        path.with_suffix(".md").write_text(self.markdown())
        self._plot_cases(path.with_suffix(".png"))
        self._plot_series(path.with_name(f"{path.stem}-series.png"))

    @property
    def candidates(self) -> list[str]:
        return [name for name in self._measured if name not in self.labels.ceilings]

    @property
    def ceilings(self) -> list[str]:
        return [name for name in self._measured if name in self.labels.ceilings]

    @property
    def _measured(self) -> list[str]:
        """Return the measured candidates, in the order of the rows: not each is measured in the first case."""
        measured = {row.candidate for row in self.rows if row.rate}
        return list(dict.fromkeys(row.candidate for row in self.rows if row.candidate in measured))

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(row.series for row in self.rows if row.series))

    def _workloads(self, series: str = "") -> dict[str, int]:
        """Return the titles of the workloads of a series, or of those that stand alone, and their place on its axis."""
        return {row.workload: row.x for row in self.rows if row.series == series}

    def rate(self, workload: str, candidate: str) -> float | None:
        row = self._row(workload, candidate)
        return None if row is None else row.rate

    def roofline(self, workload: str) -> float | None:
        """Return the rate of a case that takes its floor, the longest time of a ceiling."""
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
        alone = list(self._workloads())
        if alone:
            names = [_name(title) for title in alone]
            parts.append(self._rate_table(alone, names))
            parts.append(self._time_table(alone, names))
            parts.append("\n".join(f"- {title}" for title in alone))
        for series in self.series:
            points = self._workloads(series)
            parts.append(f"By {self.labels.x}: {series}")
            parts.append(self._rate_table(list(points), list(points.values())))
        host, first = self.host_microseconds, self.first_call_milliseconds
        for title, unit, digits, times in (("warm call on the host", "us", 1, host), ("first call", "ms", 0, first)):
            if times:
                parts.append(_table(title, {name: [value] for name, value in times.items()}, [unit], digits))
        remarks = [f"- {row.candidate} on {_name(row.workload)}: {row.remark}" for row in self.rows if row.remark]
        if remarks:
            parts.append("\n".join(remarks))
        failures = self._failures()
        if failures:
            parts.append("\n".join(failures))
        return "\n\n".join(parts) + "\n"

    def _rate_table(self, workloads: Sequence[str], headers: Sequence[object]) -> str:
        return _table(self.labels.unit, self._rates(workloads) | self._rooflines(workloads), headers)

    def _time_table(self, workloads: Sequence[str], headers: Sequence[object]) -> str:
        titles = {name: name for name in self.candidates} | {f"floor: {name}": name for name in self.ceilings}
        times = {title: [self._microseconds(each, name) for each in workloads] for title, name in titles.items()}
        return _table("us", times, headers, digits=1)

    def _rates(self, workloads: Sequence[str]) -> dict[str, list[float | None]]:
        """Return each candidate's rates of the workloads."""
        return {name: [self.rate(workload, name) for workload in workloads] for name in self.candidates}

    def _rooflines(self, workloads: Sequence[str]) -> dict[str, list[float | None]]:
        """Return each ceiling's rates of the workloads, by title; nothing without ceilings. One alone has its own name:
        it may not be the one that decides."""
        titles = self.ceilings if len(self.ceilings) < 2 else [ROOFLINE]
        return {title: [self.roofline(workload) for workload in workloads] for title in titles}

    def _failures(self) -> list[str]:
        """Return a line for all candidates that failed on the same cases in the same way."""
        cases: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.failure:
                cases.setdefault((row.candidate, row.failure), []).append(_name(row.workload))
        candidates: dict[tuple[str, str], list[str]] = {}
        for (candidate, failure), names in cases.items():
            candidates.setdefault((", ".join(names), failure), []).append(candidate)
        return [f"- no figure for {'; '.join(who)} on {names}: {why}" for (names, why), who in candidates.items()]

    def _plot_cases(self, path: Path) -> None:
        """Plot bars of the workloads that stand alone."""
        workloads = list(self._workloads())
        if not (workloads and self.candidates):
            return
        rows = _in_rows(workloads, CASES_IN_ROW)
        figure, panels = _panels(len(rows), columns=1, width=1.6 * len(rows[0]))
        for axes, row in zip(panels, rows, strict=True):
            self._bars(axes, row)
            axes.set_xlim(-0.5, len(rows[0]) - 0.5)
        self._finish(figure, path)

    def _bars(self, axes: Any, workloads: Sequence[str]) -> None:
        shown = colors.shown(self._rates(workloads))
        palette = colors.colors(list(shown))
        width = 0.85 / len(shown)
        for index, (name, rates) in enumerate(shown.items()):
            places = [at + (index - (len(shown) - 1) / 2) * width for at in range(len(workloads))]
            axes.bar(places, [rate or 0 for rate in rates], width, label=name, color=palette[name])
            for at, (place, rate) in enumerate(zip(places, rates, strict=True)):
                best = colors.ratio(shown, at)
                if rate and best and best[0] == name:
                    style = dict(fontsize=7, weight="bold", bbox=dict(facecolor="white", edgecolor="none", pad=0.5))
                    axes.annotate(
                        f"{best[1]:.2f}", (place, rate), (0, 2), textcoords="offset points", ha="center", **style
                    )
        for title, rates in self._rooflines(workloads).items():
            for at, rate in enumerate(rates):
                if rate:
                    axes.hlines(rate, at - 0.45, at + 0.45, colors="black", linestyles="dashed", label=title)
        names = [title.replace(": ", "\n").replace(", ", "\n") for title in workloads]
        axes.set_xticks(range(len(workloads)), names, fontsize=7)

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
                # Drawn above peers, whose lines may lie on ours.
                _line(axes, points, rates, label=name, color=palette[name], marker=".", zorder=2 + colors.is_ours(name))
            for title, rates in self._rooflines(list(points)).items():
                _line(axes, points, rates, label=title, color="black", linestyle="dashed")
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(points.values()), list(map(str, points.values())), fontsize=7)
            axes.set_xlabel(self.labels.x, fontsize=8)
            axes.set_title(series, fontsize=8)
        self._finish(figure, path)

    def _finish(self, figure: Any, path: Path) -> None:
        from matplotlib import pyplot

        drawn: dict[str, Any] = {}
        top = max(axes.get_ylim()[1] for axes in figure.axes)
        for axes in figure.axes:
            if axes.patches:  # bars are compared by their lengths; lines begin where they differ
                axes.set_ylim(0, top)
            axes.grid(axis="y", alpha=0.3)
            drawn |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(drawn.values(), drawn.keys(), fontsize=7, loc="outside right upper")
        figure.supylabel(f"{self.labels.unit} ({self.labels.counting})", fontsize=9)
        family = self.labels.family
        figure.suptitle(f"{family[0].upper()}{family[1:]} on one {self.gpu}, {self.date}")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _name(workload: str) -> str:
    return workload.partition(":")[0]


def _table(title: str, rows: Mapping[str, Sequence[float | None]], headers: Sequence[object], digits: int = 0) -> str:
    from tabulate import tabulate

    cells = [[name, *("-" if each is None else f"{each:.{digits}f}" for each in row)] for name, row in rows.items()]
    alignment = ("left", *["right"] * len(headers))
    # Figures are text here: as numbers, tabulate would lose their last zeros.
    return tabulate(cells, [title, *map(str, headers)], tablefmt="github", colalign=alignment, disable_numparse=True)


def _in_rows(items: Sequence[str], most: int) -> list[Sequence[str]]:
    """Return rows of ``most`` items or less, as even as can be."""
    count = -(-len(items) // most)
    size = -(-len(items) // count)
    return [items[first : first + size] for first in range(0, len(items), size)]


def _panels(count: int, columns: int, width: float) -> tuple[Any, list[Any]]:
    """Make a figure with room for a legend, and its axes, row by row."""
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
