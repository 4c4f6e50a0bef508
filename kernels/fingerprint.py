"""The hash of the sources and tools that kernels are compiled from: the key of this version's folder in the cache.

The package imports this module first, so the hash describes the sources from which the other modules are imported.
Kernel modules are imported when the first kernel is built, and the DSL reads their sources again to trace them. A
process whose sources are replaced in between would compile a mixture, so :func:`check` refuses to compile there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
import platform

TOOLCHAIN = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
SOURCES = pathlib.Path(__file__).parent


def of_disk() -> str:
    """Hash the installed sources and versions, and the machine type; takes about 5 ms."""
    digest = hashlib.sha256()
    # The object file holds host code, and machines of two types may share a home directory.
    digest.update(f"{platform.machine()}\n".encode())
    for name in TOOLCHAIN:
        digest.update(f"{name}=={importlib.metadata.version(name)}\n".encode())
    for source in sorted(SOURCES.rglob("*.py")):
        digest.update(f"{source.relative_to(SOURCES)}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


IMPORTED = of_disk()


def check() -> None:
    """Raise RuntimeError if the sources or the toolchain were replaced after this process imported hopwell."""
    if of_disk() != IMPORTED:
        raise RuntimeError(
            f"hopwell cannot compile in this process: the sources in {SOURCES} or the versions of "
            f"{' and '.join(TOOLCHAIN)} have changed since the process imported hopwell; restart the process"
        )
