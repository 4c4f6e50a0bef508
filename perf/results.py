"""A run's file: what was measured, on what; as JSON, as a Markdown table, as a plot."""

from __future__ import annotations

import importlib.metadata
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("hopwell", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "flashinfer-python")


@dataclass
class Row:
    workload: str
    candidate: str
    milliseconds: float | None = None
    tflops: float | None = None
    error: float | None = None  # relative, against float64
    failure: str | None = None  # why there are no figures


@dataclass
class Run:
    gpu: str
    date: str
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    host_microseconds: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def here() -> Run:
        import torch

        versions = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        for package in PACKAGES:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return Run(torch.cuda.get_device_name(), time.strftime("%Y-%m-%d"), versions)

    @staticmethod
    def load(path: Path) -> Run:
        raw: dict[str, Any] = json.loads(path.read_text())
        return Run(**(raw | {"rows": [Row(**row) for row in raw["rows"]]}))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(row.workload for row in self.rows))

    @property
    def candidates(self) -> list[str]:
        return list(dict.fromkeys(row.candidate for row in self.rows if row.tflops))

    def tflops(self, workload: str, candidate: str) -> float | None:
        for row in self.rows:
            if (row.workload, row.candidate) == (workload, candidate):
                return row.tflops
        return None

    def markdown(self) -> str:
        from tabulate import tabulate

        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        table = [
            [candidate, *(self._cell(workload, candidate) for workload in self.workloads)]
            for candidate in self.candidates
        ]
        headers = ["TFLOP/s", *(title.split(":")[0] for title in self.workloads)]
        parts = [
            f"{self.gpu}, {self.date}. {versions}.",
            tabulate(table, headers, tablefmt="github", colalign=("left", *["right"] * len(self.workloads))),
            "\n".join(f"- {title}" for title in self.workloads),
        ]
        if self.host_microseconds:
            host = [[name, f"{value:.1f}"] for name, value in self.host_microseconds.items()]
            parts.append(tabulate(host, ["warm call on the host", "us"], tablefmt="github", colalign=("left", "right")))
        failed = [row for row in self.rows if row.failure]
        if failed:
            parts.append(
                "\n".join(f"- no figure for {row.candidate} on {row.workload}: {row.failure}" for row in failed)
            )
        return "\n\n".join(parts) + "\n"

    def _cell(self, workload: str, candidate: str) -> str:
        value = self.tflops(workload, candidate)
        return "-" if value is None else f"{value:.0f}"

    def plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        from hopwell.perf.candidates import CEILING

        names = [name for name in self.candidates if name != CEILING]
        if not names:
            return
        figure, axes = pyplot.subplots(figsize=(2 + 1.5 * len(self.workloads), 4.5), layout="constrained")
        width = 0.85 / len(names)
        for index, name in enumerate(names):
            heights = [self.tflops(workload, name) or 0 for workload in self.workloads]
            places = [at + (index - (len(names) - 1) / 2) * width for at in range(len(heights))]
            axes.bar(places, heights, width, label=name, color=pyplot.get_cmap("tab20")(index))
        for at, workload in enumerate(self.workloads):
            ceiling = self.tflops(workload, CEILING)
            if ceiling:
                label = f"{CEILING} in the same run" if at == 0 else "_unlisted"
                axes.hlines(ceiling, at - 0.45, at + 0.45, colors="black", linestyles="dashed", label=label)
        axes.set_xticks(
            range(len(self.workloads)),
            [title.replace(": ", "\n").replace(", ", "\n", 1) for title in self.workloads],
            fontsize=7,
        )
        axes.set_ylabel("TFLOP/s (a causal mask counts half)")
        axes.set_title(f"Prefill on one {self.gpu}, {self.date}")
        axes.legend(fontsize=7, ncols=2, loc="lower right")
        axes.grid(axis="y", alpha=0.3)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
