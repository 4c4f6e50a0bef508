"""One kernel launch, as the host side hands it over."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    def clusters(self) -> int:
        n = 1
        for g, c in zip(self.grid, self.cluster, strict=True):
            n *= g // c
        return n
