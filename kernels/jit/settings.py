"""Settings from the environment, checked at their first use."""

from __future__ import annotations

import os
from collections.abc import Sequence


def choice(name: str, allowed: Sequence[str], default: str) -> str:
    """Return the value of variable ``name``, one of ``allowed``; ``default`` if it is unset or empty."""
    value = os.environ.get(name)
    if not value:
        return default
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, or unset; got {value!r}")
    return value


def choices(name: str, allowed: Sequence[str]) -> set[str]:
    """Return the values of variable ``name``, a comma-separated list of ``allowed`` values, or ``none``."""
    values = {value.strip() for value in os.environ.get(name, "").split(",")} - {"", "none"}
    if values - set(allowed):
        wrong = ", ".join(sorted(values - set(allowed)))
        raise ValueError(f"{name} must be none or a comma-separated list out of {', '.join(allowed)}; got {wrong!r}")
    return values


def count(name: str, default: int = 0) -> int:
    """Return the value of variable ``name``, an integer of at least 0 that fits in 64 bits."""
    value = os.environ.get(name) or str(default)
    if not (value.isascii() and value.isdecimal()) or int(value) >= 2**64:
        raise ValueError(f"{name} must be an integer of at least 0 and below 2^64, or unset; got {value!r}")
    return int(value)


class Switch:
    """A setting that is on or off: variable ``name`` gives its value until :meth:`set` overrides it."""

    def __init__(self, name: str):
        self._name = name
        self.given: bool | None = None  # None: the variable gives the value

    def set(self, enable: bool) -> None:
        """Turn the setting on or off, overriding the variable."""
        self.given = enable

    @property
    def is_on(self) -> bool:
        """Whether the setting is on."""
        if self.given is not None:
            return self.given
        return choice(self._name, ("0", "1"), "0") == "1"


# Whether results must be independent of the rest of the batch. MLA's last bits depend on it unless this is on.
BATCH_INVARIANT = Switch("HOPWELL_BATCH_INVARIANT")
# Whether each launch first checks its device data.
CHECK = Switch("HOPWELL_CHECK")
