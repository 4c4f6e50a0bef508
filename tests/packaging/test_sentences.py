"""A sentence has at most 25 words, in pages, docstrings and comments.

A code span, a bracketed shape and a link each count as one word. Figures are no words. Code, diagrams and tables are
skipped, because their cells list values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.packaging.test_words import FOLDERS, ROOT, comments, pages, prose_in

WORDS = 25
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"``.+?``|`[^`]+`|(?<!\S)\[[^\]]*\](?!\()", re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"(?:[*+-]|\d+\.|#+) +")
SECTION = re.compile(r"[A-Z]\w+:$")
LITERAL = re.compile(r"\S {2,}\S|^>>> |^\|")
# A full stop, or the end of a sentence inside quotes or a bold lead-in; "e.g." and "i.e." end no sentence.
END = re.compile(r"(?<=[.!?])(?<!\b[eiv]\.g\.)(?<!\bi\.e\.)[\"')*]*\s+")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a page or a docstring, each in one line."""
    lines: list[str] = []
    indent, literal = 0, None
    for line in [*FENCE.sub("", text).split("\n"), ""]:
        stripped = line.strip()
        depth = len(line) - len(line.lstrip())
        if literal is not None and (not stripped or depth > literal):
            continue
        literal = None
        if not stripped or LITERAL.search(stripped) or ITEM.match(stripped) or depth < indent:
            yield " ".join(lines)
            lines = []
        indent = depth
        if stripped and not LITERAL.search(stripped) and not SECTION.match(stripped):
            lines.append(stripped[item.end() :] if (item := ITEM.match(stripped)) else stripped)
        if stripped.endswith("::"):
            literal = depth
            yield " ".join(lines)
            lines = []


def long_sentences(text: str) -> list[str]:
    """Return the sentences of a page or a docstring that have more than ``WORDS`` words."""
    prose = (LINK.sub("link", SPAN.sub("code", paragraph)) for paragraph in paragraphs(text))
    sentences = (sentence for paragraph in prose for sentence in END.split(paragraph))
    return [each for each in sentences if len(re.findall(r"(?<!\S)[^\w\s]*[A-Za-z]", each)) > WORDS]


LONG = " ".join(["word"] * (WORDS + 1))
SHORT = " ".join(["word"] * WORDS)


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG}.",
        f"Short. {LONG}",
        f"* {LONG}",
        f"a {SHORT},\nand a second line.",
        f"Args:\n    name: {LONG}",
        f"Before a literal::\n\n    code\n\n{LONG}",
    ],
)
def test_long_sentences_are_found(text: str) -> None:
    assert len(long_sentences(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"{SHORT}. {SHORT}.",
        f"{SHORT} 1.5 (2026) 32",
        f"* {SHORT}\n* {SHORT}",
        f"Args:\n    {SHORT}\n",
        "word [a, b, c] `x y` " * 6,
        f"```\n{LONG}\n```",
        f"Literal::\n\n    {LONG}\n\n{SHORT}",
        f"| {LONG} |",
    ],
)
def test_short_sentences_pass(text: str) -> None:
    assert long_sentences(text) == []


def test_consecutive_comments_are_one() -> None:
    assert list(filter(None, comments("# a\n# b\n\nx = 1  # c\ny = 2  # d\n"))) == ["a\nb", "c", "d"]


@pytest.mark.parametrize("page", pages())
def test_sentences_of_pages_are_short(page: str) -> None:
    assert long_sentences((ROOT / page).read_text()) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_of_docstrings_and_comments_are_short(folder: str) -> None:
    assert [f"{file}: {sentence}" for file, text in prose_in(folder) for sentence in long_sentences(text)] == []
