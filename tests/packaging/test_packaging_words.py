"""Docstrings are sentences that a stranger can read: none opens as the rest of a sentence that is not there."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("api", "emulator", "kernels", "layouts", "perf", "tests")
FRAGMENT = re.compile(r"(Of|The same|Those|That of|As for|Likewise)\b|As :\w+:")


def fragments(file: pathlib.Path) -> list[str]:
    """Openings of the docstrings of ``file`` that begin as fragments do."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
    openings = [(ast.get_docstring(node) or "").partition("\n")[0] for node in nodes]
    return [f"{file.relative_to(ROOT)}: {opening}" for opening in openings if FRAGMENT.match(opening)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_as_sentences(folder: str) -> None:
    assert [found for file in sorted((ROOT / folder).rglob("*.py")) for found in fragments(file)] == []
