"""Rewrites tables of Markdown files from the files of runs."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from hopwell.perf.precision import name_of
from hopwell.perf.results import Run

# A comment names a run's JSON file, beside the document or relative to it, and the cases, like ``--cases`` of a sweep.
PLACE = re.compile(r"(<!-- table of (\S+): (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)

BEGIN, END = "<!-- predictions -->", "<!-- end of predictions -->"


def with_tables(document: Path) -> str:
    """Return the text of a Markdown file with the tables that its comments ask for.

    Raises:
        ValueError: a comment names a file that does not exist, or cases that were not measured.
    """

    def table(place: re.Match[str]) -> str:
        begin, path, cases, _, end = place.groups()
        return f"{begin}\n{summary(document.parent, path, cases.split(','))}\n\n{end}"

    return PLACE.sub(table, document.read_text())


def summary(folder: Path, path: str, patterns: list[str]) -> str:
    """Return a run's GPU, date and file, and the table of the cases that match these patterns.

    Raises:
        ValueError: the file does not exist, or no case matches a pattern.
    """
    if not (folder / path).exists():
        raise ValueError(f"a table is to be of {folder / path}, which does not exist")
    run = Run.load(folder / path)
    titles: dict[str, None] = {}
    for pattern in patterns:
        found = [title for title in run.alone if fnmatchcase(name_of(title), pattern)]
        if not found:
            names = ", ".join(map(name_of, run.alone))
            raise ValueError(f"no case of {path} is named {pattern!r}; there are {names}")
        titles |= dict.fromkeys(found)
    return f"{run.gpu}, {run.date} ([all]({Path(path).with_suffix('.md')})):\n\n{run.summary(list(titles))}"


def write_predictions(document: Path, text: str) -> None:
    """Put ``text`` between the marker comments of a Markdown file.

    Raises:
        ValueError: the file does not have the marker comments.
    """
    before, found, after = document.read_text().partition(BEGIN)
    _, ends, after = after.partition(END)
    if not (found and ends):
        raise ValueError(f"{document} must have {BEGIN} and {END}, got neither or one of them")
    document.write_text(f"{before}{BEGIN}\n{text}{END}{after}")
