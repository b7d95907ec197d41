"""`Action`: one computation of one stage on one microbatch, the atom of every schedule.

    F  forward
    B  backward: the gradients of the input and of the weights, in one go
    I  the gradient of the input only, which the stage before waits for
    W  the gradients of the weights only, which nobody waits for until the step ends (arXiv:2401.10241)

B is I and W together: a stage does either B or both I and W on a microbatch.

Which rank holds which stage.

`ScheduleTable`: a whole schedule, one row of actions a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

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
    def has_backward(self) -> bool:
        """False for tables of `forward_only`."""
        return any(action.kind != "F" for row in self.rows for action in row)


def forward_only(table: ScheduleTable, microbatches: int | None = None) -> ScheduleTable:
    """The same stages without their backward, for evaluation; of the first `microbatches` (None: all)."""
    count = table.microbatches if microbatches is None else microbatches
    rows = tuple(tuple(a for a in row if a.kind == "F" and a.microbatch < count) for row in table.rows)
    return replace(table, name=f"{table.name}, forward only", microbatches=count, rows=rows)
