"""Command line of the measurements: ``python -m hopwell.perf``."""

from __future__ import annotations

import sys

from hopwell.perf import MissingError

EXTRA = ("matplotlib", "PIL", "rich", "tabulate", "typer")  # packages of the extra ``perf``


def main() -> int:
    """Run a command. A missing package, tool, file or GPU gives one line on stderr and exit status 1."""
    try:
        from hopwell.perf.commands import app

        app()  # ends the process when the command succeeds
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(f'hopwell.perf: {package} is not installed; pip install "hopwell[perf]"', file=sys.stderr)
    except (MissingError, FileNotFoundError) as missing:
        print(f"hopwell.perf: {missing}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
