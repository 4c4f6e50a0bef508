"""Kernels that are compiled ahead, of all operand types."""

from __future__ import annotations

from typing import Any

from hopwell.kernels.problem import Family
from hopwell.kernels.registry import shipped_configs
from hopwell.kernels.support import PREFILL_TYPES


def all_shipped(arch: str, family: Family) -> list[Any]:
    """Return the kernels of ``family`` on ``arch``, of all operand types."""
    return [config for types in PREFILL_TYPES for config in shipped_configs(arch, family, types)]
