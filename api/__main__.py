"""Command line: ``python -m hopwell``."""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import sys
import time
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser("hopwell", description="Attention kernels for NVIDIA Hopper and Blackwell.")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="attention over a paged cache: on the GPU, or on the emulator without one")
    demo.add_argument("--device", choices=("cuda", "cpu"), help="cpu is the emulator; default: cuda where there is one")
    demo.set_defaults(run=_demo)

    compile_ = commands.add_parser("compile", help="compile kernels ahead of time; needs no GPU")
    compile_.add_argument("--arch", default="sm_90a", help="architecture to compile for (default: %(default)s)")
    compile_.add_argument("--match", default=".", help="regular expression over kernel names (default: all)")
    compile_.add_argument("--jobs", type=int, help="processes (default: one for each CPU)")
    compile_.set_defaults(run=_compile)

    support = commands.add_parser("support", help="print what each entry point can do on each architecture")
    support.set_defaults(run=_support)

    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    return options.run(options)


def _demo(options: argparse.Namespace) -> int:
    from hopwell import _demo

    return _demo.run(options.device)


def _compile(options: argparse.Namespace) -> int:
    from hopwell.kernels import toolchain
    from hopwell.kernels.config import shipped_configs
    from hopwell.kernels.decode_config import shipped_decode_configs
    from hopwell.kernels.mla_config import shipped_mla_configs

    families = (shipped_configs, shipped_decode_configs, shipped_mla_configs)
    shipped = itertools.chain.from_iterable(family(options.arch) for family in families)
    configs = [config for config in shipped if re.search(options.match, config.name)]
    if not configs:
        print(f"no kernel for {options.arch} has a name that matches {options.match!r}", file=sys.stderr)
        return 1
    begin = time.perf_counter()
    for done, built in enumerate(toolchain.compile_ahead(configs, options.jobs), 1):
        print(f"[{done}/{len(configs)}] {built.path.name}", flush=True)
    print(f"{len(configs)} kernels in {toolchain.cache_dir()}, {time.perf_counter() - begin:.0f} s")
    return 0


def _support(options: argparse.Namespace) -> int:
    from hopwell.kernels.support import support_matrix

    print(support_matrix(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
