"""Schedules of the V: phases written as words, one script a rank.

The rank of a V holds two stages, chunk 0 on the way down and chunk 1 on the way up. A phase is (repeats, words), and a
word is a kind and a chunk: "F0" is the next microbatch's forward through chunk 0. "W" without a chunk is the weights'
gradient that has waited longest. With P ranks, rank r and M microbatches:
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import cast

from shoal.schedules.action import Action, Kind

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
