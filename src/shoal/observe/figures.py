"""What the figures of the live line and of the closing sentence mean, each in a line: for `shoal train --help` and the
report."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "left, elapsed": "time to the last step at the mean pace of this start, and since this start",
        "loss": "of the last step, over the whole global batch, before its update",
        "held out, accuracy": "of the last evaluation, on data that is not trained on",
        "tokens/s, samples/s": "of all ranks together, mean of the last 20 steps",
        "epoch": "how often the training data has been used",
        "sync": "share of the last step in which rank 0 stood still for other ranks or the wire",
        "data wait": "share of the last step in which rank 0 waited for its samples; shown from 1 % on",
        "memory": "the most that rank 0 has held so far",
        "lr": "learning rate of the last step",
        "exposed communication": "share of all steps in which rank 0 stood still for other ranks or the wire",
        "goodput": "share of the time since the first step in steps that last; not data, saves, evaluation, restarts",
    }
)


_LONGEST_LINE = 76
"""Of `--help`, which indents by two: a terminal has 80 columns."""


def help_lines() -> str:
    """For `--help`: each name, and beside it its meaning, within `_LONGEST_LINE`."""
    width = max(len(name) for name in MEANINGS)
    return "\n".join(_entry(f"  {name.ljust(width)}  ", meaning) for name, meaning in MEANINGS.items())


def _entry(start: str, meaning: str) -> str:
    return textwrap.fill(meaning, _LONGEST_LINE, initial_indent=start, subsequent_indent=" " * len(start))
