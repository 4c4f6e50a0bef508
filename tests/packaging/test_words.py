"""Pages are in plain English, and the glossary has each word once.

The list has phrases that readers stumbled over. It omits patterns on the opening of a sentence on purpose, because
authors answer them with padding.
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# A clause or a bare pronoun as the subject of a sentence, and idioms that have a plainer form.
BANNED = re.compile(
    r"\b(?:What|Where|Those|Whose)\b(?![^.?]*\?)"
    r"|\b(?:but for|so many|as many as|that nobody)\b"
    r"|\b(?:that|those) of\b"
    r"|\b(?:requests?|kernels?|outputs?|calls?|cases?) of (?:decode|prefill|MLA)\b(?! prefill)"
    r"|\b(?:[Pp]roducts?|[Oo]perands) of (?:4|8|16) bits\b"
    r"|\bhas not\b(?! (?:been|run|seen|\w+ed)\b)"
    r"|\b[Ss]ays? (?:how|what|which|whether)\b"
    r"|\bThis is (?:what|how)\b"
    r"|(?<!\b[Tt]here )\bis no\b(?! (?:longer\b|more\b|\w+er than\b))"
)
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
C_COMMENT = re.compile(r"/\*(.*?)\*/|//([^\n]*)", re.DOTALL)
GLOSSARY_ROWS = 40
SOURCES = ("api", "kernels", "layouts")
FOLDERS = (*SOURCES, "emulator", "perf", "examples", "docs", "tests")


def pages() -> list[str]:
    """Return the hand-written pages; the others in ``perf/results`` are generated."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "emulator").rglob("*.md")]
    found.append(ROOT / "perf" / "results" / "README.md")
    return sorted(str(page.relative_to(ROOT)) for page in found)


def settings() -> list[str]:
    """Return the files of settings and scripts, whose comments begin with ``#``."""
    found = [*ROOT.glob("*.toml"), *(ROOT / "tests").rglob("*.toml"), ROOT / ".ci" / "run"]
    return sorted(str(file.relative_to(ROOT)) for file in found)


def banned(text: str) -> list[str]:
    """Return the banned phrases of a text, each with the words after it; code is skipped."""
    prose = " ".join(CODE.sub("`code`", text).split())
    return [prose[found.start() : found.end() + 40] for found in BANNED.finditer(prose)]


def comments(source: str) -> Iterator[str]:
    """Yield the comments of a module; consecutive lines are one comment."""
    block: list[str] = []
    previous = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.strip().startswith("#")
            if not is_alone or token.start[0] != previous + 1:
                yield "\n".join(block)
                block = []
            block.append(token.string.lstrip("#").removeprefix(" "))
            previous = token.start[0] if is_alone else 0
    yield "\n".join(block)


