"""The Python code of the README and of the guides runs, and ends with a check against float64."""

from __future__ import annotations

import ast
import os
import pathlib
import re
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.oracles.examples import check_attention

from hopwell.kernels.jit import settings

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
INTEGRATIONS = ROOT / "docs" / "integrations.md"  # its other blocks need other libraries; tests/clients runs them
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
# Modules that code of a guide imports.
PUBLIC = {
    "torch",
    "torch.distributed",
    "os",
    "hopwell",
    "hopwell.decode",
    "hopwell.layouts",
    "hopwell.mla",
    "hopwell.torch_ops",
}


def blocks(page: pathlib.Path) -> list[str]:
    """Return a page's blocks of Python code, with empty lines before them to keep the page's line numbers."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def run(page: pathlib.Path) -> dict[str, Any]:
    """Run the blocks of a page one after the other and return their names."""
    names: dict[str, Any] = {}
    with mock.patch.dict(os.environ):
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), names)
    return names


def check_readme() -> None:
    names = run(README)
    lengths = names["q_lens"], names["kv_lens"]
    check_attention(names["query"], names["out"], names["kv_cache"], names["block_tables"], *lengths)


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the settings that code changes."""
    for switch in (settings.BATCH_INVARIANT, settings.CHECK):
        monkeypatch.setattr(switch, "given", switch.given)


@pytest.mark.emulator
def test_code_of_the_readme_and_of_guides_runs(monkeypatch: pytest.MonkeyPatch, switches: None) -> None:
    """The README and guides share one test, because selection.py takes one case of a test function without a config."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_readme()
    for page in GUIDES:
        run(page)
    (flash_attention,) = (block for block in blocks(INTEGRATIONS) if "flash_attn_with_kvcache" in block)
    exec(flash_attention, {})


@pytest.mark.gpu
def test_code_that_asks_for_a_gpu_runs_there(switches: None) -> None:
    check_readme()
    pages = [page for page in GUIDES if 'device = "cuda" if' in page.read_text()]
    assert pages
    for page in pages:
        run(page)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_code_of_a_guide_is_public_and_ends_with_a_check(page: pathlib.Path) -> None:
    trees = [ast.parse(block) for block in blocks(page)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            imported |= {f"hopwell.{alias.name}" if node.module == "hopwell" else node.module for alias in node.names}
    assert imported <= PUBLIC
    assert not [node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    last = ast.unparse(trees[-1].body[-1])
    assert "assert" in last or last.startswith("check("), f"code ends with {last}"
    assert ".double()" in page.read_text(), "no float64 reference"
