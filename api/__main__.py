"""Command line: ``python -m hopwell``."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Sequence

from hopwell.kernels import features, shipped, support

MAX_JOBS = 1024  # processes; each takes hundreds of megabytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser("hopwell", description="Attention kernels for NVIDIA Hopper and Blackwell.")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="attention over a paged cache: on the GPU, or on the emulator without one")
    demo.add_argument("--device", choices=("cuda", "cpu"), help="cpu is the emulator; default: cuda where there is one")
    demo.set_defaults(run=_demo)

    compile_ = commands.add_parser("compile", help="compile kernels ahead of time; needs no GPU")
    compile_.add_argument(
        "--arch", default="sm_90a", choices=support.ARCHS, help="architecture to compile for (default: %(default)s)"
    )
    compile_.add_argument(
        "--prefill-types",
        nargs="+",
        choices=shipped.PREFILL_TYPES,
        default=[shipped.TYPES_16BIT],
        help="what prefill multiplies: 16bit, with all of decode, and MLA of 16-bit queries; fp8_kv, such queries over "
        "e4m3 caches; fp8, e4m3 queries and caches, with MLA of these (default: 16bit)",
    )
    compile_.add_argument("--match", type=_pattern, default=".", help="regular expression over kernel names")
    compile_.add_argument("--jobs", type=_jobs, help="processes (default: one for each CPU)")
    compile_.set_defaults(run=_compile)

    features = commands.add_parser("support", help="print what each entry point can do on each architecture")
    features.set_defaults(run=_support)

    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        return options.run(options)
    except (ValueError, OSError, RuntimeError) as error:  # of settings, folders, the compiler and the GPU
        print(f"hopwell: {error}", file=sys.stderr)
        return 1


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _jobs(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"it must be from 1 to {MAX_JOBS}, got {text!r}")
    return int(text)


def _demo(options: argparse.Namespace) -> int:
    from hopwell import _demo

    return _demo.run(options.device)


def _compile(options: argparse.Namespace) -> int:
    from hopwell.kernels import shipped, toolchain

    types = tuple(options.prefill_types)
    configs = [c for c in shipped.kernels_to_ship(options.arch, types) if options.match.search(c.name)]
    if not configs:
        print(
            f"no kernel for {options.arch} with --prefill-types {' '.join(types)} has a name that matches "
            f"{options.match.pattern!r}",
            file=sys.stderr,
        )
        return 1
    begin = time.perf_counter()
    for done, built in enumerate(toolchain.compile_ahead(configs, options.jobs), 1):
        print(f"[{done}/{len(configs)}] {built.path.name}", flush=True)
    print(f"{len(configs)} kernels in {toolchain.cache_dir()}, {time.perf_counter() - begin:.0f} s")
    return 0


def _support(options: argparse.Namespace) -> int:
    print(features.support_matrix(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
