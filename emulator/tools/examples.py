"""Runs NVIDIA's CuTe DSL examples from a checkout of CUTLASS, each in a process of its own, and prints a table.

The examples check their own results. They are the reference for the semantics of instructions that no GPU at hand has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYTHON = Path("examples/python/CuTeDSL/cute")
ATTENTION, GEMM = "blackwell/kernel/attention", "blackwell/kernel"
NVFP4 = "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN --sf_dtype Float8E4M3FN --sf_vec_size 16 --c_dtype Float32"
MXFP8 = "--a_dtype Float8E4M3FN --b_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32 --c_dtype Float32"
LONG = "--c_dtype Float32 --sf_dtype"
EXCHANGE = (
    "Nothing orders the reads of the row-max exchange buffer before the writes for the next tile. In the eager "
    "schedule a warp that runs ahead overwrites it."
)
MAXIMA = (
    "No tcgen05.wait::st precedes the barrier between the zeros of the accumulators and the products. Late and random "
    "schedules give NaN. Nothing orders reads of the column maxima before the atomics for the next tile."
)
FREED = "The compute warps free tensor memory that the warps of dQ may still read."


@dataclass(frozen=True)
class Example:
    """One run. ``hazards`` names what the example itself leaves unordered; such an example needs a gentle schedule."""

    name: str
    script: str
    arguments: str
    arch: str = "sm_100a"
    schedule: str = "eager"
    hazards: str = ""


EXAMPLES = (
    Example(
        "FMHA, fp16", f"{ATTENTION}/fmha/fmha.py", "--q_shape 1,256,1,128 --k_shape 1,512,1,128"
    ),
    Example(
        "FMHA, fp8, causal, persistent, grouped heads",
        f"{ATTENTION}/fmha/fmha.py",
        "--in_dtype Float8E4M3FN --out_dtype Float8E4M3FN --is_causal --bottom_right_align --is_persistent "
        "--q_shape 1,256,2,128 --k_shape 1,384,1,128",
    ),
    Example(
        "FMHA backward", f"{ATTENTION}/fmha/fmha_bwd.py", "--s_q 128 --s_k 128 --h_q 1 --h_k 1", hazards=FREED),
    Example(
        "MLA decode, fp16, pair",
        f"{ATTENTION}/mla/mla_decode_fp16.py",
        "--seq_len_k 256 --split_kv 1",
        schedule="late",
        hazards=EXCHANGE,
    ),
    Example(
        "MLA decode, fp8, pair",
        f"{ATTENTION}/mla/mla_decode_fp8.py",
        "--seq_len_k 256 --split_kv 1 --tolerance 0.15",
        schedule="late",
        hazards=EXCHANGE + " The odd CTA may exit before the last commits of the even CTA arrive at its mbarriers.",
    ),
    Example(
        "mixed-input decode, int8 K and V",
        f"{ATTENTION}/mixed_input_fmha/mixed_input_fmha_decode.py",
        "--seqlen 512 --heads_q 16 --kv_splits 1 --kv_dtype Int8",
        hazards=MAXIMA,
    ),
    Example(
        "mixed-input decode, int4 K and V",
        f"{ATTENTION}/mixed_input_fmha/mixed_input_fmha_decode.py",
        "--seqlen 512 --heads_q 16 --kv_splits 1 --kv_dtype Int4",
        hazards=MAXIMA,
    ),
    Example("tutorial fp16_gemm_0", "blackwell/tutorial/tutorial_gemm/fp16_gemm_0.py", "--mnk 256,256,128"),
    Example(
        "tutorial fp16_gemm_4, persistent, pair, launch control",
        "blackwell/tutorial/tutorial_gemm/fp16_gemm_4.py",
        "--mnk 512,512,256",
    ),
    Example(
        "dense GEMM, persistent, fp16",
        f"{GEMM}/dense_gemm/dense_gemm_persistent.py",
        "--mnkl 256,256,256,1 --ab_dtype Float16 --c_dtype Float16 --acc_dtype Float32 --benchmark none",
    ),
    Example(
        "dense GEMM, persistent, fp16, pair",
        f"{GEMM}/dense_gemm/dense_gemm_persistent.py",
        "--mnkl 512,256,256,1 --ab_dtype Float16 --c_dtype Float16 --acc_dtype Float32 --use_2cta_instrs "
        "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --benchmark none",
    ),
    Example(
        "block-scaled GEMM, mxfp8, pair",
        f"{GEMM}/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,512,1 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 {MXFP8}",
    ),
    Example(
        "block-scaled GEMM, nvfp4, pair",
        f"{GEMM}/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,512,1 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 {NVFP4}",
    ),
    Example(
        "sm_103 block-scaled GEMM, nvfp4, K = 96",
        f"{GEMM}/blockscaled_gemm/sm103_dense_blockscaled_gemm_persistent.py",
        f"--mnkl 128,256,768,1 --mma_tiler_mn 128,256 --cluster_shape_mn 1,1 {LONG} Float8E4M3FN --sf_vec_size 16",
        arch="sm_103a",
    ),
    Example(
        "sm_103 block-scaled GEMM, mxfp4, K = 96, pair",
        f"{GEMM}/blockscaled_gemm/sm103_dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,1536,1 --mma_tiler_mn 256,256 --cluster_shape_mn 2,1 {LONG} Float8E8M0FNU --sf_vec_size 32",
        arch="sm_103a",
    ),
    Example(
        "blockwise GEMM, fp8", f"{GEMM}/blockwise_gemm/blockwise_gemm.py", "--mnkl 256,256,256,1"
    ),
    Example(
        "Hopper FMHA, fp16",
        "hopper/kernel/attention/fmha.py",
        "--q_shape 1,256,2,128 --k_shape 1,384,2,128",
        arch="sm_90a",
    ),
)  # fmt: skip


@dataclass
class Result:
    """Outcome of one example: its own check, and the launch with the most matrix instructions."""

    failure: str = ""
    checked: bool = True
    error: float = 0.0
    largest: float = 0.0
    instructions: int = 0
    hazards: int = 0
    seconds: float = 0.0

    def row(self, example: Example) -> str:
        """Return the example's row of the table."""
        said = self.failure or (f"{self.error:.2g} (of {self.largest:.2g})" if self.checked else "passes")
        cells = (example.name, example.arguments, example.schedule, said, self.instructions, self.hazards or "none")
        return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEAD = "| example | arguments | schedule | largest error (of) | warp instructions | hazards |\n" + "| --- " * 6 + "|"


