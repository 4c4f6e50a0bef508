"""Docstrings are sentences that a stranger can read: none opens as the rest of a sentence that is not there."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("api", "docs", "emulator", "examples", "kernels", "layouts", "perf", "tests")
FRAGMENT = re.compile(r"(Of|The same|Those|That of|As for|Likewise|By|Also|And|Or)\b|As :\w+:|As (above|in)\b")
# What begins with one of these is a sentence where more than the circumstance follows.
CIRCUMSTANCE = re.compile(r"(In|On|With|Without|For|To|As)\b[^,:;]*$")


def fragments(file: pathlib.Path) -> list[str]:
    """Return the openings of the docstrings of ``file`` that begin as fragments do."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
    texts = [" ".join((ast.get_docstring(node) or "").split()) for node in nodes]
    openings = [re.split(r"(?<=\w)\.(?: |$)", text)[0] for text in texts]
    found = [opening for opening in openings if FRAGMENT.match(opening) or CIRCUMSTANCE.match(opening)]
    return [f"{file.relative_to(ROOT)}: {opening}" for opening in found]


@pytest.mark.parametrize("opening", ["Of a device.", "By candidate.", "In bfloat16.", "As in prefill. What is kept."])
def test_fragments_are_found(opening: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "fragment.py"
    file.write_text(f'"""{opening}"""')
    assert len(fragments(file)) == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_as_sentences(folder: str) -> None:
    assert [found for file in sorted((ROOT / folder).rglob("*.py")) for found in fragments(file)] == []
