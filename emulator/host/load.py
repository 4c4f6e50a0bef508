"""Loads each module once per process, after the self-test of the installed DSL's output."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path

from hopwell.kernels.jit import cache_folder

from .. import native
from . import selftest
from .module import Function, Module

_loading = threading.RLock()  # one thread makes a module that several threads ask for


def load(object_file: str | Path, ptx: str | Path) -> Module:
    """Return the module of an exported object file and its PTX, loaded once per process.

    The first load with a DSL version runs the self-test of the tensor-map format.
    """
    with _loading:
        return _loaded(object_file, ptx)


@functools.lru_cache(maxsize=64)
def _loaded(object_file: str | Path, ptx: str | Path) -> Module:
    selftest.ensure()
    return Module(object_file, ptx)


def cached_function(key: str, make: Callable[[Path], None], name: str = "entry") -> Function:
    """Return the function of a cache entry, made by ``make(folder)`` on first use; safe against other processes."""
    folder = native.cache_dir() / "kernels" / key
    done = folder / "complete"
    if not done.exists():
        cache_folder.make(folder.parent)
        with cache_folder.lock(folder):
            if not done.exists():
                make(folder)
                cache_folder.protect(folder)
                done.touch()
    with contextlib.suppress(PermissionError):  # another user may own the cache files
        os.utime(done)
    cache_folder.check(folder)
    return load(folder / f"{name}.o", folder / f"{name}.ptx").function(name)
