"""Attention kernels in CuTe DSL, and what is needed to choose, compile and launch one."""

from hopwell.kernels import fingerprint  # noqa: F401 (comes first: it hashes what the others are imported from)
from hopwell.kernels.plan import Plan, execute
from hopwell.kernels.toolchain import compile_ahead

__all__ = ["Plan", "compile_ahead", "execute"]
