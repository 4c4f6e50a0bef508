"""The limits of the architectures, and that the emulator has the same."""

from __future__ import annotations

from hopwell.emulator.decode import sync
from hopwell.emulator.host.runtime import ATTRIBUTES
from hopwell.kernels.hardware import ARCHITECTURES, REGISTERS, of_capability

SHARED_PER_CTA, SHARED_PER_SM = 97, 81  # cudaDeviceAttr


def test_the_emulated_device_is_a_hopper() -> None:
    hopper = ARCHITECTURES["sm_90a"]
    assert ATTRIBUTES[SHARED_PER_CTA] == hopper.shared_bytes == hopper.shared_bytes_of(1)
    assert ATTRIBUTES[SHARED_PER_SM] == hopper.shared_bytes + hopper.reserved_bytes
    assert sync.REGISTERS == REGISTERS


def test_ctas_share_what_the_system_leaves() -> None:
    assert ARCHITECTURES["sm_90a"].shared_bytes_of(2) == 113 * 1024


def test_architecture_of_a_capability() -> None:
    found = {pair: of_capability(*pair) for pair in ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (8, 9), (10, 1))}
    assert list(found.values()) == ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_120a", None, None]
