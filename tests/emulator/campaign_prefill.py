"""The prefill kernel for ``python -m hopwell.emulator campaign``, with its equivalent faults.

An equivalent fault cannot change the kernel's behaviour.
"""

from __future__ import annotations

import pathlib
import sys

import torch

# The command runs this file without pytest, which would put the folder of ``helpers`` on the path.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from helpers.batches.prefill import CAUSAL, Batch, window
from helpers.device import equivalent_faults

from hopwell.kernels import execute
from hopwell.kernels.problem import Mask

equivalent = equivalent_faults.equivalent  # the command looks for this name in the given file


def launch(page_size: int | None, mask: Mask) -> torch.Tensor:
    """Launch two query tiles and up to three key tiles; each CTA gets enough tiles to reuse every stage.

    Rows of the first warpgroup end in two key tiles, and in another case in one that it need not visit.
    """
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
