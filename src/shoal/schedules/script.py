"""Schedules of the V: phases written as words, one script a rank.

The rank of a V holds two stages, chunk 0 on the way down and chunk 1 on the way up. A phase is (repeats, words), and a
word is a kind and a chunk: "F0" is the next microbatch's forward through chunk 0. "W" without a chunk is the weights'
gradient that has waited longest. With P ranks, rank r and M microbatches:

The family of 1F1B: some forwards first, then forwards and backwards in turn.

A row follows from two orders and two numbers. The orders say in which sequence a rank forwards its microbatches
through its stages, and in which it takes them back; `warmup` is how many forwards come before the first backward, and
`lag` how many gradients of weights are put off, where the backward is split:

    F ... F | F B F B ... F B | B ... B            whole backward
    F ... F | F I F I F I W ... F I W | I W ... | W ... W    split, W number k right after I number k + lag

More warm-up fills the pipeline at the price of more stored activations; more lag keeps weights' gradients for the time
when the pipeline drains. With one stage a rank, of P, and rank r:

    schedule   warmup             lag   source
    GPipe      all                -     arXiv:1811.06965
    1F1B       P - 1 - r          -     PipeDream-flush, arXiv:2006.09503
    ZB-H1      P - 1 - r          r     arXiv:2401.10241, section 2
    ZB-H2      2 (P - 1 - r)      2 r   arXiv:2401.10241, section 2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from shoal.schedules.table import Action, Kind

Phase = tuple[int, str]


def zero_bubble_v(rank: int, *, ranks: int, microbatches: int) -> list[Phase]:
    """ZB-V (arXiv:2401.10241, section 6): no bubble but the ramps where F, I and W take equally long, with the
    activations of 1F1B. Written for M >= 2 P - 1; smaller numbers leave out what they do not have."""
    after = ranks - 1 - rank
    return [
        (2 * after + 1, "F0"),
        (rank, "F1 F0"),
        (after + 1, "F1 I1 W1"),
        (microbatches - 2 * ranks + 1 + rank, "F0 I0 W0 F1 I1 W1"),
        (after, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (after + 1, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]


def dual_pipe_v(rank: int, *, ranks: int, microbatches: int) -> list[Phase]:
    """DualPipe-V: the half of DualPipe (arXiv:2412.19437, section 3.2.1) that does without a second copy of the
    weights. F and B of different chunks stand side by side, for one to compute while the other communicates."""
    after = ranks - 1 - rank
    both = ["1", "0"] * (rank + 1)
    return [
        (2 * after, "F0"),
        (rank + 1, "F0 F1"),
        (after, "I1 W F1"),
        (microbatches - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
        (after, "B1 F1 B0"),
        (1, " ".join(f"B{chunk}" for chunk in both[: rank + 1])),
        (1, " ".join(f"I{chunk}" for chunk in both[rank + 1 :])),
        (after, "W I0"),
        (rank + 1, "W"),
    ]


def played(phases: Iterable[Phase], stages: tuple[int, ...]) -> tuple[Action, ...]:
    """The row that a script says; `stages[chunk]` is the rank's stage."""
    row: list[Action] = []
    counts: Counter[tuple[str, int]] = Counter()
    pending: list[tuple[int, int]] = []  # (chunk, microbatch) whose W is to come
    for word in (word for repeats, words in phases for word in words.split() * repeats):
        if word.startswith("W"):
            wanted = next(p for p in pending if word in ("W", f"W{p[0]}"))
            pending.remove(wanted)
            row.append(Action("W", stages[wanted[0]], wanted[1]))
            continue
        kind, chunk = word[0], int(word[1])
        way = "F" if kind == "F" else "back"
        microbatch = counts[way, chunk]
        counts[way, chunk] += 1
        if kind == "I":
            pending.append((chunk, microbatch))
        row.append(Action(cast(Kind, kind), stages[chunk], microbatch))
    return tuple(row)


Visit = tuple[int, int]
"""(stage, microbatch)."""


def woven(
    forwards: Sequence[Visit], backwards: Sequence[Visit], *, warmup: int, lag: int | None = None
) -> tuple[Action, ...]:
    """One rank's row. `warmup` is cut to the forwards that there are; `lag` None: the backward is whole."""
    ahead = min(warmup, len(forwards))
    row = [Action("F", *visit) for visit in forwards[:ahead]]
    taken_back = _taken_back(backwards, lag)
    for visit in forwards[ahead:]:
        row += [Action("F", *visit), *next(taken_back)]
    for actions in taken_back:
        row += actions
    if lag is not None:
        row += [Action("W", *visit) for visit in backwards[max(0, len(backwards) - lag) :]]
    return tuple(row)


def _taken_back(backwards: Sequence[Visit], lag: int | None) -> Iterator[list[Action]]:
    for number, visit in enumerate(backwards):
        if lag is None:
            yield [Action("B", *visit)]
        else:
            late = [Action("W", *backwards[number - lag])] if number >= lag else []
            yield [Action("I", *visit), *late]


def in_rounds(stages: Sequence[int], microbatches: int, *, round_size: int) -> list[Visit]:
    """Depth first (arXiv:2104.04473): `round_size` microbatches through each of `stages`, then the next ones."""
    return [
        (stage, microbatch)
        for start in range(0, microbatches, round_size)
        for stage in stages
        for microbatch in range(start, start + round_size)
    ]
