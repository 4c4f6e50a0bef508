"""Compares outputs of the entry points on a GPU and in the emulator, bit by bit.

The two need not share a machine: one run records the GPU's outputs in a file, and another compares the emulator with
it. Statistics are the log-sum-exp, or fmha_v2's own statistics.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hopwell.kernels import support
from hopwell.kernels.launch import geometry

from ..errors import HostError
from ..options import use
from .devices import require_gpu
from .output_cases import Case, cases

ARCH = "sm_90a"
FILE = "outputs.npz"
Say = Callable[[str], None]
KINDS = ("out", "statistics")
FLOATS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float8_e4m3fn: torch.int8,
}


@contextlib.contextmanager
def _emulated(multiprocessors: int) -> Iterator[None]:
    """Emulate a device with this number of SMs, since MLA divides keys by it."""
    before = geometry.EMULATED_SMS
    geometry.EMULATED_SMS = multiprocessors
    try:
        with use(ARCH, numerics="hardware", sms=multiprocessors):
            yield
    finally:
        geometry.EMULATED_SMS = before


def results_of(case: Case, device: str, multiprocessors: int) -> tuple[dict[str, torch.Tensor], str]:
    """Return the results of a case on the CPU, and the digest of its inputs."""
    with _emulated(multiprocessors):
        found, digest = case.run(device)
    return {kind: value.cpu() for kind, value in found.items()}, digest


def kernels_of(device: str) -> str:
    """Return the architecture of the kernels that calls run, which HOPWELL_KERNELS may select."""
    with use(ARCH):
        return support.arch_of(torch.device(device))


def chosen(only: str) -> list[Case]:
    found = [case for case in cases() if only in case.name]
    if not found:
        raise HostError(f"no case's name contains {only!r}")
    return found


def record(folder: Path, device: str = "cuda", only: str = "", say: Say = print) -> None:
    """Run all cases with ``only`` in their names and record their results in one file in ``folder``.

    Args:
        folder: the folder for outputs.npz.
        device: "cuda", or "cpu" to record the emulator itself.
        only: part of a name.
        say: receives a line per case.

    Raises:
        HostError: ``device`` is "cuda", and torch finds no GPU.
    """
    if device == "cuda":
        require_gpu()
    kept: dict[str, Any] = {}
    digests, wanted, sms = {}, chosen(only), geometry.multiprocessors(torch.device(device))
    for number, case in enumerate(wanted, 1):
        began = time.perf_counter()
        found, digests[case.name] = results_of(case, device, sms)
        for kind, value in found.items():
            kept[f"{case.name}/{kind}"] = value.contiguous().view(FLOATS[value.dtype]).numpy()
        say(f"[{number}/{len(wanted)}] {case.name}: {time.perf_counter() - began:.1f} s")
    name = torch.cuda.get_device_name() if device == "cuda" else "emulator"
    about = {"device": name, "multiprocessors": sms, "kernels": kernels_of(device), "inputs": digests}
    kept["recording"] = np.array(json.dumps(about))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / FILE, **kept)


@dataclass
class Distance:
    """Distance between two arrays of floats: elements, equal ones, largest difference in ulps of their type and in
    value.
    """

    elements: int = 0
    equal: int = 0
    ulps: int = 0
    value: float = 0.0

    @classmethod
    def between(cls, recorded: torch.Tensor, emulated: torch.Tensor) -> Distance:
        """Compare tensors of one type and shape. NaNs are equal; zeros of different sign differ by no ulp."""
        bits = [x.contiguous().view(FLOATS[x.dtype]) for x in (recorded, emulated)]
        both_nan = recorded.isnan() & emulated.isnan()
        largest = torch.iinfo(bits[0].dtype).max
        ordered = [torch.where(b < 0, -(b & largest).long(), b.long()) for b in bits]
        ulps = (ordered[0] - ordered[1]).abs().masked_fill(both_nan, 0)
        equal = (bits[0] == bits[1]) | both_nan
        value = (recorded.double() - emulated.double()).abs().masked_fill(equal, 0)
        return cls(equal.numel(), int(equal.sum()), int(ulps.max()), float(value.max()))

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            self.elements + other.elements,
            self.equal + other.equal,
            max(self.ulps, other.ulps),
            max(self.value, other.value),
        )

    @property
    def cells(self) -> tuple[str, str, str]:
        if not self.elements:
            return "", "", ""
        return f"{100 * self.equal / self.elements:.4f} %", str(self.ulps), f"{self.value:.2e}"


HEADER = (
    "| group | cases | output bit-equal | ulps | difference | statistics bit-equal | ulps | difference |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def table(distances: dict[str, list[dict[str, Distance]]]) -> str:
    """Return a Markdown table: one row for each group, and one for all."""
    lines = [HEADER]
    everything = [row for rows in distances.values() for row in rows]
    for group, rows in {**distances, "**all**": everything}.items():
        cells = [cell for kind in KINDS for cell in sum((row[kind] for row in rows if kind in row), Distance()).cells]
        lines.append("| " + " | ".join((group, str(len(rows)), *cells)) + " |")
    return "\n".join(lines)


def compare(folder: Path, only: str = "", say: Say = print) -> dict[str, list[dict[str, Distance]]]:
    """Run the recorded cases with ``only`` in their names in the emulator; print a line for each, then the table.

    Args:
        folder: the folder where ``record`` left outputs.npz.
        only: part of a name.
        say: receives lines.

    Returns:
        For each group of cases, the distances of each case, by kind of result.

    Raises:
        HostError: the recording is missing, or has other cases or other inputs.
    """
    if not (folder / FILE).exists():
        raise HostError(f"{folder} holds no {FILE}: record it with compare-outputs --record")
    recording = np.load(folder / FILE)
    about = json.loads(str(recording["recording"]))
    kernels = kernels_of("cpu")
    if about.get("kernels") != kernels:
        raise HostError(f"the recording is not of the kernels of {kernels}: record it again")
    say(f"recorded on: {about['device']}")
    distances: dict[str, list[dict[str, Distance]]] = {}
    wanted = chosen(only)
    for number, case in enumerate(wanted, 1):
        if case.name not in about["inputs"]:
            raise HostError(f"the recording has no case {case.name!r}: record it again")
        began = time.perf_counter()
        emulated, digest = results_of(case, "cpu", about["multiprocessors"])
        if digest != about["inputs"][case.name]:
            raise HostError(f"the recording has other inputs for {case.name!r}: record it again")
        row = {
            kind: Distance.between(torch.from_numpy(recording[f"{case.name}/{kind}"]).view(value.dtype), value)
            for kind, value in emulated.items()
        }
        distances.setdefault(case.group, []).append(row)
        equal = ", ".join(f"{kind} {distance.cells[0]}" for kind, distance in row.items())
        say(f"[{number}/{len(wanted)}] {case.name}: {equal} equal, {time.perf_counter() - began:.1f} s")
    say("\n" + table(distances))
    return distances
