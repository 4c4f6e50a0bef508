"""Check that the installed CuTe DSL was tested with hopwell: its traced language changes between releases."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

PACKAGE = "nvidia-cutlass-dsl"
TESTED = ">=4.8.0,<4.9"


def check_toolchain(version_of: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raise ImportError unless a tested release of the CuTe DSL is installed.

    Args:
        version_of: returns the version of an installed distribution, or raises PackageNotFoundError.
    """
    try:
        found = version_of(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    try:
        tested = SpecifierSet(TESTED).contains(Version(found), prereleases=True)
    except InvalidVersion:
        tested = False
    if not tested:
        raise ImportError(
            f"hopwell needs {PACKAGE} {TESTED}, installed: {found}. "
            f'Install it with: pip install "{PACKAGE}[cu13]{TESTED}"'
        )
