"""The contents of the cache: how much each version of the sources and the toolchain has compiled, and their removal."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from dataclasses import dataclass

from hopwell.kernels.jit import cache_folder, toolchain

VERSION = re.compile(r"[0-9a-f]{16}")  # a folder's name, from a fingerprint
EMULATOR_FILES = ("*.so", "*.so.sha256", "*.so.lock", f"{cache_folder.UNFINISHED}*", "kernels")


@dataclass(frozen=True)
class Version:
    """The kernels of one version of the sources and the toolchain. A stale one is not this process's version."""

    path: pathlib.Path
    kernels: int
    octets: int

    @property
    def is_stale(self) -> bool:
        return self.path != toolchain.cache_dir()


def versions() -> list[Version]:
    """Return what each version has in the cache. Other folders there are not hopwell's, and are left out."""
    root = cache_folder.root()
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [
        Version(folder, sum(1 for _ in folder.glob(f"*/{toolchain.META}")), octets(folder))
        for folder in folders
        if VERSION.fullmatch(folder.name) and folder.is_dir()
    ]


def emulator_files() -> list[pathlib.Path]:
    """Return what the emulator keeps in the cache: its libraries, and kernels of scripts that it ran."""
    folder = cache_folder.root() / "emulator"
    return [path for pattern in EMULATOR_FILES for path in folder.glob(pattern)]


def octets(path: pathlib.Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.is_dir()]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # another process has removed it
            total += os.stat(file, follow_symlinks=False).st_size
    return total


def clear(only_stale: bool) -> int:
    """Remove the kernels of stale versions, or everything that hopwell keeps there; return the bytes that it had."""
    removed = [version.path for version in versions() if version.is_stale or not only_stale]
    removed += [] if only_stale else emulator_files()
    total = sum(map(octets, removed))
    for path in removed:
        cache_folder.remove(path)
    return total
