"""A rule between tables as a record: two things that a run file may say, why they do not go together, and the repair.

`against` lists what does not go with one fact, in the order in which it is said, so that a file of rules reads like a
table; `sentence` alone makes sentences of it, and `shoal.runfile.combinations` prints docs/reference/combinations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal.runfile.facts import Fact, axis
from shoal.runfile.run_file import RunFile

Refusal = Callable[[RunFile], str | None]
"""One sentence if the run file breaks a rule, with what was found, the rule and the repair; None where it holds."""
Words = str | Callable[[RunFile], str]


class Rule(NamedTuple):
    """`found` cannot be, because of `why`; do `repair`. A `why` that begins with a comma continues the clause."""

    found: Fact
    why: Words
    repair: Words = ""


def sentence(one: str, other: str, why: str, repair: str) -> str:
    """What of `one` does not go with `other`."""
    if why.startswith(","):
        return f"{one} with {other}{why}: {repair}"
    return f"{one} with {other}: {'; '.join(filter(None, (why, repair)))}"


@dataclass(frozen=True)
class Against:
    """What does not go with `subject`; the first rule whose fact is found is said. `repair`: of rules without one.
    `found_first`: the sentence begins with the fact.
    """

    subject: Fact
    rules: tuple[Rule, ...]
    repair: str
    found_first: bool

    def __call__(self, run_file: RunFile) -> str | None:
        if (subject := self.subject(run_file)) is None:
            return None
        for found, why, repair in self.rules:
            if (said := found(run_file)) is not None:
                pair = (said, subject) if self.found_first else (subject, said)
                return sentence(*pair, *(_in_words(each, run_file) for each in (why, repair or self.repair)))
        return None


def against(subject: Fact, *rules: Rule, repair: str = "", found_first: bool = False) -> Against:
    """See `Against`."""
    return Against(subject, rules, repair, found_first)


@dataclass(frozen=True)
class InOrder:
    """Of several refusals the first."""

    refusals: tuple[Refusal, ...]

    def __call__(self, run_file: RunFile) -> str | None:
        return next((found for refusal in self.refusals if (found := refusal(run_file)) is not None), None)


def in_order(*refusals: Refusal) -> InOrder:
    """Of these the first."""
    return InOrder(refusals)


def tables_of(refusal: Refusal) -> Iterator[Against]:
    """The tables of rules in `refusal`, in order; a function has none."""
    if isinstance(refusal, Against):
        yield refusal
    for each in refusal.refusals if isinstance(refusal, InOrder) else ():
        yield from tables_of(each)


def axes(names: str, why: str, repair: str = "") -> Iterator[Rule]:
    """The same rule for each of several axes, whose name stands for `{axis}`."""
    for name in names.split():
        yield Rule(axis(name), why.replace("{axis}", name), repair)


def only(condition: Fact, *rules: Rule) -> Iterator[Rule]:
    """Rules that hold under one condition more."""
    for found, why, repair in rules:
        yield Rule(found.where(condition, f"{found.name}, where {condition.name}"), why, repair)


def _in_words(words: Words, run_file: RunFile) -> str:
    return words if isinstance(words, str) else words(run_file)
