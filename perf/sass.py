"""Machine code of a cubin, and the time of one warp for a stretch of it.

A SASS instruction has 128 bits. The upper ones encode its scheduling: the cycles until the next issue, and the
scoreboards (of six) that it sets and waits for. NVIDIA does not document this layout. CuAssembler and others found it
for Volta to Ampere, and ptxas 13 output for sm_100a decodes sensibly with it.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hopwell.perf import MissingError
from hopwell.perf.loops import Loop, natural_loops

_LINE = re.compile(
    r"^(?P<label>\.L_\w+):"
    r"|^\s+/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?);?\s+(?:\(\*.*?\*\);)?\s*/\* (?P<low>0x[0-9a-f]{16}) \*/"
    r"|^\s+/\* (?P<high>0x[0-9a-f]{16}) \*/",
    re.M,
)
_STATEMENT = re.compile(r"(?:@(?P<guard>\S+)\s+)?(?P<op>\S+)\s*(?P<operands>.*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_NO_SCOREBOARD = 7
_CONTROL_BIT = 41  # of the upper 64


@dataclass(frozen=True)
class Sass:
    text: str
    control: int
    target: int = -1

    @property
    def _parts(self) -> re.Match[str]:
        found = _STATEMENT.match(self.text)
        assert found is not None, self.text
        return found

    @property
    def op(self) -> str:
        return self._parts["op"]

    @property
    def root(self) -> str:
        """Opcode without its modifiers."""
        return self.op.partition(".")[0]

    @property
    def is_guarded(self) -> bool:
        """Whether a predicate decides whether it executes."""
        return self._parts["guard"] is not None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction in the code may execute next."""
        if self.is_guarded:
            return True
        # A branch on a uniform predicate names it among its operands.
        always = self.root == "BRA" and not re.match(r"!?UP\d", self._parts["operands"])
        return not (always or self.root in ("EXIT", "RET"))

    @property
    def stall(self) -> int:
        return max(self.control & 15, 1)

    @property
    def sets(self) -> int | None:
        """Scoreboard that signals the result."""
        return self._scoreboard(5)

    @property
    def reads(self) -> int | None:
        """Scoreboard that signals that the operands have been read."""
        return self._scoreboard(8)

    @property
    def waits(self) -> list[int]:
        return [board for board in range(6) if self.control >> (11 + board) & 1]

    def _scoreboard(self, bit: int) -> int | None:
        board = self.control >> bit & 7
        return None if board == _NO_SCOREBOARD else board


def disassemble(cubin: Path) -> list[Sass]:
    """Return the instructions of the one kernel in ``cubin``."""
    run = subprocess.run([cuda_tool("nvdisasm"), "-hex", str(cubin)], check=True, capture_output=True, text=True)
    return parse(run.stdout)


def cuda_tool(name: str) -> str:
    """Find a disassembler in its pip package, or else in an installed CUDA toolkit.

    Raises:
        MissingError: neither has it.
    """
    package = f"nvidia-cuda-{name}"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((str(file.locate()) for file in files if file.name == name), None) or shutil.which(name)
    if found is None:
        raise MissingError(f'{name} is not installed; pip install "hopwell[perf]"')
    return found


def parse(listing: str) -> list[Sass]:
    """Return the instructions from the output of ``nvdisasm -hex`` for one kernel."""
    labels: dict[str, int] = {}
    texts: list[str] = []
    controls: list[int] = []
    for line in _LINE.finditer(listing):
        if line["label"]:
            labels[line["label"]] = len(texts)
        elif line["high"]:
            controls.append(int(line["high"], 16) >> _CONTROL_BIT)
        else:
            texts.append(" ".join(line["text"].split()))
    return [Sass(text, control, _target(text, labels)) for text, control in zip(texts, controls, strict=True)]


def _target(text: str, labels: Mapping[str, int]) -> int:
    """Return the target of a branch. Convergence waits and calls return to the next instruction."""
    named = _TARGET.search(text) if re.search(r"\bBRA\b", text) else None
    return labels[named[1]] if named else -1


def sass_loops(code: Sequence[Sass]) -> list[Loop]:
    successors = []
    for i, one in enumerate(code):
        follows = [i + 1] if one.falls_through and i + 1 < len(code) else []
        successors.append([*follows, *([one.target] if one.target >= 0 else [])])
    return natural_loops(successors)


@dataclass(frozen=True)
class Timing:
    """Timing of an instruction of variable latency (signalled by a scoreboard), in cycles of one warp."""

    latency: float  # until the result is available
    busy: float = 1.0  # until the unit accepts the next one


def issue_times(code: Iterable[Sass], timings: Mapping[str, Timing], otherwise: Timing) -> list[float]:
    """Return the issue time of each instruction when one warp executes ``code`` in order, alone on its scheduler."""
    ready, free = [0.0] * 6, dict.fromkeys(timings, 0.0)
    now, times = 0.0, []
    for one in code:
        timing = timings.get(one.root, otherwise)
        now = max([now, free.get(one.root, 0.0), *(ready[board] for board in one.waits)])
        times.append(now)
        free[one.root] = now + timing.busy
        if one.sets is not None:
            ready[one.sets] = max(ready[one.sets], now + timing.latency)
        if one.reads is not None:
            ready[one.reads] = max(ready[one.reads], now + timing.busy)
        now += one.stall
    return times
