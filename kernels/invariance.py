"""Whether results may depend on what else is in a batch: MLA's last bits do, unless that is switched off."""

from __future__ import annotations

from hopwell.kernels import settings

_switched: bool | None = None  # None: as HOPWELL_BATCH_INVARIANT says


def switch(enable: bool) -> None:
    """Make later launches batch invariant, or let them be faster."""
    global _switched
    _switched = enable


def is_on() -> bool:
    """Whether launches are batch invariant."""
    if _switched is not None:
        return _switched
    return settings.choice("HOPWELL_BATCH_INVARIANT", ("0", "1"), "0") == "1"
