"""What waits for what, and a walk through a table as its ranks would take it.

Whether a table is a schedule at all: every piece of work once, and nobody waits for ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from shoal.errors import LayoutError
from shoal.schedules.table import KINDS, Action, ScheduleTable

Needs = dict[Action, tuple[Action, ...]]


def needs(table: ScheduleTable) -> Needs:
    """The actions whose results an action takes, by action: an edge between ranks is a transfer."""
    back = {(a.stage, a.microbatch): a for row in table.rows for a in row if a.kind in "BI"}
    return {action: tuple(_needs(action, back, table.last_stage)) for row in table.rows for action in row}


def _needs(action: Action, back: dict[tuple[int, int], Action], last_stage: int) -> Iterator[Action]:
    kind, stage, microbatch = action
    if kind == "W":
        yield Action("I", stage, microbatch)
    elif kind == "F":
        if stage > 0:
            yield Action("F", stage - 1, microbatch)
    else:
        yield Action("F", stage, microbatch)
        if stage < last_stage:
            yield back.get((stage + 1, microbatch), Action("B", stage + 1, microbatch))


def walk(table: ScheduleTable, needed: Needs) -> Iterator[tuple[int, Action]]:
    """(rank, action) in an order in which all could happen: each rank in its row's order, sends never blocking.

    Ends early where ranks wait for each other: what never comes is what they are stuck at.
    """
    places = [0] * table.ranks
    done: set[Action] = set()
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    ready = deque(range(table.ranks))
    while ready:
        rank = ready.popleft()
        for action in table.rows[rank][places[rank] :]:
            missing = next((a for a in needed[action] if a not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            done.add(action)
            places[rank] += 1
            yield rank, action
            ready.extend(waiting.pop(action, ()))


def completing(table: ScheduleTable, rank: int) -> dict[Action, int]:
    """The action after which a stage of `rank` owes no gradient any more, and the stage: when its reduction may start.

    Hooks on parameters cannot tell: a split backward writes gradients past them.
    """
    last = {action.stage: action for action in table.rows[rank] if action.kind in "BW"}
    return {action: stage for stage, action in last.items()}


_WHOLE, _SPLIT, _FORWARD = {"F", "B"}, {"F", "I", "W"}, {"F"}


def check(table: ScheduleTable) -> None:
    """Raises `LayoutError` where `table` cannot be run; the sentence names the first action that is at fault."""
    _check_places(table)
    _check_work(table)
    _check_progress(table)


def _check_places(table: ScheduleTable) -> None:
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


def _check_work(table: ScheduleTable) -> None:
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


def _check_progress(table: ScheduleTable) -> None:
    done = [0] * table.ranks
    for rank, _ in walk(table, needs(table)):
        done[rank] += 1
    stuck = [(rank, row[done[rank]]) for rank, row in enumerate(table.rows) if done[rank] < len(row)]
    if stuck:
        where = ", ".join(f"rank {rank} before {action}" for rank, action in stuck)
        raise LayoutError(
            f"{table.name}: ranks wait for each other ({where}); put what they wait for earlier in its row"
        )
