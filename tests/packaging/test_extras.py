"""The extra ``test`` brings every package that tests, examples and the tested modules of hopwell.perf import."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest requires this package
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGES = importlib.metadata.packages_distributions()


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield full names that the import statements among ``nodes`` may mean, of modules or of their members."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_by_tests() -> set[str]:
    """Return the full names that tests, examples and the modules of hopwell.perf that tests import name in imports.

    Tests in ``tests/clients`` run in environments of their own. Functions of hopwell.perf may import optional packages,
    so only its modules' own imports count.
    """
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    files = [file for file in files if file.parent != ROOT / "tests" / "clients"]
    names = {name for file in files for name in imports(ast.walk(ast.parse(file.read_text())))}
    left = list(names)
    while left:
        package, _, module = left.pop().rpartition(".")
        file = ROOT / "perf" / f"{module}.py"
        if package == "hopwell.perf" and file.exists():
            new = set(imports(ast.parse(file.read_text()).body)) - names
            names |= new
            left += new
    return names


def external(names: Iterable[str]) -> set[str]:
    """Return the top-level packages among ``names`` from outside Python and this repository."""
    own = {"hopwell", "helpers", "tests", *(file.stem for file in (ROOT / "tests").rglob("*.py"))}
    return {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names


def brought(requirements: Iterable[str]) -> set[str]:
    """Return the names of all distributions that pip installs for ``requirements``."""
    left, seen = [Requirement(text) for text in requirements], set()
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if (name, *sorted(wanted.extras)) in seen:
            continue
        seen.add((name, *sorted(wanted.extras)))
        if name == "hopwell":
            left += [Requirement(text) for extra in wanted.extras for text in EXTRAS[extra]]
            continue
        try:
            declared = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for needed in map(Requirement, declared):
            if needed.marker is None or any(needed.marker.evaluate({"extra": one}) for one in ("", *wanted.extras)):
                left.append(needed)
    return {name for name, *_ in seen}


def providers(package: str) -> set[str]:
    """Return the distributions that have an importable package; the DSL's own lie in a folder below theirs."""
    found = PACKAGES.get(package, [])
    if not found and (spec := importlib.util.find_spec(package)) and spec.origin:
        found = [name for part in pathlib.Path(spec.origin).parts for name in PACKAGES.get(part, [])]
    return {canonicalize_name(name) for name in found}


def missing(extra: Iterable[str]) -> set[str]:
    """Return the imported packages of tests that neither ``extra`` nor the base dependencies install."""
    there = brought([*PROJECT["dependencies"], *extra])
    return {package for package in external(imported_by_tests()) if not providers(package) & there}


def test_the_extra_brings_what_tests_import() -> None:
    assert missing(EXTRAS["test"]) == set()


def test_a_package_that_the_extra_lacks_is_found() -> None:
    assert {"pytest", "hypothesis", "tabulate", "transformers"} <= missing([])
    direct = [text for text in EXTRAS["test"] if text != "hopwell[perf]"]
    assert missing([*direct, *(text for text in EXTRAS["perf"] if "tabulate" not in text)]) == {"tabulate"}
