"""What waits for what, and a walk through a table as its ranks would take it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from shoal.schedules.action import Action
from shoal.schedules.table import Table

Needs = dict[Action, tuple[Action, ...]]


def needs(table: Table) -> Needs:
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


def walk(table: Table, needed: Needs) -> Iterator[tuple[int, Action]]:
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


def completing(table: Table, rank: int) -> dict[Action, int]:
    """The action after which a stage of `rank` owes no gradient any more, and the stage: when its reduction may start.

    Hooks on parameters cannot tell: a split backward writes gradients past them.
    """
    last = {action.stage: action for action in table.rows[rank] if action.kind in "BW"}
    return {action: stage for stage, action in last.items()}
