"""S and O of a leaf in tensor memory, and their way into registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.parts.combine.tree import RowPart
from hopwell.kernels.parts.core.device import device_struct, shared_address, warp_in_warpgroup
from hopwell.kernels.parts.core.pipeline import Ring
from hopwell.kernels.sm100.common import tmem

MMA_ROWS = 64  # keys, or columns of V, of a matrix instruction
ISSUING_WARP = 0  # of the first warpgroup: one of its threads issues the products


@device_struct
class Accumulators:
    """Accumulators of the products of all rows of a tile. A warpgroup loads the columns of its rows.

    A step is the number of a tile of keys in this CTA. Products of ``tiles`` tiles are waited for together.
    """

    kernel: Any  # configuration only
    s_ring: Ring  # of one stage
    o_ring: Ring
    tensor_memory: Int32
    part: RowPart
    tiles: int

    @property
    def rows(self) -> int:
        """Rows of a product."""
        return self.part.rows * self.part.warpgroups

    @property
    def issues(self):
        """Whether this warp issues the products."""
        is_first = warp_in_warpgroup() == ISSUING_WARP
        return is_first & (self.part.index == 0) if self.part.warpgroups > 1 else is_first

    def place(self, name: str) -> Int32:
        """Return the address of S or O."""
        return self.tensor_memory + self.kernel.config.columns.first(name)

    def turn(self, step):
        """Return the step in the rings of S and O."""
        return step // self.tiles

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
        if self.part.warpgroups == 1:
            values = tmem.load_tile(first, columns)
        else:
            # Each product has columns of all warpgroups side by side.
            products = [first + self.part.first_row + i * self.rows for i in range(columns // self.part.rows)]
            values = [value for place in products for value in tmem.load_tile(place, self.part.rows)]
        tmem.before_signal()
        return values