def _child(folder: Path, example: Example, log: Path, answer: Any) -> None:
    """Run one example in this process, which imports the DSL for it, and send its result."""
    from . import fake_cuda
    from .example import run_script

    result, started, reports = Result(), time.perf_counter(), []
    with log.open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            script, words = folder / PYTHON / example.script, example.arguments.split()
            settings: dict[str, Any] = {"hazards": "report", "race": True, "proxy": True}
            reports = run_script(example.arch, script, words, schedule=example.schedule, **settings)
        except (Exception, SystemExit) as e:
            if not isinstance(e, SystemExit) or e.code:
                traceback.print_exc()
                result.failure = re.sub(r"[|\s]+", " ", f"{type(e).__name__}: {e}")[:120]
    result.seconds = time.perf_counter() - started
    if fake_cuda.comparisons:
        result.error, result.largest = max(fake_cuda.comparisons)
    else:
        result.checked = False
    if reports:
        main = max(reports, key=lambda report: report.classes.get("matrix", 0))
        result.instructions, result.hazards = main.instructions, len(main.hazards)
    answer.send(result)


def run_example(folder: Path, example: Example, log: Path) -> Result:
    """Run one example in a new process and return its result; its output goes to the file ``log``."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(folder, example, log, send))
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        return Result(failure="the process died")
    finally:
        process.join()


def run_examples(folder: Path, logs: Path, only: str = "") -> dict[Example, Result]:
    """Run all examples with ``only`` in their names and print a table of them."""
    results = {}
    logs.mkdir(parents=True, exist_ok=True)
    print(HEAD, flush=True)
    for example in EXAMPLES:
        if only in example.name:
            log = logs / (re.sub(r"\W+", "-", example.name) + ".log")
            results[example] = run_example(folder, example, log)
            print(results[example].row(example), flush=True)
    for example in results:
        if example.hazards:
            print(f"\n{example.name}: {example.hazards}")
    return results
