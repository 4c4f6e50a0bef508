"""Contents of the cache: the compiled kernels of each version of the sources and the toolchain, and their removal."""

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
    """The kernels of one version of the sources and the toolchain. A stale version is not this process's version."""

    path: pathlib.Path
    kernels: int
    octets: int

    @property
    def is_stale(self) -> bool:
        return self.path != toolchain.cache_dir()


def versions() -> list[Version]:
    """Return the cached kernels of each version. Other folders in the cache are not hopwell's and are skipped."""
    root = cache_folder.root()
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [
        Version(folder, sum(1 for _ in folder.glob(f"*/{toolchain.META}")), octets(folder))
        for folder in folders
        if VERSION.fullmatch(folder.name) and folder.is_dir()
    ]


def emulator_files() -> list[pathlib.Path]:
    """Return the emulator's files in the cache: its libraries, and the kernels of scripts that it ran."""
    folder = cache_folder.root() / "emulator"
    return [path for pattern in EMULATOR_FILES for path in folder.glob(pattern)]


def octets(path: pathlib.Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.is_dir()]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # another process has removed the file
            total += os.stat(file, follow_symlinks=False).st_size
    return total


def clear(only_stale: bool) -> int:
    """Remove the kernels of stale versions, or everything of hopwell in the cache; return the removed bytes."""
    removed = [version.path for version in versions() if version.is_stale or not only_stale]
    removed += [] if only_stale else emulator_files()
    total = sum(map(octets, removed))
    for path in removed:
        cache_folder.remove(path)
    return total
