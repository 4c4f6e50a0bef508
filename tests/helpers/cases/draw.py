"""A recorded source of random choices, and choices that random problems of several kinds share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hopwell.kernels import support
from hopwell.kernels.sm100.prefill.config import PAIR_DIMS

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
PAGE_SIZES = (1, 2, 3, 4, 8, 16, 16, 24, 32, 64, 64, 96, 128, 256)


@dataclass
class Draw:
    """A source of random choices that records them, so that a failure shows its draw.

    Draws with equal ``kernel`` and entry run one kernel: only their other choices differ.
    """

    number: int
    device: str
    kernel: int
    noted: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random, self._of_kernel = random.Random(self.number), random.Random(f"kernel {self.kernel}")

    def one(self, name: str, choices: Any) -> Any:
        self.noted[name] = chosen = self._random.choice(list(choices))
        return chosen

    def for_kernel(self, name: str, choices: Any) -> Any:
        """Return a choice that decides which kernel runs."""
        self.noted[name] = chosen = self._of_kernel.choice(list(choices))
        return chosen

    def head_dims(self, choices: Any) -> tuple[int, int]:
        """Return head dims, in two of five cases common ones or head dims of CTA pairs. An architecture may have more
        kinds of kernels there."""
        choices = list(choices)
        common = [dims for dims in choices if dims in support.COMMON_HEAD_DIMS]
        pairs = [dims for dims in choices if dims in PAIR_DIMS]
        return self.for_kernel(
            "dims", self.for_kernel("kind of dims", (common, pairs, choices, choices, choices)) or choices
        )

    def maybe(self, name: str, odds: float = 0.5) -> bool:
        self.noted[name] = happens = self._random.random() < odds
        return happens

    def lengths(self, name: str, choices: Any) -> list[int]:
        """Return lengths of one or more requests, not all of them 0."""
        found = [self._random.choice(list(choices)) for _ in range(self._random.randint(1, 5))]
        found[-1] = found[-1] or 1
        self.noted[name] = found
        return found

    def heads(self, kv_heads: Sequence[int] = (1, 2, 3)) -> dict[str, int]:
        kv_heads = self.one("kv_heads", kv_heads)
        return dict(heads=kv_heads * self.for_kernel("group", (1, 2, 3, 4, 5, 7, 8, 16)), kv_heads=kv_heads)

    def sinks(self, heads: int) -> torch.Tensor | None:
        if not self.maybe("sinks", 0.3):
            return None
        return torch.tensor([self._random.uniform(-4, 8) for _ in range(heads)], device=self.device)

    def powers(self, name: str, heads: int, kv_heads: int) -> torch.Tensor:
        """Return a power of two for each KV head, as [heads, 1] of its query heads."""
        self.noted[name] = chosen = [2.0 ** self._random.randint(-4, 2) for _ in range(kv_heads)]
        return torch.tensor(chosen, device=self.device).repeat_interleave(heads // kv_heads)[:, None]

    def common(self) -> dict[str, Any]:
        return dict(device=self.device, seed=self.number, magnitude=self.one("magnitude", (0.0, 0.5, 1.0, 1.0, 3.0)))
