"""`Table`: a whole schedule, one row of actions a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.schedules.action import Action


@dataclass(frozen=True)
class Table:
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


def forward_only(table: Table, microbatches: int | None = None) -> Table:
    """The same stages without their backward, for evaluation; of the first `microbatches` (None: all)."""
    count = table.microbatches if microbatches is None else microbatches
    rows = tuple(tuple(a for a in row if a.kind == "F" and a.microbatch < count) for row in table.rows)
    return replace(table, name=f"{table.name}, forward only", microbatches=count, rows=rows)
