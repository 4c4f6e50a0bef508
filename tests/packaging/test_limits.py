"""House limits: lines of files and functions, columns, and parameters of functions, in every folder."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("api", "docs", "emulator", "examples", "kernels", "layouts", "perf", "tests")
SOURCES = (".py", ".c", ".h")
FILE_LINES, FUNCTION_LINES, COLUMNS, PARAMETERS, README_LINES = 500, 80, 120, 12, 250
# A function of C from its first column to the brace in the first column that ends it; one-line functions are left out.
C_FUNCTION = re.compile(r"^\w[\w *]*?\b(\w+)\([^;{}]*\) \{$.*?^\}", re.MULTILINE | re.DOTALL)
CHAIN = 3  # of classes in kernels/, the class itself included


def functions(file: pathlib.Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function, without its docstring, which is the manual of an entry.

    Signatures with FlashInfer's parameters do not count either.
    """
    assert function.end_lineno is not None
    first, lines = function.body[0], function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines - (first.lineno - function.lineno if parameters(function) > PARAMETERS else 0)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = function.args
    return len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) + (a.vararg is not None) + (a.kwarg is not None)


def function_lines(file: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the lines of each function."""
    if file.suffix == ".py":
        yield from ((function.name, length(function)) for function in functions(file))
    else:
        yield from ((found[1], found[0].count("\n") + 1) for found in C_FUNCTION.finditer(file.read_text()))


def beyond(folder: pathlib.Path) -> list[str]:
    """List the violations in a folder and all folders below it."""
    found = []
    for file in sorted(file for file in folder.rglob("*") if file.suffix in SOURCES):
        text = file.read_text().splitlines()
        found += [f"{file}: {len(text)} lines"] * (len(text) > FILE_LINES)
        # ruff judges columns of Python, where a URL may be longer.
        wide = [i for i, line in enumerate(text, 1) if len(line) > COLUMNS and file.suffix != ".py"]
        found += [f"{file}: line {i} is wider than {COLUMNS} columns" for i in wide]
        for name, lines in function_lines(file):
            found += [f"{file}: {name} has {lines} lines"] * (lines > FUNCTION_LINES)
        for function in functions(file) if file.suffix == ".py" else ():
            count = parameters(function)
            # Entries have the parameters of FlashInfer's functions.
            found += [f"{file}: {function.name} has {count} parameters"] * (count > PARAMETERS and folder.name != "api")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_and_functions_keep_the_limits(folder: str) -> None:
    assert beyond(ROOT / folder) == []


def test_no_chain_of_classes_is_longer_than_three() -> None:
    bases: dict[str, set[str]] = {}  # of all classes of a name: roles have the same name in several folders
    for file in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)

    def chain(name: str) -> int:
        return 1 + max((chain(base) for base in bases[name] if base in bases), default=0)

    assert [name for name in bases if chain(name) > CHAIN] == []


def test_every_folder_with_sources_is_looked_at() -> None:
    """Build outputs and ignored folders begin with a dot, or do not have our sources."""
    files = [
        file.relative_to(ROOT) for file in ROOT.glob("*/**/*.py") if not file.relative_to(ROOT).parts[0].startswith(".")
    ]
    assert {file.parts[0] for file in files} - {"build", "shared"} == set(FOLDERS)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_what_is_beyond_the_limits_is_found(tmp_path: pathlib.Path) -> None:
    body = "\n".join("    pass" for _ in range(FUNCTION_LINES))
    many = ", ".join(f"a{i}" for i in range(PARAMETERS + 1))
    (tmp_path / "long.py").write_text(f'def long():\n    """Say."""\n{body}\n' + "\n" * FILE_LINES)
    (tmp_path / "wide.py").write_text(f'def wide({many}):\n    """Not counted.\n{body}\n    """\n')
    fits = (
        "int one(void) { return 1; }\nint fits(int a,\n         int b) {\n" + (FUNCTION_LINES - 3) * "  go();\n" + "}\n"
    )
    over = "EXPORT const u32 *over(void) {\n" + (FUNCTION_LINES - 1) * "  go();\n" + "}\n"
    (tmp_path / "core.c").write_text(f"/*{'*' * COLUMNS}*/\n{fits}enum {{ A }};\n{over}")
    assert [line.rpartition("/")[2] for line in beyond(tmp_path)] == [
        f"core.c: line 1 is wider than {COLUMNS} columns",
        f"core.c: over has {FUNCTION_LINES + 1} lines",
        f"long.py: {FUNCTION_LINES + 2 + FILE_LINES} lines",
        f"long.py: long has {FUNCTION_LINES + 1} lines",
        f"wide.py: wide has {PARAMETERS + 1} parameters",
    ]
