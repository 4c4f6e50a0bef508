"""Documents are reachable by links, and their code runs."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def test_each_document_of_kernels_is_in_the_index() -> None:
    folder = ROOT / "docs" / "kernels"
    linked = set(re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text()))
    assert linked == {file.name for file in folder.glob("*.md")} - {"README.md"}


def links(document: pathlib.Path) -> set[pathlib.Path]:
    """Return the links of a document to other documents."""
    found = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", document.read_text())
    return {(document.parent / target).resolve() for target in found}


def test_links_from_the_index_lead_to_each_document() -> None:
    folder = ROOT / "docs"
    guides = set((folder / "guides").glob("*.md"))
    assert guides <= links(folder / "README.md")
    found, new = set(), {folder / "README.md"}
    while new:
        found |= new
        new = {target for page in new if folder in page.parents for target in links(page)} - found
    assert found >= set(folder.rglob("*.md"))


def test_each_example_is_run_by_a_test() -> None:
    run = set(re.findall(r'\brun\("(\w+)"', (ROOT / "tests" / "examples" / "test_examples.py").read_text()))
    assert run == {file.stem for file in (ROOT / "examples").glob("*.py")}
