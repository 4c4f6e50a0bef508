"""Docstrings and comments open as sentences do, and a word of the glossary has one meaning."""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("api", "docs", "emulator", "examples", "kernels", "layouts", "perf", "tests")
FRAGMENT = re.compile(r"(Of|The same|Those|That of|As for|Likewise|By|Also|And|Or)\b|As :\w+:|As (above|in)\b")
# What begins with one of these is a sentence where more than the circumstance follows.
CIRCUMSTANCE = re.compile(r"(In|On|With|Without|For|To|As)\b[^,:;]*$")
# Comments may name what a constant is, but not leave the verb to the line below.
COMMENT_FRAGMENT = re.compile(
    r"(Whose|Else|Never|Its own|Relative to|Not (as|before|by|of))\b|"
    r"(As|Before|Behind|From|Without)\b[^,:;]*(:|, (for )?which\b)"
)
SECOND_MEANING = re.compile(r"\b(also|elsewhere|otherwise|in masks|not a part of)\b|[;.] (of|in|with) ", re.IGNORECASE)


def docstrings(code: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)]
    return [ast.get_docstring(node) or "" for node in nodes]


def comments(code: str) -> list[str]:
    """Return the blocks of comment lines of ``code``; what stands behind code is no sentence."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    alone = [token for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")]
    blocks: list[list[str]] = []
    previous = -1
    for token in alone:
        if token.start[0] != previous + 1:
            blocks.append([])
        blocks[-1].append(token.string.lstrip("#: "))
        previous = token.start[0]
    return [" ".join(block) for block in blocks]


def opening(text: str) -> str:
    """Return the first sentence of ``text``."""
    return re.split(r"(?<=\w)\.(?: |$)", " ".join(text.split()))[0]


def fragments(file: pathlib.Path) -> list[str]:
    """Return the openings of the docstrings and comments of ``file`` that begin as fragments do."""
    code = file.read_text()
    found = [text for text in map(opening, docstrings(code)) if FRAGMENT.match(text) or CIRCUMSTANCE.match(text)]
    found += [text for text in map(opening, comments(code)) if FRAGMENT.match(text) or COMMENT_FRAGMENT.match(text)]
    return [f"{file.relative_to(ROOT)}: {text}" for text in found]


def glossary() -> list[tuple[str, str]]:
    """Return the rows of the glossary: a word, or some of one kind, and what is meant."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Glossary")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return rows[1:]


def has_second_meaning(meaning: str) -> bool:
    """Tell whether a row of the glossary says what its word means in some other place."""
    return SECOND_MEANING.search(meaning) is not None


@pytest.mark.parametrize(
    "source",
    [
        *(
            f'"""{text}"""'
            for text in ("Of a device.", "By candidate.", "In bfloat16.", "As in prefill. What is kept.")
        ),
        *(
            f"# {text}\n# It goes on.\nx = 1  # of x\n"
            for text in (
                "By candidate what there is.",
                "As wgmma has them: two of each.",
                "Whose kernels run.",
                "Not before it.",
            )
        ),
    ],
)
def test_fragments_are_found(source: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found in docstrings and in comments."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "fragment.py"
    file.write_text(source)
    assert len(fragments(file)) == 1


@pytest.mark.parametrize(
    "meaning",
    [
        "heads that share a KV head; also, with a number, so many neighbours",
        "the lines of a KV head; elsewhere, one of a matrix",
        "keys, cut into leaves; of the L2 cache, 128 bytes",
        "a run of keys. In masks the field's chunked attention",
    ],
)
def test_second_meanings_are_found(meaning: str) -> None:
    assert has_second_meaning(meaning)


def test_a_word_of_the_glossary_has_one_meaning() -> None:
    rows = glossary()
    assert len(rows) > 50
    assert [f"{word}: {meaning}" for word, meaning in rows if has_second_meaning(meaning)] == []
    words = [word for several, _ in rows for word in several.split(", ")]
    assert sorted(word for word in set(words) if words.count(word) > 1) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_open_as_sentences(folder: str) -> None:
    assert [found for file in sorted((ROOT / folder).rglob("*.py")) for found in fragments(file)] == []
