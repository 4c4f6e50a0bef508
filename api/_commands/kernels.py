"""``python -m hopwell compile`` and ``bundle``: the kernels that their options select."""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any

from hopwell.kernels import hardware, support

if TYPE_CHECKING:
    from hopwell.kernels.registry import Buildable

MAX_JOBS = 1024  # processes; each takes hundreds of megabytes
# Options that describe the calls of --model: arguments of hopwell.warm_up, with its defaults.
MODEL_OPTIONS: dict[str, tuple[object, str]] = {
    "page_size": (16, "tokens of a page (default: %s)"),
    "kv_dtype": ("auto", "dtype of the KV cache, such as fp8_e4m3 or nvfp4 (default: %s, the model's)"),
    "query_dtype": ("auto", "dtype of the queries (default: %s, the model's)"),
    "out_dtype": ("auto", "dtype of the outputs, such as fp8_e4m3 or nvfp4 (default: %s, 16 bits)"),
    "skip_softmax": (False, "prefill calls have a threshold of skip-softmax"),
    "max_drafts": (0, "most draft tokens of a decode request (default: %s)"),
    "tensor_parallel": (1, "ranks that share the heads of a layer (default: %s)"),
    "context_parallel": (1, "ranks that share the keys of a request in decode (default: %s)"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select kernels."""
    parser.add_argument(
        "--arch", choices=support.ARCHS, help=f"architecture to compile for (default: {hardware.DEFAULT_ARCH})"
    )
    parser.add_argument(
        "--prefill-types",
        nargs="+",
        choices=support.PREFILL_TYPES,
        help="operands of prefill. 16bit: 16-bit queries and caches, with all of decode and MLA of 16-bit queries. "
        "fp8_kv: 16-bit queries over e4m3 caches. fp8: e4m3 queries and caches, with MLA of these. (default: 16bit)",
    )
    parser.add_argument("--match", type=_pattern, help="regular expression over kernel names")
    parser.add_argument("--model", metavar="CONFIG", help="config.json of a model: only the kernels of its calls")
    for name, (default, meaning) in MODEL_OPTIONS.items():
        option, number = f"--{name.replace('_', '-')}", isinstance(default, int)
        form: dict[str, Any] = dict(type=int if number else str, metavar="N" if number else "DTYPE")
        if isinstance(default, bool):
            form = dict(action="store_true", default=None)
        parser.add_argument(option, **form, help=f"with --model: {meaning % default if '%s' in meaning else meaning}")
    parser.add_argument("--kernel", nargs="+", metavar="TEXT", help="these kernels, as HOPWELL_JIT=forbid names them")
    parser.add_argument("--jobs", type=_jobs, help="processes (default: one for each CPU)")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a message if options were given that exclude each other."""
    of_model = [name for name in MODEL_OPTIONS if getattr(options, name) is not None]
    if options.model is None and of_model:
        parser.error(f"argument --{of_model[0].replace('_', '-')}: it goes with --model, which is not given")
    if options.model is not None and options.prefill_types is not None:
        parser.error("argument --prefill-types: not allowed with argument --model, whose calls have their own types")
    others = [name for name in ("arch", "prefill_types", "match", "model") if getattr(options, name) is not None]
    if options.kernel is not None and others:
        parser.error(f"argument --{others[0].replace('_', '-')}: not allowed with argument --kernel")


def compile_kernels(options: argparse.Namespace) -> int:
    """Compile the selected kernels, or print their names with ``--list``."""
    from hopwell.kernels.jit import ahead

    configs = _selected(options)
    if configs and options.list:
        print("\n".join(config.name for config in configs))
    elif configs:
        ahead.compile_and_report(configs, options.jobs, _say)
    return 0 if configs else 1


def write_bundle(options: argparse.Namespace) -> int:
    """Compile the selected kernels that are missing, and copy all of them; without a selection copy the cache."""
    from hopwell.kernels.jit import ahead, bundle, cache_contents, toolchain

    folder = pathlib.Path(options.folder)
    selects = any(getattr(options, name) is not None for name in ("arch", "prefill_types", "match", "model", "kernel"))
    if selects:
        configs = _selected(options)
        if not configs:
            return 1
        ahead.compile_and_report(configs, options.jobs, _say)
        kernels = [toolchain.artifact(config) for config in configs]
    else:
        kernels = bundle.compiled_kernels()
        if not kernels:
            print(f"hopwell: there are no kernels in {toolchain.cache_dir()}; --model names some", file=sys.stderr)
            return 1
    count = bundle.write(kernels, folder)
    octets = sum(cache_contents.octets(folder / toolchain.version() / kernel.path.name) for kernel in kernels)
    print(f"{count} kernels in {folder}, {ahead.size(octets)}; HOPWELL_BUNDLE={folder.resolve()} uses them")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _selected(options: argparse.Namespace) -> list[Buildable]:
    """Return the selected kernels; an empty list after a message that there are none."""
    from hopwell.kernels.capability import kernel_texts, shipped

    if options.kernel is not None:
        return [kernel_texts.config_of(text) for text in options.kernel]
    arch, source = options.arch or hardware.DEFAULT_ARCH, ""
    found: list[Buildable]
    if options.model is not None:
        from hopwell._warm_up import warm

        given: dict[str, Any] = {name: default for name, (default, _) in MODEL_OPTIONS.items()}
        given |= {name: value for name in given if (value := getattr(options, name)) is not None}
        kernels = warm.kernels_of(options.model, **given, device=None, arch=arch)
        for line in kernels.refused:
            print(line, file=sys.stderr)
        found, source = list(kernels.configs), f"--model {options.model}"
    else:
        types = tuple(options.prefill_types or [support.TYPES_16BIT])
        found, source = list(shipped.kernels_to_ship(arch, types)), f"--prefill-types {' '.join(types)}"
    if options.match is None:
        return found
    matching = [config for config in found if options.match.search(config.name)]
    if not matching:
        print(f"no kernel for {arch} with {source} has a name that matches {options.match.pattern!r}", file=sys.stderr)
    return matching


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def _jobs(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"it must be from 1 to {MAX_JOBS}, got {text!r}")
    return int(text)
