"""Command line: ``python -m hopwell``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from hopwell._commands import kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    if hasattr(options, "checked"):
        kernels.check_options(options.checked, options)
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
    kernels.add_options(compile_)
    compile_.add_argument("--list", action="store_true", help="print the names of these kernels, and compile nothing")
    compile_.set_defaults(run=kernels.compile_kernels, checked=compile_)

    bundle = commands.add_parser("bundle", help="write compiled kernels into a folder for other machines; needs no GPU")
    bundle.add_argument("folder", metavar="FOLDER", help="folder for HOPWELL_BUNDLE")
    kernels.add_options(bundle)
    bundle.set_defaults(run=kernels.write_bundle, checked=bundle)

    cache = commands.add_parser("cache", help="print what the cache of compiled kernels holds, or clear it")
    removal = cache.add_mutually_exclusive_group()
    removal.add_argument("--clear", action="store_true", help="remove all kernels, and the emulator's libraries")
    removal.add_argument(
        "--prune", action="store_true", help="remove the kernels of other versions of hopwell or its toolchain"
    )
    cache.set_defaults(run=_cache)

    matrix = commands.add_parser("support", help="print what each entry point can do on each architecture")
    matrix.set_defaults(run=_support)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from hopwell._commands import demo

    return demo.run(options.device)


def _cache(options: argparse.Namespace) -> int:
    from hopwell.kernels.jit import cache_contents, cache_folder
    from hopwell.kernels.jit.ahead import size

    if options.clear or options.prune:
        print(f"removed {size(cache_contents.clear(only_stale=options.prune))} from {cache_folder.root()}")
        return 0
    print(cache_folder.root())
    versions = cache_contents.versions()
    for title, chosen in (
        ("this version of hopwell and its toolchain", [version for version in versions if not version.is_stale]),
        ("other versions (--prune removes them)", [version for version in versions if version.is_stale]),
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
