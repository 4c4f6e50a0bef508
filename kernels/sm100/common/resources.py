"""Resources of tcgen05 kernels as data, for configs, kernels and the model: warp roles and tensor memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hopwell.kernels.hardware import ARCHITECTURES, WARPS, with_instruction

TENSOR_MEMORY_COLUMNS = min(ARCHITECTURES[arch].tensor_memory_columns for arch in with_instruction("tcgen05"))
LEAST_COLUMNS = 32  # of an allocation, which is a power of two

BOX_TENSOR_COLUMNS = 32  # of rows of 128 bytes, as operand A


def allocated(columns: int) -> int:
    """Return the columns of an allocation of tensor memory that has room for ``columns``."""
    return max(1 << (columns - 1).bit_length(), LEAST_COLUMNS)


class Role(NamedTuple):
    """Consecutive warps that run the same code."""

    warps: int
    registers: int  # of a thread; the same for all roles of a warpgroup


@dataclass(frozen=True)
class RoleTable:
    """Warp roles of a kernel by name, in the order of their warps."""

    roles: Mapping[str, Role]

    def __post_init__(self) -> None:
        if sum(role.warps for role in self.roles.values()) % WARPS:
            raise ValueError(f"roles {dict(self.roles)} do not fill whole warpgroups")
        for warpgroup in self._warpgroups:
            if len(set(warpgroup)) > 1:
                raise ValueError(f"a warpgroup has roles with {sorted(set(warpgroup))} registers; setmaxnreg takes one")

    @property
    def _warpgroups(self) -> list[list[int]]:
        """Registers of the warps of each warpgroup."""
        warps = [role.registers for role in self.roles.values() for _ in range(role.warps)]
        return [warps[first : first + WARPS] for first in range(0, len(warps), WARPS)]

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a thread, for each warpgroup."""
        return tuple(warpgroup[0] for warpgroup in self._warpgroups)

    def first(self, name: str) -> int:
        """Return the first warp of a role."""
        names = list(self.roles)
        return sum(self.roles[other].warps for other in names[: names.index(name)])

    def end(self, name: str) -> int:
        """Return the warp after the last of a role."""
        return self.first(name) + self.roles[name].warps


@dataclass(frozen=True)
class Columns:
    """Tensor-memory columns of a kernel by name, one after another."""

    widths: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.widths.values())

    @property
    def constraint(self) -> tuple[bool, str]:
        """Whether the columns fit, and the reason if they do not."""
        fits = self.total <= TENSOR_MEMORY_COLUMNS
        return fits, f"the kernel needs {self.total} columns of tensor memory, {TENSOR_MEMORY_COLUMNS} are there"

    def first(self, name: str) -> int:
        """Return the first column of a name."""
        names = list(self.widths)
        return sum(self.widths[other] for other in names[: names.index(name)])
