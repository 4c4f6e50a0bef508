"""S and O of a leaf in tensor memory, and their way into registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.parts.combine.tree import RowPart
from hopwell.kernels.parts.core.device import device_struct, shared_address
from hopwell.kernels.parts.core.pipeline import Ring
from hopwell.kernels.sm100.common import tmem

MMA_ROWS = 64  # keys, or columns of V, of a matrix instruction
ISSUING_WARP = 0  # of a warpgroup: one of its threads issues the products


@device_struct
class Accumulators:
    """Accumulators of a warpgroup. A step is the number of a tile of keys in this CTA. Products of ``tiles`` tiles are
    waited for together."""

    kernel: Any  # configuration only
    s_ring: Ring  # a stage for each warpgroup
    o_ring: Ring
    tensor_memory: Int32
    part: RowPart
    tiles: int

    @property
    def rows(self) -> int:
        return self.part.rows

    def place(self, name: str) -> Int32:
        """Return the address of this warpgroup's S or O."""
        columns, warpgroups = self.kernel.config.columns, self.part.warpgroups
        return self.tensor_memory + columns.first(name) + self.part.index * (columns.widths[name] // warpgroups)

    def turn(self, step):
        """Return the step in rings with a stage for each warpgroup."""
        return step // self.tiles * self.part.warpgroups + self.part.index

    def signal(self, ring: Ring, step) -> None:
        """Signal S or O once all products issued so far are done. The issuing warp calls this."""
        with cute.arch.elect_one():
            tmem.commit(shared_address(ring.full_barrier(self.turn(step))))

    def take_s(self, step, registers) -> None:
        """Load S once its products are done."""
        for i, value in enumerate(self._loaded(self.s_ring, "s", step, registers)):
            registers[i] = value

    def take_o(self, step, registers, adds: bool, factor: float = 1.0) -> None:
        """Load or add O, times a constant, once its products are done."""
        for i, value in enumerate(self._loaded(self.o_ring, "o", step, registers)):
            scaled = value if factor == 1.0 else value * factor
            registers[i] = registers[i] + scaled if adds else scaled

    def _loaded(self, ring: Ring, name: str, step, registers) -> list:
        """Load an accumulator. The warps meet before products overwrite it."""
        ring.wait_full(self.turn(step))
        tmem.after_signal()
        values = tmem.load_tile(tmem.row_address(self.place(name), 0), 2 * cute.size(registers))
        tmem.before_signal()
        return values