def prose_of(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    yield from comments(source)


def messages(source: str) -> Iterator[str]:
    """Yield the strings of a module with several words, except docstrings and other strings that no code uses."""
    tree = ast.parse(source)
    unused = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in unused and str(node.value).count(" ") > 2:
            yield str(node.value)


def c_comments(source: str) -> Iterator[str]:
    """Yield the comments of a C file."""
    for found in C_COMMENT.finditer(source):
        yield re.sub(r"^ *\* ?", "", found[1] or found[2] or "", flags=re.MULTILINE).strip()


def prose_in(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the docstrings and comments of all files in a folder, each after the name of its file."""
    for file in sorted((ROOT / folder).rglob("*")):
        if file.suffix in (".py", ".c", ".h"):
            source = file.read_text()
            for text in prose_of(source) if file.suffix == ".py" else c_comments(source):
                yield str(file.relative_to(ROOT)), text


def glossary_section(text: str) -> str:
    """Return the part of a page between the heading of the glossary and the next heading."""
    return text.partition("## Glossary")[2].partition("\n## ")[0]


def glossary(text: str) -> list[tuple[str, ...]]:
    """Return the rows of the glossary of a page, without its header."""
    rows = re.findall(r"^\|(.+)\|$", glossary_section(text), re.MULTILINE)[2:]
    return [tuple(cell.strip() for cell in row.split("|")) for row in rows]


def words(row: tuple[str, ...]) -> list[str]:
    """Return the words that a row of the glossary explains."""
    return [word.strip() for word in row[0].split(",")]


def is_used(word: str, text: str) -> bool:
    """Return whether a text has a word of the glossary, as prose or in an identifier."""
    return re.search(re.sub(r"[ _-]+", "[ _-]?", word), text, re.IGNORECASE) is not None


@pytest.mark.parametrize(
    "text",
    [
        "What limits it is memory.",
        "## Where it runs",
        "Those are kept.",
        "All rows but for the last are kept.",
        "Every row has as many\nas the tile.",
        "The rate is that of a copy.",
        "Hopper has not this instruction.",
        "The table says which kernel runs.",
        "A page size that is no power of two",
        "A slot that nobody reads",
        "All requests of decode",
        "Products of 8 bits are exact.",
    ],
)
def test_banned_phrases_are_found(text: str) -> None:
    assert len(banned(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "There is no second kernel.",
        "The bound is no longer read.",
        "This form is no faster than the other.",
        "It has not been measured.",
        "The kernel has not run on this GPU.",
        "What is a page?",
        "A cache holds `but for` in code.",
        "```\nWhat is code\n```",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert banned(text) == []


@pytest.mark.parametrize("page", pages())
def test_pages_are_in_plain_english(page: str) -> None:
    assert banned((ROOT / page).read_text()) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_are_in_plain_english(folder: str) -> None:
    assert sorted({f"{file}: {phrase}" for file, text in prose_in(folder) for phrase in banned(text)}) == []


@pytest.mark.parametrize("folder", [*SOURCES, "emulator", "perf"])
def test_messages_are_in_plain_english(folder: str) -> None:
    found = {
        f"{file.relative_to(ROOT)}: {phrase}"
        for file in (ROOT / folder).rglob("*.py")
        for text in messages(file.read_text())
        for phrase in banned(text)
    }
    assert sorted(found) == []


def test_comments_of_c_and_messages_are_read() -> None:
    assert list(c_comments("/* a\n * b */ int x; // c\n/* d */")) == ["a\nb", "c", "d"]
    assert list(messages('"""A docstring of four words."""\nx = f"a b c {y} or d e f"\n')) == ["a b c ", " or d e f"]
    assert "emulator/native/shadow.c" in {file for file, _ in prose_in("emulator")}


def test_every_folder_with_sources_is_looked_at() -> None:
    """Build outputs and ignored folders begin with a dot, or do not have our sources."""
    files = [file.relative_to(ROOT) for file in ROOT.glob("*/**/*.py")]
    folders = {file.parts[0] for file in files if not file.parts[0].startswith(".")}
    assert folders - {"build", "shared"} <= set(FOLDERS)
    assert {"api/integrations", "tests/clients", "tests/helpers/batches"} <= {str(file.parent) for file in files}


@pytest.mark.parametrize("file", settings())
def test_comments_of_settings_are_in_plain_english(file: str) -> None:
    assert banned("\n".join(re.findall(r"(?:^|\s)#\s(.*)", (ROOT / file).read_text()))) == []


def test_the_glossary_is_short_and_has_each_word_once() -> None:
    rows = glossary((ROOT / "docs" / "architecture.md").read_text())
    assert 0 < len(rows) <= GLOSSARY_ROWS
    assert [row for row in rows if len(row) != 3] == [], "a row has the word, its meaning and who uses it"
    several = [word for row in rows for word in words(row)]
    assert sorted({word for word in several if several.count(word) > 1}) == []


def test_each_word_of_the_glossary_is_used() -> None:
    """A word is used by code or by a page, outside of the glossary."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")] + [ROOT / name for name in pages()]
    text = "\n".join(file.read_text() for file in files).replace(page, page.replace(glossary_section(page), ""))
    assert [word for row in glossary(page) for word in words(row) if not is_used(word, text)] == []
    assert not is_used("flux capacitor", text)
