"""Limits of each architecture, in one place. No torch, no DSL."""

from __future__ import annotations

from dataclasses import dataclass

WARP_MMA = "mma.sync"  # the matrix instruction of single warps, available on every architecture here
REGISTERS = 65536  # 32-bit registers of an SM, on every architecture here
WARPGROUP = 128  # threads
LANES = 32  # threads of a warp
WARPS = WARPGROUP // LANES  # warps of a warpgroup
CACHE_LINE_BYTES = 128  # of the L2 cache, the unit of memory reads


@dataclass(frozen=True)
class Architecture:
    """An architecture that kernels are compiled for.

    Attributes:
        name: the compiler's name for it.
        capability: the compute capability of its devices; minor None means any.
        shared_bytes: the most shared memory of a CTA.
        reserved_bytes: shared memory that the system takes with each CTA.
        tensor_memory_columns: columns of tensor memory of an SM, 0 without tensor memory.
        matrix_instruction: the family of matrix instructions that its fastest kernels use.
        gpus: products with this architecture, as the support matrix names them.
    """

    name: str
    capability: tuple[int, int | None]
    shared_bytes: int
    tensor_memory_columns: int
    matrix_instruction: str
    gpus: tuple[str, ...]
    reserved_bytes: int = 1024

    def shared_bytes_of(self, ctas: int) -> int:
        """Return the most shared memory of each CTA in bytes if ``ctas`` CTAs share an SM."""
        return (self.shared_bytes + self.reserved_bytes) // ctas - self.reserved_bytes


DEFAULT_ARCH = "sm_90a"  # default of commands that compile, and of the emulator
ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_90a", (9, 0), 227 << 10, 0, "wgmma", ("H100", "H200")),  # Hopper
        Architecture("sm_100a", (10, 0), 227 << 10, 512, "tcgen05", ("B200",)),  # Blackwell
        Architecture("sm_103a", (10, 3), 227 << 10, 512, "tcgen05", ("B300",)),  # Blackwell Ultra
        Architecture(  # RTX Blackwell
            "sm_120a", (12, None), 99 << 10, 0, WARP_MMA, ("RTX PRO 6000", "RTX 5090", "DGX Spark")
        ),
    )
}


def with_instruction(name: str) -> tuple[str, ...]:
    """Return the names of the architectures whose fastest kernels use this family of matrix instructions."""
    return tuple(arch.name for arch in ARCHITECTURES.values() if arch.matrix_instruction == name)


def of_capability(major: int, minor: int) -> str | None:
    """Return the name of the architecture with this compute capability, or None if there is none."""
    fits = (arch.name for arch in ARCHITECTURES.values() if arch.capability in ((major, minor), (major, None)))
    return next(fits, None)
