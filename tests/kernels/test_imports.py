"""Imports have a direction: no import cycles, at the top or inside functions, and ``layouts`` barely uses kernels."""

from __future__ import annotations

import ast
import graphlib
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {"api": "hopwell"} | {name: f"hopwell.{name}" for name in ("kernels", "emulator", "layouts", "perf")}


def module_files() -> dict[str, pathlib.Path]:
    """Return the files of all modules by name; files of api/ are the package itself."""
    found = {}
    for folder, package in PACKAGES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = file
    return found


FILES = module_files()


def run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes, except imports for type checkers."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from run_nodes(child)


def imports(module: str) -> Iterator[str]:
    """Return the modules of this project that ``module`` imports."""
    file = FILES[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in run_nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else source for name in names if name in FILES or source in FILES)


# The entries import the mark of traced functions. The first traced call imports the ops, which wrap the entries.
AT_THE_FIRST_CALL = ("hopwell._calls.dynamo", "hopwell.torch_ops")


def test_no_circle() -> None:
    graph = {module: {name for name in imports(module) if name != module} for module in FILES}
    graph[AT_THE_FIRST_CALL[0]].remove(AT_THE_FIRST_CALL[1])
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_layouts_know_records_and_sizes_alone() -> None:
    layouts = [module for module in FILES if module.startswith("hopwell.layouts")]
    known = {name for module in layouts for name in imports(module) if not name.startswith("hopwell.layouts")}
    assert known == {"hopwell.kernels.elements", "hopwell.kernels.problem"}
