"""Command line of the emulator: python -m hopwell.emulator COMMAND."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import HostError
from .options import ARCHITECTURES, CHECKS


def _selftest(args: argparse.Namespace) -> int:
    from .host.selftest import run_selftest

    problems = run_selftest()
    print("\n".join(problems) or "the tensor-map format and the stand-in runtime fit the installed DSL")
    return bool(problems)


def _load_case(spec: str) -> tuple[Callable[[], Any], Any]:
    """Load a case from ``path.py`` or ``path.py:function`` (default ``case``), and the file's ``equivalent`` if
    present.
    """
    path, _, name = spec.partition(":")
    module_spec = importlib.util.spec_from_file_location("campaign_case", path)
    if module_spec is None or module_spec.loader is None:
        raise SystemExit(f"cannot import {path}")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules["campaign_case"] = module
    module_spec.loader.exec_module(module)
    return getattr(module, name or "case"), getattr(module, "equivalent", None)


def _campaign(args: argparse.Namespace) -> int:
    from .options import use
    from .tools.campaign import as_json, run_campaign

    case, equivalent = _load_case(args.case)
    with use(args.arch):
        campaign = run_campaign(case, args.kernel, args.kind, equivalent=equivalent)
    if args.json:
        Path(args.json).write_text(as_json(campaign))
    return campaign.rate < args.require


def _example(args: argparse.Namespace) -> int:
    from .tools.example import run_script

    checks = dict.fromkeys((c for c in args.check if c), True)
    run_script(
        args.arch,
        Path(args.script),
        args.arguments,
        args.sms,
        schedule=args.schedule,
        seed=args.seed,
        hazards="report",
        **checks,
    )
    return 0


def _examples(args: argparse.Namespace) -> int:
    from .tools.examples import run_examples

    results = run_examples(Path(args.folder), Path(args.logs), args.only)
    return any(result.failure for result in results.values())


def _compare(args: argparse.Namespace) -> int:
    from .tools.hardware import run_comparison

    run_comparison(Path(args.out), args.count, args.tiles, args.model_only)
    return 0


def _outputs(args: argparse.Namespace) -> int:
    from .tools import outputs

    if args.record:
        outputs.record(Path(args.record), "cpu" if args.model_only else "cuda", args.only)
    else:
        outputs.compare(Path(args.against), args.only)
    return 0


def _derive(args: argparse.Namespace) -> int:
    from .tools.interpolator import run_derivation

    run_derivation(Path(args.out))
    return 0


def _build(args: argparse.Namespace) -> int:
    from . import native

    native.core()
    print(native.cache_dir())
    return 0


def _existing(text: str) -> str:
    """Return the argument if its file exists; the path may end in ``:function``."""
    if not Path(text.partition(":")[0]).exists():
        raise argparse.ArgumentTypeError(f"there is no {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hopwell.emulator", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    p = commands.add_parser("build", help="build the native core and say where it is")
    p.set_defaults(run=_build)

    p = commands.add_parser("selftest", help="compare the tensor-map format with the installed DSL")
    p.set_defaults(run=_selftest)

    p = commands.add_parser("campaign", help="plant synchronisation faults and report which stay undetected")
    p.add_argument("case", type=_existing, help="Python file[:function] that launches the kernel once")
    p.add_argument("--kernel", default="", help="part of the kernel's name")
    p.add_argument("--kind", action="append", default=[], help="kind of fault; may be repeated; default all")
    p.add_argument("--arch", default=None, choices=ARCHITECTURES, help="default: the one in force")
    p.add_argument("--json", help="write every outcome to this file")
    p.add_argument("--require", type=float, default=0.0, help="fail below this detection rate")
    p.set_defaults(run=_campaign)

    p = commands.add_parser("example", help="run a script that wants a GPU, such as a CUTLASS example")
    p.add_argument("arch", choices=ARCHITECTURES)
    p.add_argument("script", type=_existing)
    p.add_argument("--sms", type=int, default=2, help="SMs that the emulated device has")
    p.add_argument("--schedule", default="eager")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--check", action="append", default=[], choices=CHECKS)
    p.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments, after --")
    p.set_defaults(run=_example)

    p = commands.add_parser("examples", help="run NVIDIA's CuTe DSL examples from a checkout of CUTLASS")
    p.add_argument("folder", type=_existing, help="the checkout")
    p.add_argument("--only", default="", help="examples whose names contain this")
    p.add_argument("--logs", default="logs", metavar="FOLDER", help="folder for the output of each example")
    p.set_defaults(run=_examples)

    p = commands.add_parser("compare-hardware", help="compare a Hopper GPU with the emulator (needs the GPU)")
    p.add_argument("--out", default=".", help="folder for hardware.md and hardware.json")
    p.add_argument("--count", type=int, default=1 << 19, help="inputs per instruction, a multiple of 1024")
    p.add_argument("--tiles", type=int, default=256, help="tiles per matrix product")
    p.add_argument("--model-only", action="store_true", help="run the emulator alone; needs no GPU")
    p.set_defaults(run=_compare)

    p = commands.add_parser(
        "compare-outputs", help="compare the entry points' outputs on a GPU with the emulator (--record needs a GPU)"
    )
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--record", metavar="FOLDER", help="run the cases on a GPU and keep their outputs")
    which.add_argument(
        "--against", metavar="FOLDER", type=_existing, help="run the cases on the emulator and compare with a recording"
    )
    p.add_argument("--only", default="", help="cases whose names contain this")
    p.add_argument("--model-only", action="store_true", help="record the emulator instead; needs no GPU")
    p.set_defaults(run=_outputs)

    p = commands.add_parser(
        "derive-approximations", help="derive the special function unit's tables from a GPU (needs the GPU)"
    )
    p.add_argument("--out", default="interpolator_tables.h", help="the header to write")
    p.set_defaults(run=_derive)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status. A missing GPU or C compiler gives one line on stderr."""
    args = _parser().parse_args(argv)
    if getattr(args, "arguments", None) and args.arguments[0] == "--":
        args.arguments = args.arguments[1:]
    try:
        return int(args.run(args))
    except HostError as error:
        print(f"hopwell.emulator: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
