"""The limits of the architectures, equal to the emulator's."""

from __future__ import annotations

import pytest

from hopwell.emulator.decode import sync
from hopwell.emulator.options import LIMITS
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, Architecture, of_capability


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.name)
def test_the_emulated_device_has_the_same(arch: Architecture) -> None:
    limits = LIMITS[arch.name]
    assert limits.cta_shared_bytes == arch.shared_bytes == arch.shared_bytes_of(1)
    assert limits.shared_bytes == arch.shared_bytes + arch.reserved_bytes
    assert sync.REGISTERS == REGISTERS


def test_ctas_share_what_the_system_leaves() -> None:
    assert ARCHITECTURES["sm_90a"].shared_bytes_of(2) == 113 * 1024


def test_architecture_of_a_capability() -> None:
    found = {pair: of_capability(*pair) for pair in ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (8, 9), (10, 1))}
    assert list(found.values()) == ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_120a", None, None]
