"""Whether a table is a schedule at all: every piece of work once, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter

from shoal.errors import LayoutError
from shoal.schedules.action import KINDS, Action
from shoal.schedules.order import needs, walk
from shoal.schedules.table import Table

_WHOLE, _SPLIT, _FORWARD = {"F", "B"}, {"F", "I", "W"}, {"F"}


def check(table: Table) -> None:
    """Raises `LayoutError` where `table` cannot be run; the sentence names the first action that is at fault."""
    _check_places(table)
    _check_work(table)
    _check_progress(table)


def _check_places(table: Table) -> None:
    for rank, row in enumerate(table.rows):
        for action in row:
            if not (0 <= action.stage < table.stages and 0 <= action.microbatch < table.microbatches):
                raise LayoutError(
                    f"{table.name}: rank {rank} has {action}, but there are {table.stages} stages and "
                    f"{table.microbatches} microbatches, counted from 0; take it out"
                )
            if table.placement[action.stage] != rank:
                raise LayoutError(
                    f"{table.name}: rank {rank} has {action}, which rank {table.placement[action.stage]} holds; "
                    f"move it there"
                )


def _check_work(table: Table) -> None:
    counts = Counter(action for row in table.rows for action in row)
    for action, times in counts.items():
        if times > 1:
            raise LayoutError(f"{table.name}: {action} stands {times} times; every action stands once: take one out")
    allowed = (_WHOLE, _SPLIT) if table.has_backward else (_FORWARD,)
    for stage in range(table.stages):
        for microbatch in range(table.microbatches):
            kinds = {kind for kind in KINDS if Action(kind, stage, microbatch) in counts}
            if kinds not in allowed:
                raise LayoutError(
                    f"{table.name}: stage {stage} does {' '.join(sorted(kinds)) or 'nothing'} on microbatch "
                    f"{microbatch}; it needs {' or '.join(' '.join(sorted(one)) for one in allowed)}"
                )


def _check_progress(table: Table) -> None:
    done = [0] * table.ranks
    for rank, _ in walk(table, needs(table)):
        done[rank] += 1
    stuck = [(rank, row[done[rank]]) for rank, row in enumerate(table.rows) if done[rank] < len(row)]
    if stuck:
        where = ", ".join(f"rank {rank} before {action}" for rank, action in stuck)
        raise LayoutError(
            f"{table.name}: ranks wait for each other ({where}); put what they wait for earlier in its row"
        )
