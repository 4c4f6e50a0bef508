"""Bundles: folders of compiled kernels for machines that must not compile, see ``HOPWELL_BUNDLE``.

A bundle has the form of the cache, a folder for each version of the sources and the toolchain. Bundles of several
versions can therefore be written into one folder.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterable

from hopwell.kernels.jit import cache_folder, toolchain
from hopwell.kernels.jit.toolchain import Artifact

READABLE_FOLDER, READABLE_FILE = 0o755, 0o644


def compiled_kernels() -> list[Artifact]:
    """Return the kernels of this version in the cache, without damaged ones."""
    found = [Artifact(meta.parent) for meta in sorted(toolchain.cache_dir().glob(f"*/{toolchain.META}"))]
    return [kernel for kernel in found if kernel.is_sound()]


def write(kernels: Iterable[Artifact], folder: pathlib.Path) -> int:
    """Copy kernels into a bundle and return their number. Every user can read the copies, and only this one write them.

    Kernels that the bundle has already are kept.
    """
    version = folder / toolchain.version()
    version.mkdir(parents=True, exist_ok=True)
    for path in (folder, version):
        path.chmod(READABLE_FOLDER)
    count = 0
    for kernel in kernels:
        count += 1
        target = version / kernel.path.name
        if Artifact(target).is_sound():
            continue
        unfinished = version / f"{cache_folder.UNFINISHED}{target.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for source in (kernel.object_file, kernel.ptx, kernel.cubin, kernel.path / toolchain.META):
            shutil.copyfile(source, unfinished / source.name)
            (unfinished / source.name).chmod(READABLE_FILE)
        unfinished.chmod(READABLE_FOLDER)
        if target.exists():
            cache_folder.remove(target)
        os.replace(unfinished, target)
    return count
