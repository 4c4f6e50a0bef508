"""Cases that differ only in the bits of their operands; the ends of their names give the precision."""

from __future__ import annotations

from collections.abc import Iterable

SIXTEEN_BITS, E4M3, NVFP4 = "16 bits", "e4m3", "NVFP4"
# Longer ends come first, as some end in others. An e4m3 query over an NVFP4 cache counts as NVFP4.
_ENDS = {"-fp8-nvfp4": NVFP4, "-nvfp4-cache": NVFP4, "-nvfp4": NVFP4, "-fp8-cache": E4M3, "-fp8": E4M3}
PARTS_OF_FILES = {SIXTEEN_BITS: "", E4M3: "-fp8", NVFP4: "-nvfp4"}  # of plots


def precision(name: str) -> str:
    """Return the precision of a case, from its name."""
    return _split(name)[1]


def wide_name(name: str) -> str:
    """Return the name of the same case in 16 bits."""
    return _split(name)[0]


def by_precision(titles: Iterable[str]) -> dict[str, list[str]]:
    """Group the titles of cases by precision, the widest first, without empty groups."""
    groups: dict[str, list[str]] = {SIXTEEN_BITS: [], E4M3: [], NVFP4: []}
    for title in titles:
        groups[precision(name_of(title))].append(title)
    return {group: members for group, members in groups.items() if members}


def name_of(title: str) -> str:
    """Return the name of a case, with which its title begins."""
    return title.partition(":")[0]


def _split(name: str) -> tuple[str, str]:
    for end, group in _ENDS.items():
        if name.endswith(end):
            return name.removesuffix(end), group
    return name, SIXTEEN_BITS
