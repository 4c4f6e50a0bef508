"""S and O of a leaf in tensor memory, and their way into registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.parts.combine.tree import RowPart
from hopwell.kernels.parts.core.device import device_struct, shared_address, warp_in_warpgroup
from hopwell.kernels.parts.core.pipeline import Ring
from hopwell.kernels.sm100.common import tmem

MMA_ROWS = 64  # keys, or columns of V, of a matrix instruction
ISSUING_WARP = 0  # of a warpgroup: one of its threads issues the products


@device_struct
class Accumulators:
    """Accumulators of a warpgroup, or of all warpgroups if they share products.

    A step is the number of a tile of keys in this CTA. Products of ``tiles`` tiles are waited for together.
    """

    kernel: Any  # configuration only
    s_ring: Ring  # a stage for each issuing warpgroup
    o_ring: Ring
    tensor_memory: Int32
    part: RowPart
    tiles: int
    shared: bool  # whether a product has the rows of all warpgroups

    @property
    def rows(self) -> int:
        """Rows of a product."""
        return self.part.rows * (self.part.warpgroups if self.shared else 1)

    @property
    def issues(self):
        """Whether this warp issues products."""
        is_first = warp_in_warpgroup() == ISSUING_WARP
        return is_first & (self.part.index == 0) if self.shared and self.part.warpgroups > 1 else is_first

    def place(self, name: str) -> Int32:
        """Return the address of S or O of the products."""
        columns, warpgroups = self.kernel.config.columns, self.part.warpgroups
        first = self.tensor_memory + columns.first(name)
        return first if self.shared else first + self.part.index * (columns.widths[name] // warpgroups)

    def turn(self, step):
        """Return the step in rings with a stage for each issuing warpgroup."""
        turn = step // self.tiles
        return turn if self.shared else turn * self.part.warpgroups + self.part.index

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
        first, columns = tmem.row_address(self.place(name), 0), 2 * cute.size(registers)
        if self.rows == self.part.rows:
            values = tmem.load_tile(first, columns)
        else:
            # Each product has columns of all warpgroups side by side.
            products = [first + self.part.first_row + i * self.rows for i in range(columns // self.part.rows)]
            values = [value for place in products for value in tmem.load_tile(place, self.part.rows)]
        tmem.before_signal()
        return values
