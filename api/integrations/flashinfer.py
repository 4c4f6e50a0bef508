"""hopwell in place of an installed FlashInfer: ``hopwell.install()`` and ``hopwell.uninstall()``."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hopwell.kernels.jit import settings

logger = logging.getLogger("hopwell")

# Modules of both packages, by entry.
MODULES = {
    "trtllm_batch_context_with_kv_cache": "prefill",
    "trtllm_fmha_v2_prefill": "prefill",
    "cudnn_batch_prefill_with_kv_cache": "cudnn",
    "xqa_batch_decode_with_kv_cache": "decode",
    "trtllm_batch_decode_with_kv_cache": "decode",
    "trtllm_batch_decode_with_kv_cache_mla": "mla",
    "append_paged_kv_cache": "page",
    "nvfp4_quantize_append_paged_kv_cache": "page",
}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class _Replaced:
    original: Callable[..., Any]
    replacement: Callable[..., Any]


_replaced: dict[str, _Replaced] = {}


def install(entries: Sequence[str] | None = None) -> list[str]:
    """Put hopwell's entries in place of the functions of the same names in the installed FlashInfer.

    A function is replaced in all modules that hold it: FlashInfer's own, and modules that have imported it. Modules
    that are imported later get the replacement. It keeps the signature and the defaults of the installed version.

    FlashInfer's function still runs a call that hopwell refuses before any launch, by NotImplementedError (no kernel)
    or ValueError. It also runs a call with a value for an argument that hopwell does not have. Each reason is logged
    once. If FlashInfer refuses the call as well, the traceback shows both errors. TypeError is raised. With
    ``HOPWELL_CHECK=1`` ValueError is raised, too.

    A second call changes nothing. :func:`uninstall` restores all functions.

    Args:
        entries: names of functions to replace, such as "trtllm_batch_decode_with_kv_cache"; None means all of
            ``hopwell.integrations.flashinfer.MODULES``. Functions that the installed FlashInfer does not have are
            skipped, unless they are named here.

    Returns:
        The names of all functions that are replaced now, with their modules, such as
        "flashinfer.decode.trtllm_batch_decode_with_kv_cache".

    Raises:
        ImportError: FlashInfer is not installed, or fails to be imported.
        ValueError: an entry is unknown, or the installed FlashInfer does not have it.
    """
    if isinstance(entries, str):
        raise TypeError(f"entries must be a sequence of names or None, got the str {entries!r}")
    names = tuple(MODULES) if entries is None else tuple(entries)
    for name in names:
        if name not in MODULES:
            raise ValueError(f"entries must be names out of {', '.join(MODULES)}, got {name!r}")
    library = importlib.import_module("flashinfer")
    found = {name: _theirs(name) for name in names if name not in _replaced}
    missing = [name for name, original in found.items() if original is None]
    version = getattr(library, "__version__", "of an unknown version")
    if missing and entries is not None:
        raise ValueError(f"entries: FlashInfer {version} does not have {', '.join(missing)}")
    for name, original in found.items():
        if original is None:
            logger.info("FlashInfer %s does not have %s", version, name)
            continue
        ours = getattr(importlib.import_module(f"hopwell.{MODULES[name]}"), name)
        _replaced[name] = made = _Replaced(original, _replacement(original, ours))
        places = _swap(made.original, made.replacement)
        logger.info("hopwell replaces %s of FlashInfer %s in %s", name, version, ", ".join(places))
    return [f"flashinfer.{MODULES[name]}.{name}" for name in _replaced]


def uninstall() -> None:
    """Restore the functions that :func:`install` replaced, in all modules that hold a replacement."""
    for name, made in _replaced.items():
        places = _swap(made.replacement, made.original)
        logger.info("FlashInfer has its own %s again in %s", name, ", ".join(places))
    _replaced.clear()


def _theirs(name: str) -> Callable[..., Any] | None:
    """Return FlashInfer's function, or None if the installed version does not have it."""
    path = f"flashinfer.{MODULES[name]}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
    return getattr(module, name, None)


def _swap(old: object, new: object) -> list[str]:
    """Put ``new`` in place of ``old`` in the namespaces of all loaded modules, and return the modules' names."""
    places = []
    for module_name, module in list(sys.modules.items()):
        if module_name == __name__:
            continue
        namespace: dict[str, object] = getattr(module, "__dict__", {})
        held = [key for key, value in list(namespace.items()) if value is old]
        for key in held:
            namespace[key] = new
        places += [module_name] * bool(held)
    return places


def _replacement(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature of ``original`` that calls ``ours``, or ``original`` if hopwell refuses."""
    signature = inspect.signature(original)
    theirs, known = signature.parameters, inspect.signature(ours).parameters
    names, order = frozenset(theirs), tuple(name for name, one in theirs.items() if one.kind in POSITIONAL)
    # Their default for each argument with another default in hopwell. Without a default, an argument must be given.
    defaults = {
        name: one.default
        for name, one in theirs.items()
        if name in known and one.default is not inspect.Parameter.empty and not _same(one.default, known[name].default)
    }
    unknown = {name: one.default for name, one in theirs.items() if name not in known}
    reasons: set[str] = set()

    def fall_back(reason: str, *args: Any, **kwargs: Any) -> Any:
        if reason not in reasons:
            reasons.add(reason)
            logger.warning("FlashInfer's %s runs calls that hopwell refuses: %s", original.__name__, reason)
        return original(*args, **kwargs)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        positional = dict(zip(order, args, strict=False))
        if len(positional) < len(args) or not (names.issuperset(kwargs) and positional.keys().isdisjoint(kwargs)):
            return original(*args, **kwargs)  # which raises TypeError
        given = {**defaults, **positional, **kwargs}
        for name, default in unknown.items():
            if name in given and not _same(given.pop(name), default):
                return fall_back(f"hopwell has no argument {name}", *args, **kwargs)
        try:
            return ours(**given)
        except NotImplementedError as error:
            return fall_back(str(error), *args, **kwargs)
        except ValueError as error:
            if settings.CHECK.is_on:
                raise
            return fall_back(str(error), *args, **kwargs)

    return replaced


def _same(first: Any, second: Any) -> bool:
    """Return whether two values are one object, or equal constants. Tensors are not compared by value."""
    constant = isinstance(first, (bool, int, float, str, type(None))) and type(first) is type(second)
    return first is second or (constant and first == second)
