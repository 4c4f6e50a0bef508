"""Division by divisors known in advance: device arithmetic, on the host."""

from __future__ import annotations

import random

import pytest
from cutlass import Int32
from helpers.host.warps import host

from hopwell.kernels.parts.core import device
from hopwell.kernels.parts.core.device import Divisor

pytestmark = pytest.mark.traced


def test_a_divisor_known_before_its_numbers_divides_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "tied", lambda value, other: value)
    draw = random.Random(0)
    values = [*range(1, 40), 127, 128, 132, 264, 65535, 65536, (1 << 30) + 1, (1 << 31) - 1]
    for value in values:
        divisor = Divisor.of(Int32(value))
        multiples = [value * draw.randrange((1 << 31) // value) for _ in range(20)]
        near = [multiple + step for multiple in multiples for step in (-1, 0, 1)]
        for number in (0, (1 << 31) - 1, *near, *[draw.randrange(1 << 31) for _ in range(20)]):
            if 0 <= number < 1 << 31:
                assert host(divisor.divide(Int32(number))) == number // value, (number, value)
