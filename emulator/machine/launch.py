"""One kernel launch, as received from the host side."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

COOPERATIVE = 2  # cudaLaunchAttributeCooperative


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int  # dynamic shared memory in bytes
    params: list[bytes]
    attributes: dict[int, bytes] = field(default_factory=dict)

    @property
    def is_cooperative(self) -> bool:
        """Whether the launch begins only when all of its CTAs can run at the same time."""
        return any(self.attributes.get(COOPERATIVE, b"")[:4])

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return prod(self.block)

    @property
    def ctas(self) -> int:
        return prod(self.grid)

    @property
    def clusters(self) -> int:
        return prod(g // c for g, c in zip(self.grid, self.cluster, strict=True))
