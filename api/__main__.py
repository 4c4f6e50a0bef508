"""Command line: ``python -m hopwell``."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence

from hopwell.kernels import hardware, support

MAX_JOBS = 1024  # processes; each takes hundreds of megabytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    if options.run is _cache and options.stale and not options.clear:
        parser.error("argument --stale: it says what --clear removes, which is not given")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hopwell").setLevel(logging.INFO)
    try:
        return options.run(options)
    except (ValueError, OSError, RuntimeError) as error:  # from settings, folders, the compiler and the GPU
        print(f"hopwell: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser. PyTorch takes seconds to import, so each command imports only the modules that it needs."""
    parser = argparse.ArgumentParser("hopwell", description="Attention kernels for NVIDIA Hopper and Blackwell.")
    commands = parser.add_subparsers(metavar="command")

    demo = commands.add_parser("demo", help="attention over a paged cache: on the GPU, or on the emulator without one")
    demo.add_argument("--device", choices=("cuda", "cpu"), help="cpu is the emulator; default: cuda where there is one")
    demo.set_defaults(run=_demo)

    compile_ = commands.add_parser("compile", help="compile kernels ahead of time; needs no GPU")
    compile_.add_argument(
        "--arch",
        default=hardware.DEFAULT_ARCH,
        choices=support.ARCHS,
        help="architecture to compile for (default: %(default)s)",
    )
    compile_.add_argument(
        "--prefill-types",
        nargs="+",
        choices=support.PREFILL_TYPES,
        default=[support.TYPES_16BIT],
        help="what prefill multiplies: 16bit, with all of decode, and MLA of 16-bit queries; fp8_kv, such queries over "
        "e4m3 caches; fp8, e4m3 queries and caches, with MLA of these (default: 16bit)",
    )
    compile_.add_argument("--match", type=_pattern, default="", help="regular expression over kernel names")
    compile_.add_argument("--jobs", type=_jobs, help="processes (default: one for each CPU)")
    compile_.add_argument("--list", action="store_true", help="print the names of these kernels, and compile nothing")
    compile_.set_defaults(run=_compile)

    cache = commands.add_parser("cache", help="print what the cache of compiled kernels holds, or clear it")
    cache.add_argument("--clear", action="store_true", help="remove all kernels, and the emulator's libraries")
    cache.add_argument(
        "--stale", action="store_true", help="with --clear: only kernels of other versions of hopwell or its toolchain"
    )
    cache.set_defaults(run=_cache)

    matrix = commands.add_parser("support", help="print what each entry point can do on each architecture")
    matrix.set_defaults(run=_support)
    return parser


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def _jobs(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"it must be from 1 to {MAX_JOBS}, got {text!r}")
    return int(text)


def _demo(options: argparse.Namespace) -> int:
    from hopwell._commands import demo

    return demo.run(options.device)


def _compile(options: argparse.Namespace) -> int:
    from hopwell.kernels.capability import shipped
    from hopwell.kernels.jit import ahead

    types = tuple(options.prefill_types)
    configs = [c for c in shipped.kernels_to_ship(options.arch, types) if options.match.search(c.name)]
    if not configs:
        print(
            f"no kernel for {options.arch} with --prefill-types {' '.join(types)} has a name that matches "
            f"{options.match.pattern!r}",
            file=sys.stderr,
        )
        return 1
    if options.list:
        print("\n".join(config.name for config in configs))
    else:
        ahead.compile_and_report(configs, options.jobs, lambda line: print(line, flush=True))
    return 0


def _cache(options: argparse.Namespace) -> int:
    from hopwell.kernels.jit import cache_contents, cache_folder
    from hopwell.kernels.jit.ahead import size

    if options.clear:
        print(f"removed {size(cache_contents.clear(options.stale))} from {cache_folder.root()}")
        return 0
    print(cache_folder.root())
    versions = cache_contents.versions()
    for title, chosen in (
        ("this version of hopwell and its toolchain", [version for version in versions if not version.is_stale]),
        ("other versions (--clear --stale removes them)", [version for version in versions if version.is_stale]),
    ):
        kernels, octets = sum(version.kernels for version in chosen), sum(version.octets for version in chosen)
        print(f"  {title}: {kernels} kernels, {size(octets)}")
    print(f"  the emulator: {size(sum(map(cache_contents.octets, cache_contents.emulator_files())))}")
    return 0


def _support(options: argparse.Namespace) -> int:
    from hopwell.kernels.capability import features

    print(features.support_matrix(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
