"""The prefill kernel for ``python -m hopwell.emulator campaign``, and why some faults cannot change what it does."""

from __future__ import annotations

import pathlib
import sys

import torch

# The command above runs this file without pytest, which would have put the folder of ``helpers`` on the path.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from helpers import equivalent_faults
from helpers.batches import CAUSAL, Batch, window

from hopwell.kernels import execute
from hopwell.kernels.problem import Mask

equivalent = equivalent_faults.equivalent  # the command looks for it in the file that it is given


def launch(page_size: int | None, mask: Mask) -> torch.Tensor:
    """Two tiles of queries, up to three of keys; each CTA gets enough tiles to use every stage again. Rows of the first
    warpgroup end in two tiles of keys, and another time in one that it need not visit."""
    data = Batch([140, 7, 130], [364, 200, 150], heads=4, kv_heads=2, device="cpu")
    return execute(data.problem(page_size, mask, lse=data.ragged_lse(), sinks=torch.linspace(-1, 1, 4)))


def case() -> None:
    launch(16, CAUSAL)


def contiguous() -> None:
    launch(None, CAUSAL)


def rows() -> None:
    launch(4, CAUSAL)


def sliding_window() -> None:
    launch(16, window(70))
