"""In which page a token is, and where in it."""

from dataclasses import dataclass

from cutlass import Int32, Int64

from hopwell.kernels.launch.arguments import DIVISOR_BITS
from hopwell.kernels.parts.core.device import DeviceStruct


@dataclass
class EvenPages(DeviceStruct):
    """Pages of a power of two of tokens: a division in place of the shift cost 3 % of a whole kernel (H200,
    2026-11-21)."""

    shift: Int32

    def split(self, position):
        """Return (number of its page, row within it) of a position."""
        page = position >> self.shift
        return page, position - (page << self.shift)


@dataclass
class UnevenPages(DeviceStruct):
    """Pages of any other size: a position times 2^shift / size, rounded up, is exact below 2^31."""

    multiplier: Int64
    shift: Int64
    size: Int32

    def split(self, position):
        """Return (number of its page, row within it) of a position."""
        page = (position.to(Int64) * self.multiplier >> self.shift).to(Int32)
        return page, position - page * self.size


def page_size(divisor, size, is_uneven: bool):
    """Return how positions are divided by a page of ``size`` tokens; ``divisor`` is what ``launch.page_divisor``
    returned."""
    if is_uneven:
        return UnevenPages(divisor >> DIVISOR_BITS, divisor & ((1 << DIVISOR_BITS) - 1), Int32(size))
    return EvenPages(Int32(divisor))
