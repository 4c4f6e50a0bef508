"""Division of a token position by the page size, into a page and a row within the page."""

from cutlass import Int32, Int64

from hopwell.kernels.launch.arguments import DIVISOR_BITS
from hopwell.kernels.parts.core.device import device_struct


@device_struct
class EvenPages:
    """Page sizes that are powers of two.

    They use a shift, because a division cost 3 % of a whole kernel (H200, 2026-11-21).
    """

    shift: Int32

    def split(self, position):
        """Return (index of its page, row within the page) of a position."""
        page = position >> self.shift
        return page, position - (page << self.shift)


@device_struct
class UnevenPages:
    """Pages of any other size: position * (2^shift / size, rounded up) is exact below 2^31."""

    multiplier: Int64
    shift: Int64
    size: Int32

    def split(self, position):
        """Return (index of its page, row within the page) of a position."""
        page = (position.to(Int64) * self.multiplier >> self.shift).to(Int32)
        return page, position - page * self.size


def page_size(divisor, size, is_uneven: bool):
    """Return the divider of positions by a page of ``size`` tokens.

    ``divisor`` is the result of ``launch.page_divisor``.
    """
    if is_uneven:
        return UnevenPages(divisor >> DIVISOR_BITS, divisor & ((1 << DIVISOR_BITS) - 1), Int32(size))
    return EvenPages(Int32(divisor))
