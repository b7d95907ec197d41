"""`Action`: one computation of one stage on one microbatch, the atom of every schedule.

    F  forward
    B  backward: the gradients of the input and of the weights, in one go
    I  the gradient of the input only, which the stage before waits for
    W  the gradients of the weights only, which nobody waits for until the step ends (arXiv:2401.10241)

B is I and W together: a stage does either B or both I and W on a microbatch.

`ScheduleTable`: a whole schedule, one row of actions a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class Action(NamedTuple):
    """`kind` on `microbatch` by `stage`; stages and microbatches count from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


def looped(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: every hop goes to the next rank, and from the last one back to the first."""
    return tuple(range(ranks)) * stages_per_rank


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again, two stages each: the first rank holds the first stage and the last one."""
    return tuple(range(ranks)) + tuple(reversed(range(ranks)))


@dataclass(frozen=True)
class ScheduleTable:
    """What every rank computes, in order; transfers follow from it and are never listed.

    `placement[stage]` is the rank that holds a stage; `rows[rank]` its actions. `flushes` says that all microbatches
    see the weights of one step; a table that does not (PipeDream) is for an executor that keeps older weights.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    flushes: bool = True

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.stages - 1

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """Sender and receiver of all that ranks send each other, activations and gradients."""
        hops = [hop for hop in pairwise(self.placement) if hop[0] != hop[1]]
        return frozenset([*hops, *((there, here) for here, there in hops)])

    @property
    def has_backward(self) -> bool:
        """False for tables of `forward_only`."""
        return any(action.kind != "F" for row in self.rows for action in row)


def forward_only(table: ScheduleTable, microbatches: int | None = None) -> ScheduleTable:
    """The same stages without their backward, for evaluation; of the first `microbatches` (None: all)."""
    count = table.microbatches if microbatches is None else microbatches
    rows = tuple(tuple(a for a in row if a.kind == "F" and a.microbatch < count) for row in table.rows)
    return replace(table, name=f"{table.name}, forward only", microbatches=count, rows=rows)


# The schedules by name: those that train with one set of weights a step (PyTorch's, ZB-H1 and ZB-H2), and PipeDream's,
# which updates the weights after every microbatch.


Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "ZB-H1",
    "ZB-H2",
]
AnySchedule = Literal[Schedule, "PipeDream"]


# Schedules of the V: phases written as words, one script a rank.
#
# The rank of a V holds two stages, chunk 0 on the way down and chunk 1 on the way up. A phase is (repeats, words), and
# a word is a kind and a chunk: "F0" is the next microbatch's forward through chunk 0. "W" without a chunk is the
# weights' gradient that has waited longest.


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


# The family of 1F1B: some forwards first, then forwards and backwards in turn.
#
# A row follows from two orders and two numbers. The orders say in which sequence a rank forwards its microbatches
# through its stages, and in which it takes them back; `warmup` is how many forwards come before the first backward, and
# `lag` how many gradients of weights are put off, where the backward is split:
#
#     F ... F | F B F B ... F B | B ... B            whole backward
#     F ... F | F I F I F I W ... F I W | I W ... | W ... W    split, W number k right after I number k + lag
#
# More warm-up fills the pipeline at the price of more stored activations; more lag keeps weights' gradients for the
# time when the pipeline drains. With one stage a rank, of P, and rank r:
#
#     schedule   warmup             lag   source
#     GPipe      all                -     arXiv:1811.06965
#     1F1B       P - 1 - r          -     PipeDream-flush, arXiv:2006.09503
#     ZB-H1      P - 1 - r          r     arXiv:2401.10241, section 2
#     ZB-H2      2 (P - 1 - r)      2 r   arXiv:2401.10241, section 2


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
