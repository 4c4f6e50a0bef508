"""What candidates that other projects are have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from hopwell.perf.family import Candidate

WORKSPACE_BYTES = 1 << 30


def flashinfer() -> Any:
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # its libraries look for it among what is loaded
    import flashinfer as peer

    return peer


def peer_workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def for_pages(name: str, make: Callable[[int], Candidate], *page_sizes: int) -> dict[str, Candidate]:
    """The candidates of these page sizes, by their titles."""
    return {f"{name}, pages of {size}": make(size) for size in page_sizes}
