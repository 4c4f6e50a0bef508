"""A run's file: what was measured, on what; as JSON, as Markdown tables, as plots."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("hopwell", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "flashinfer-python")


@dataclass(frozen=True)
class Labels:
    """What the tables and plots of a family of workloads say."""

    family: str  # in lower case also the name of its files
    unit: str
    counting: str  # how the unit is counted
    x: str  # what the cases of a series differ in
    ceiling: str  # the candidate that shows what the card can do


@dataclass
class Row:
    workload: str
    candidate: str
    series: str = ""
    x: int = 0
    milliseconds: float | None = None
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

    @staticmethod
    def here(labels: Labels) -> Run:
        import torch

        versions = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        for package in PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return Run(torch.cuda.get_device_name(), time.strftime("%Y-%m-%d"), versions, labels)

    @staticmethod
    def load(path: Path) -> Run:
        raw: dict[str, Any] = json.loads(path.read_text())
        return Run(**(raw | {"labels": Labels(**raw["labels"]), "rows": [Row(**row) for row in raw["rows"]]}))

    def save(self, path: Path) -> None:
        """Write ``path`` (JSON), and the Markdown and the plots next to it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        path.with_suffix(".md").write_text(self.markdown())
        self._plot_cases(path.with_suffix(".png"))
        self._plot_series(path.with_name(f"{path.stem}-series.png"))

    @property
    def candidates(self) -> list[str]:
        return list(dict.fromkeys(row.candidate for row in self.rows if row.rate))

    @property
    def peers(self) -> list[str]:
        return [name for name in self.candidates if name != self.labels.ceiling]

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(row.series for row in self.rows if row.series))

    def _workloads(self, series: str = "") -> dict[str, int]:
        """Titles of the workloads of a series, or of those that stand alone, and their place on its axis."""
        return {row.workload: row.x for row in self.rows if row.series == series}

    def rate(self, workload: str, candidate: str) -> float | None:
        row = self._row(workload, candidate)
        return None if row is None else row.rate

    def _microseconds(self, workload: str, candidate: str) -> float | None:
        row = self._row(workload, candidate)
        return None if row is None or row.milliseconds is None else row.milliseconds * 1e3

    def _row(self, workload: str, candidate: str) -> Row | None:
        for row in self.rows:
            if (row.workload, row.candidate) == (workload, candidate):
                return row
        return None

    def markdown(self) -> str:
        from tabulate import tabulate

        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [f"{self.gpu}, {self.date}. {versions}."]
        alone = list(self._workloads())
        if alone:
            names = [_name(title) for title in alone]
            parts.append(self._rate_table(alone, names))
            parts.append(_table("us", self.peers, alone, names, self._microseconds, digits=1))
            parts.append("\n".join(f"- {title}" for title in alone))
        for series in self.series:
            points = self._workloads(series)
            parts.append(f"By {self.labels.x}: {series}")
            parts.append(self._rate_table(list(points), list(points.values())))
        host, first = self.host_microseconds, self.first_call_milliseconds
        for title, unit, digits, times in (("warm call on the host", "us", 1, host), ("first call", "ms", 0, first)):
            if times:
                figures = [[name, f"{value:.{digits}f}"] for name, value in times.items()]
                parts.append(tabulate(figures, [title, unit], tablefmt="github", colalign=("left", "right")))
        remarks = [f"- {row.candidate} on {_name(row.workload)}: {row.remark}" for row in self.rows if row.remark]
        if remarks:
            parts.append("\n".join(remarks))
        failed: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if row.failure:
                failed.setdefault((row.candidate, row.failure), []).append(_name(row.workload))
        if failed:
            lines = [f"- no figure for {name} on {', '.join(works)}: {why}" for (name, why), works in failed.items()]
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"

    def _rate_table(self, workloads: Sequence[str], headers: Sequence[object]) -> str:
        return _table(self.labels.unit, self.candidates, workloads, headers, self.rate)

    def _rates(self, workloads: Sequence[str], candidate: str) -> list[float | None]:
        return [self.rate(workload, candidate) for workload in workloads]

    def _plot_cases(self, path: Path) -> None:
        """Bars of the workloads that stand alone."""
        workloads = list(self._workloads())
        if not (workloads and self.peers):
            return
        figure, (axes,) = _subplots(1, 2 + 1.5 * len(workloads))
        width = 0.85 / len(self.peers)
        for index, name in enumerate(self.peers):
            heights = [rate or 0 for rate in self._rates(workloads, name)]
            places = [at + (index - (len(self.peers) - 1) / 2) * width for at in range(len(heights))]
            axes.bar(places, heights, width, label=name, color=_color(index))
        for at, ceiling in enumerate(self._rates(workloads, self.labels.ceiling)):
            if ceiling:
                label = f"{self.labels.ceiling} in the same run" if at == 0 else "_unlisted"
                axes.hlines(ceiling, at - 0.45, at + 0.45, colors="black", linestyles="dashed", label=label)
        names = [title.replace(": ", "\n").replace(", ", "\n") for title in workloads]
        axes.set_xticks(range(len(workloads)), names, fontsize=7)
        figure.legend(fontsize=7, loc="outside right upper")
        self._finish(figure, path)

    def _plot_series(self, path: Path) -> None:
        """A panel for each series, a line for each candidate."""
        if not (self.series and self.peers):
            return
        figure, panels = _subplots(len(self.series), 5.5 * len(self.series))
        for axes, series in zip(panels, self.series, strict=True):
            points = self._workloads(series)
            for index, name in enumerate(self.peers):
                self._line(axes, points, name, color=_color(index), marker=".")
            self._line(axes, points, self.labels.ceiling, color="black", linestyle="dashed")
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(points.values()), list(map(str, points.values())), fontsize=7)
            axes.set_xlabel(self.labels.x)
            axes.set_title(series, fontsize=8)
        panels[0].legend(fontsize=7)
        self._finish(figure, path)

    def _line(self, axes: Any, points: dict[str, int], candidate: str, **style: Any) -> None:
        rates = self._rates(list(points), candidate)
        measured = [(x, rate) for x, rate in zip(points.values(), rates, strict=True) if rate]
        if measured:
            axes.plot(*zip(*measured, strict=True), label=candidate, **style)

    def _finish(self, figure: Any, path: Path) -> None:
        from matplotlib import pyplot

        for axes in figure.axes:
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", alpha=0.3)
        figure.axes[0].set_ylabel(f"{self.labels.unit} ({self.labels.counting})")
        family = self.labels.family
        figure.suptitle(f"{family[0].upper()}{family[1:]} on one {self.gpu}, {self.date}")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _name(workload: str) -> str:
    return workload.partition(":")[0]


def _table(
    unit: str,
    candidates: Sequence[str],
    workloads: Sequence[str],
    headers: Sequence[object],
    figure: Callable[[str, str], float | None],
    digits: int = 0,
) -> str:
    """A row for each candidate, a column for each workload."""
    from tabulate import tabulate

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = [[name, *(cell(figure(workload, name)) for workload in workloads)] for name in candidates]
    alignment = ("left", *["right"] * len(workloads))
    # Figures are text here: as numbers, tabulate would lose their last zeros.
    return tabulate(rows, [unit, *map(str, headers)], tablefmt="github", colalign=alignment, disable_numparse=True)


def _subplots(count: int, width: float) -> tuple[Any, Sequence[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(width, 4.5), layout="constrained", sharey=True, squeeze=False)
    return figure, axes[0]


def _color(index: int) -> Any:
    from matplotlib import pyplot

    return pyplot.get_cmap("tab20")(index)
