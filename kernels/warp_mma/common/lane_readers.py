"""Common parts of the sm_120 kernels: threads keep their registers, and lanes read tiles themselves."""

from typing import Any

from hopwell.kernels.hardware import LANES
from hopwell.kernels.support import FAMILY_BUILDS


class LaneReaders:
    """Mixin, placed before a Hopper kernel class, for kernels whose warps multiply by mma.sync."""

    config: Any
    products_read_shared = False

    def set_registers(self, wanted: int) -> None:
        # On sm_120 ptxas gives threads at most the registers of the launch, and fewer if they need fewer. The total may
        # then be smaller than the roles request, and such a kernel would hang.
        if self.config.target not in FAMILY_BUILDS.values():
            super().set_registers(wanted)  # type: ignore[misc]

    @property
    def q_arrivals(self) -> dict[str, int]:
        return super().q_arrivals | dict(consumer_lanes=LANES)  # type: ignore[misc]

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        # Lanes read tiles, and the zeros that load_v writes, with their own instructions.
        zeroes = dict(producer_lanes=LANES) if is_value else {}
        lanes = dict(consumer_lanes=LANES, consumer_fences=False)
        return super().kv_arrivals(is_value) | zeroes | lanes  # type: ignore[misc]
