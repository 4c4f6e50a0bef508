"""What the kernels of sm_120 have in common: threads keep their registers, and lanes read tiles themselves."""

from typing import Any

from hopwell.kernels.hardware import LANES
from hopwell.kernels.support import FAMILY_BUILDS


class LaneReaders:
    """A base class before a kind of Hopper's kernels, whose warps multiply by mma.sync here."""

    config: Any
    products_read_shared = False

    def set_registers(self, wanted: int) -> None:
        # ptxas gives threads of sm_120 no more registers than at launch, and as few as they need: in all there may be
        # fewer than the roles would ask for, and such a kernel would hang.
        if self.config.target not in FAMILY_BUILDS.values():
            super().set_registers(wanted)  # type: ignore[misc]

    @property
    def q_arrivals(self) -> dict[str, int]:
        return super().q_arrivals | dict(consumer_lanes=LANES)  # type: ignore[misc]

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        # Lanes read tiles, and the zeros that load_v writes, with instructions of their own.
        zeroes = dict(producer_lanes=LANES) if is_value else {}
        lanes = dict(consumer_lanes=LANES, consumer_fences=False)
        return super().kv_arrivals(is_value) | zeroes | lanes  # type: ignore[misc]
