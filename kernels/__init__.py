"""Attention kernels in CuTe DSL, and the code that selects, compiles and launches them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hopwell.kernels import fingerprint  # noqa: F401 (comes first: it hashes what the others are imported from)
from hopwell.kernels.jit.toolchain import compile_ahead

if TYPE_CHECKING:
    from hopwell.kernels.launch.plan import Plan, execute

__all__ = ["Plan", "compile_ahead", "execute"]


def __getattr__(name: str) -> Any:
    """Import the launch code at its first use, so that the command line starts without PyTorch."""
    if name not in ("Plan", "execute"):
        raise AttributeError(f"module 'hopwell.kernels' has no attribute {name!r}")
    found = getattr(importlib.import_module("hopwell.kernels.launch.plan"), name)
    globals()[name] = found
    return found
