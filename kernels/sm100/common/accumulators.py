"""S and O of a leaf in tensor memory, and their way into registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.parts.combine.tree import RowPart
from hopwell.kernels.parts.core.device import device_struct, shared_address, warp_in_warpgroup
from hopwell.kernels.parts.core.pipeline import Ring
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.tmem import LANE_SHIFT

MMA_ROWS = 64  # keys, or columns of V, of a block: an accumulator in the first 16 lanes of each warp
SECOND_HALF = 16 << LANE_SHIFT  # from there to the block in the other 16 lanes
# Warps of the first warpgroup. A thread of S_WARP issues S, and O of 16-bit operands. A thread of O_WARP issues O of
# dequantized operands, on another sub-partition of the SM.
S_WARP, O_WARP = 0, 1


@device_struct
class Accumulators:
    """Accumulators of the products of all rows of a tile. A warpgroup loads the columns of its rows.

    A step is the number of a tile of keys in this CTA. Products of ``tiles`` tiles are waited for together.
    """

    kernel: Any  # configuration only
    s_ring: Ring  # of one stage
    o_ring: Ring
    tensor_memory: list  # addresses of the allocations
    part: RowPart
    tiles: int
    stacked: bool  # whether a matrix instruction has two blocks, as 128 rows: the second one in the other 16 lanes

    @property
    def rows(self) -> int:
        """Rows of a product."""
        return self.part.rows * self.part.warpgroups

    def issued_by(self, number: int):
        """Return whether this warp is warp ``number`` of the first warpgroup."""
        is_warp = warp_in_warpgroup() == number
        return is_warp & (self.part.index == 0) if self.part.warpgroups > 1 else is_warp

    def place(self, name: str) -> Int32:
        """Return the address of S or O."""
        return self.tensor_memory[0] + self.kernel.config.columns.first(name)

    @property
    def operand_a(self) -> Int32:
        """Address of the first buffer of operand A, in an allocation of its own if there is one."""
        return self.place("a") if len(self.tensor_memory) == 1 else self.tensor_memory[1]

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

    def take_o(self, step, registers, adds: bool) -> None:
        """Load or add O, once its products are done."""
        for i, value in enumerate(self._loaded(self.o_ring, "o", step, registers)):
            registers[i] = registers[i] + value if adds else value

    def _loaded(self, ring: Ring, name: str, step, registers) -> list:
        """Load an accumulator. The warps meet before products overwrite it."""
        ring.wait_full(self.turn(step))
        tmem.after_signal()
        first, columns = tmem.row_address(self.place(name), 0), 2 * cute.size(registers)
        if self.part.warpgroups == 1 and not self.stacked:
            values = tmem.load_tile(first, columns)
        else:
            # Each product has columns of all warpgroups side by side.
            offsets = [self._offset(i) for i in range(columns // self.part.rows)]
            values = tmem.load_tile(first + self.part.first_row, self.part.rows, offsets)
        tmem.before_signal()
        return values

    def _offset(self, block: int) -> int:
        """Return the distance in addresses from the first block of an accumulator to another one."""
        if not self.stacked:
            return block * self.rows
        return block // 2 * self.rows + block % 2 * SECOND_HALF
