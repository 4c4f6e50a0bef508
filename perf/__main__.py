"""Command line of the measurements: ``python -m hopwell.perf``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hopwell.perf.results import Row, Run

app = typer.Typer(help=__doc__, no_args_is_help=True)
console = Console(stderr=True)

MAX_ERROR = 8e-3  # relative, of bf16 attention on random data; a wrong mask gives ten times as much


@app.command()
def prefill(
    out: Annotated[Path, typer.Option(help="folder for the run's JSON, Markdown and plot")],
    name: Annotated[str, typer.Option(help="name of the files")] = "prefill",
    workloads: Annotated[str, typer.Option(help="regular expression over workload names")] = ".",
    candidates: Annotated[str, typer.Option(help="regular expression over candidate names")] = ".",
) -> None:
    """Prefill throughput: check every candidate against float64, then time all of them in turns."""
    import torch

    from hopwell.perf import candidates as known
    from hopwell.perf.measure import interleaved
    from hopwell.perf.workloads import PREFILL, Tensors

    run = Run.here()
    for work in PREFILL:
        if not re.search(workloads, work.name):
            continue
        tensors, calls, rows = Tensors(work), {}, {}
        for title, prepare in known.PREFILL.items():
            if not re.search(candidates, title):
                continue
            rows[title] = row = Row(work.title, title)
            try:
                call = prepare(tensors)
                result = call()
                if title != known.CEILING:
                    row.error = tensors.error(result)
                    if not row.error < MAX_ERROR:
                        raise ArithmeticError(f"relative error {row.error:.1e}")
                calls[title] = call
            except Exception as failure:  # a peer may fail in any way; the others are still worth measuring
                first_line = str(failure).strip().partition("\n")[0]
                row.failure = f"{type(failure).__name__}: {first_line[:160]}"
        for title, milliseconds in interleaved(calls).items():
            flops = 2.0 * known.MATMUL_SIZE**3 if title == known.CEILING else work.flops
            rows[title].milliseconds, rows[title].tflops = milliseconds, flops / milliseconds / 1e9
        run.rows += rows.values()
        figures = ", ".join(f"{title} {row.tflops:.0f}" for title, row in rows.items() if row.tflops)
        console.print(f"{work.title} [TFLOP/s]: {figures}", highlight=False)
        del tensors, calls
        torch.cuda.empty_cache()
        _write(run, out, name)
    run.host_microseconds = _host()
    _write(run, out, name)
    console.print(f"{out / name}.json, .md and .png", highlight=False)


@app.command()
def show(path: Annotated[Path, typer.Argument(help="JSON file of a run")]) -> None:
    """Write a run's Markdown and plot again."""
    _write(Run.load(path), path.parent, path.stem)


def _write(run: Run, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    run.save(out / f"{name}.json")
    (out / f"{name}.md").write_text(run.markdown())
    run.plot(out / f"{name}.png")


def _host() -> dict[str, float]:
    """Host time of a warm call of each entry, with a problem too small to keep the GPU busy for longer."""
    from hopwell.perf import candidates as known
    from hopwell.perf.measure import host_microseconds
    from hopwell.perf.workloads import Prefill, Tensors

    sizes = ("host", "1 x 64", (64,), (64,), 4, 4, 128, 128)
    causal, full = (Tensors(Prefill(*sizes, causal=is_causal)) for is_causal in (True, False))
    calls = {
        "hopwell.trtllm_batch_context_with_kv_cache": known.hopwell_paged(16)(causal),
        "hopwell.trtllm_fmha_v2_prefill": known.hopwell_dense(causal),
        "hopwell.cudnn_batch_prefill_with_kv_cache": known.hopwell_paged(16)(full),
        "torch SDPA (cuDNN)": known.cudnn_sdpa(causal),
    }
    return {title: host_microseconds(call) for title, call in calls.items()}


if __name__ == "__main__":
    app()
