"""The tests of other libraries and ``environments.toml`` name the same environments."""

from __future__ import annotations

import ast
import pathlib
import re

from tests.clients.environments import environments

CLIENTS = pathlib.Path(__file__).parents[1] / "clients"


def named_by(file: pathlib.Path) -> list[str]:
    """Return the environments that the docstring of a test file names."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    found = re.search(r"Environments?: ([^\n]+?)\.(?:\n|$)", docstring)
    return found[1].split(", ") if found else []


def test_each_environment_lists_packages() -> None:
    assert [name for name, table in environments().items() if not isinstance(table.get("packages"), list)] == []


def test_each_test_file_names_environments_and_each_environment_has_tests() -> None:
    named = {file.name: named_by(file) for file in CLIENTS.glob("test_*.py")}
    assert [file for file, names in named.items() if not names] == []
    assert {name for names in named.values() for name in names} == set(environments())
