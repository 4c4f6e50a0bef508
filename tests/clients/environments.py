"""Make the environment of a client: ``python tests/clients/environments.py NAME FOLDER``.

``environments.toml`` lists the names and the exact versions. hopwell comes from this checkout. The Python of the
environment runs the client's tests: ``FOLDER/bin/python -m pytest -m clients tests/clients/FILE``.

PyPI's torch brings 3 GB of CUDA libraries. With ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` pip takes
the CPU build of the same version.
"""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
import venv
from typing import Any

HERE = pathlib.Path(__file__).parent
TEST_TOOLS = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100"]


def environments() -> dict[str, dict[str, Any]]:
    """Return the table of each environment by name."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads((HERE / "environments.toml").read_text())


def make(name: str, folder: pathlib.Path) -> None:
    """Create the environment ``name`` in ``folder``."""
    table = environments()[name]
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *table["packages"], *TEST_TOOLS], check=True)
    pip.append("--no-warn-conflicts")  # a client misses the dependencies that its table leaves out
    if table.get("without_dependencies"):
        subprocess.run([*pip, "--no-deps", *table["without_dependencies"]], check=True)
    subprocess.run([*pip, "-e", str(HERE.parent.parent)], check=True)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in environments():
        sys.exit(f"usage: python {sys.argv[0]} NAME FOLDER, with a NAME of {', '.join(environments())}")
    make(sys.argv[1], pathlib.Path(sys.argv[2]))
