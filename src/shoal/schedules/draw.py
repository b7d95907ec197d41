"""A schedule as text, as papers draw it: one line a rank, time to the right, a dot for each idle moment.

    rank 0 | F0 F1 F2 .. .. .. I0 W0 ...

A cell says what is done on which microbatch; where ranks hold several stages, a letter says on which of them: "F3b" is
microbatch 3 through the rank's second stage.
"""

from __future__ import annotations

from string import ascii_lowercase

from shoal.schedules.action import Action
from shoal.schedules.table import Table
from shoal.schedules.timeline import Timeline, in_flight, timeline

_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def drawn(table: Table) -> str:
    """The picture for forward, input's and weights' gradients of equal length, then each rank's idle share and stored
    activations."""
    times = timeline(table, forward_s=1, backward_input_s=1, backward_weight_s=1)
    width = max(len(label(table, action)) for row in table.rows for action in row)
    ranks = range(table.ranks)
    lines = [f"rank {rank:>{len(str(table.ranks - 1))}} | {_line(table, times, rank, width=width)}" for rank in ranks]
    return "\n".join([_title(table), *lines, _figures(table, times)])


def label(table: Table, action: Action) -> str:
    """What a cell says: `F3`, or `F3b` for the second stage of a rank that holds several."""
    stages = table.stages_of(table.placement[action.stage])
    chunk = stages.index(action.stage)
    if len(stages) == 1:
        return f"{action.kind}{action.microbatch}"
    return f"{action.kind}{action.microbatch}{ascii_lowercase[chunk] if len(stages) <= 26 else f'.{chunk}'}"


def _line(table: Table, times: Timeline, rank: int, *, width: int) -> str:
    cells = ["." * width] * round(times.makespan_s)
    for action, start_s, _ in times.spans[rank]:
        for unit in range(_UNITS[action.kind]):
            cells[round(start_s) + unit] = label(table, action).ljust(width) if unit == 0 else "-" * width
    return " ".join(cells)


def _title(table: Table) -> str:
    stages = f", {table.stages} stages" if table.stages != table.ranks else ""
    return f"{table.name}: {table.ranks} ranks{stages}, {table.microbatches} microbatches"


def _figures(table: Table, times: Timeline) -> str:
    idle = " ".join(f"{share:.1%}" for share in times.idle_shares)
    stored = " ".join(map(str, in_flight(table)))
    return f"idle: {idle} (mean {times.bubble:.1%}); stored activations, at most: {stored}"
