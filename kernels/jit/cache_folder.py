"""The folder of compiled code: its place, the check of its owners and permissions, and messages for failed writes.

Its files are loaded into the process. Folders are therefore created for their user only, and a file is not loaded if
another user owns it or can write it, except root. HOPWELL_CACHE_TRUST=all switches this check off.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

import filelock
import platformdirs

from hopwell.kernels.jit import settings

PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0
LITTLE = 1 << 20  # bytes; compilers report a full disk in their own words, or not at all
UNFINISHED = ".unfinished-"
FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def root() -> pathlib.Path:
    """Return HOPWELL_CACHE_DIR, or the user's cache directory."""
    return pathlib.Path(os.environ.get("HOPWELL_CACHE_DIR") or platformdirs.user_cache_dir("hopwell")).expanduser()


def bundle() -> pathlib.Path | None:
    """Return HOPWELL_BUNDLE, a folder of kernels that is only read, or None if it is unset."""
    value = os.environ.get("HOPWELL_BUNDLE")
    if not value:
        return None
    folder = pathlib.Path(value).expanduser()
    if not folder.is_dir():
        raise ValueError(f"HOPWELL_BUNDLE must be a folder that `python -m hopwell bundle` has written, got {value!r}")
    return folder


def make(folder: pathlib.Path) -> None:
    """Create a folder and its missing parents for this user only, independent of the umask.

    A file in the place of a folder inside the cache is damage and is removed.
    """
    if folder.is_dir():
        return
    if root() in folder.parents:
        with contextlib.suppress(OSError):
            folder.unlink()  # fails on a folder that another process has created meanwhile, and leaves it alone
    make(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE)
        folder.chmod(PRIVATE)  # the umask can remove the owner's own permissions
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))


def check(path: pathlib.Path, top: pathlib.Path | None = None) -> None:
    """Raise PermissionError if other users could have written files at ``path``.

    The check covers the path, its direct contents, and its parents up to ``top``, by default the root of the cache.
    Missing and inaccessible files pass.
    """
    if settings.choice("HOPWELL_CACHE_TRUST", ("owner", "all"), "owner") == "all":
        return
    top = root() if top is None else top
    variable = "HOPWELL_CACHE_DIR" if top == root() else "HOPWELL_BUNDLE"
    above = [folder for folder in path.parents if folder == top or top in folder.parents]
    inside = [*path.iterdir()] if os.path.isdir(path) and os.access(path, os.R_OK) else []
    for one in (*above, path, *inside):
        try:
            found = one.stat()
        except OSError:  # loading it will fail as well
            continue
        if found.st_uid not in (os.geteuid(), ROOT):
            wrong, mend = f"belongs to user {found.st_uid}", f"remove '{top}'"
        elif found.st_mode & WRITABLE_BY_OTHERS:
            wrong = "can be written by others"
            mend = f"remove '{top}' or, if you trust what is in it, chmod -R go-w '{top}'"
        else:
            continue
        raise PermissionError(
            f"{one} {wrong}, and hopwell loads native code from there: {mend}, or set {variable} to a folder of "
            "your own. HOPWELL_CACHE_TRUST=all loads it nevertheless"
        )


def remove(path: pathlib.Path) -> None:
    """Remove a file, a link or a folder with all its contents, independent of their permissions."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    path.chmod(PRIVATE)
    for folder, names, _ in os.walk(path):
        for name in names:
            pathlib.Path(folder, name).chmod(PRIVATE)  # before os.walk lists it
    shutil.rmtree(path)


def replace(source: pathlib.Path, target: pathlib.Path) -> None:
    """Rename ``source`` to ``target``, replacing whatever is there. A file replaces a file in one step."""
    if source.is_dir() or target.is_dir():
        remove(target)
    os.replace(source, target)


def protect(folder: pathlib.Path) -> None:
    """Remove other users' write permission, which some umasks grant, from the files of a new folder."""
    for path in folder.iterdir():
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~WRITABLE_BY_OTHERS)


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """Add the place and advice to the error of a failed write to ``folder``."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        if code in FULL or _is_full(folder):
            code, advice = (
                code if code in FULL else errno.ENOSPC,
                "free space, or set HOPWELL_CACHE_DIR to another disk",
            )
        elif code in FORBIDDEN:
            advice = "make it writable, or set HOPWELL_CACHE_DIR to a folder of your own"
        else:
            raise
        assert code is not None
        raise OSError(code, f"cannot write to the cache: {os.strerror(code)}; {advice}", str(folder)) from error


def _is_full(folder: pathlib.Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < LITTLE
    except OSError:
        return False


@contextlib.contextmanager
def unfinished(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a folder to build ``target`` in. It lies next to ``target``, so that it can be renamed into place.

    The caller holds the lock of ``target``. Leftovers of killed processes are removed: nobody holds their locks.
    """
    for leftover in target.parent.glob(f"{UNFINISHED}*"):
        name = leftover.name.removeprefix(UNFINISHED)
        if name == target.name:
            remove(leftover)
            continue
        with contextlib.suppress(filelock.Timeout, OSError), lock(target.with_name(name), timeout=0):
            remove(leftover)
    folder = target.with_name(f"{UNFINISHED}{target.name}")
    make(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lock(target: pathlib.Path, timeout: float = -1) -> filelock.FileLock:
    """Return the lock that the process building ``target`` holds."""
    file = target.with_name(f"{target.name}.lock")
    with contextlib.suppress(OSError):
        if file.is_dir():  # no process can hold it
            remove(file)
        elif file.exists() and not os.access(file, os.R_OK | os.W_OK):
            file.chmod(0o600)
    return filelock.FileLock(file, timeout=timeout, poll_interval=0.05)
