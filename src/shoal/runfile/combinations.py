"""The page of what does not go with what, printed from the rules: `python -m shoal.runfile.combinations
docs/reference/combinations.md` writes it anew. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from shoal.runfile.rule import Words, tables_of
from shoal.runfile.rules import refusal

TITLE = "What does not go together"
FOREWORD = """\
A run file that asks for two of these at once is refused before any process starts, by a sentence that names both keys
and their values, the reason and the repair; of several, the first is said. Beside them are rules about numbers: what
has to divide what, how many samples a step needs. Their sentences name the nearest numbers that work.

Written by `python -m shoal.runfile.combinations`, from the rules themselves."""
COMPUTED = "(as the numbers of the run file say)"


def combinations() -> str:
    """The whole page, in Markdown."""
    return "\n".join((f"# {TITLE}", "", FOREWORD, *_sections())) + "\n"


def _sections() -> Iterator[str]:
    """One for each subject, where it comes first. Neighbours with one reason share a row."""
    sections: dict[str, list[str]] = {}
    for table in tables_of(refusal):
        said = [(_words(rule.why), _words(rule.repair or table.repair), rule.found.name) for rule in table.rules]
        for (why, repair), rows in groupby(said, itemgetter(0, 1)):
            found = "<br>".join(name for *_, name in rows)
            sections.setdefault(table.subject.name, []).append(f"| {found} | {why} | {repair} |")
    for subject, rows in sections.items():
        yield from ("", f"## {subject}", "| not with | because | do |", "|---|---|---|", *rows)


def _words(words: Words) -> str:
    return words.removeprefix(", ") if isinstance(words, str) else COMPUTED


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(combinations(), encoding="utf-8")
