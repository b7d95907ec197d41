"""When every action of a table would start and end, given how long each takes: the bubble, before anything runs.

A schedule as text, as papers draw it: one line a rank, time to the right, a dot for each idle moment.

    rank 0 | F0 F1 F2 .. .. .. I0 W0 ...

A cell says what is done on which microbatch; where ranks hold several stages, a letter says on which of them: "F3b" is
microbatch 3 through the rank's second stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from shoal.errors import LayoutError
from shoal.schedules.table import KINDS, Action, ScheduleTable

# What waits for what, and a walk through a table as its ranks would take it.


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


# Whether a table is a schedule at all: every piece of work once, and nobody waits for ever.


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


Seconds = float | Sequence[float]
"""One duration, or one for each stage."""


@dataclass(frozen=True)
class Timeline:
    """`spans[rank]` are (action, start_s, end_s) in order, from the moment the first rank starts."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def makespan_s(self) -> float:
        """When the last action of all ends."""
        return max((row[-1][2] for row in self.spans if row), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of computation, by rank."""
        return tuple(sum(end - start for _, start, end in row) for row in self.spans)

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """1 - busy / makespan, by rank."""
        whole_s = self.makespan_s
        return tuple(1 - busy_s / whole_s if whole_s else 0.0 for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The mean of the ranks' idle shares."""
        return sum(self.idle_shares) / len(self.spans)


def timeline(
    table: ScheduleTable,
    *,
    forward_s: Seconds,
    backward_input_s: Seconds,
    backward_weight_s: Seconds,
    send_s: float = 0.0,
) -> Timeline:
    """Plays a table that `check` accepts: ranks in their rows' order, as soon as what an action takes is there.

    A whole backward takes both of its parts' time. `send_s` passes between the end of an action and the start of one
    that takes its result on another rank; sending itself occupies nobody.
    """
    forward, inputs, weights = (_by_stage(s, table) for s in (forward_s, backward_input_s, backward_weight_s))
    whole = [a + b for a, b in zip(inputs, weights, strict=True)]
    lasts = {"F": forward, "B": whole, "I": inputs, "W": weights}
    needed = needs(table)
    free_s = [0.0] * table.ranks
    ends: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(table.ranks)]
    for rank, action in walk(table, needed):
        there = [ends[a] + send_s * (table.placement[a.stage] != rank) for a in needed[action]]
        start_s = max(free_s[rank], *there) if there else free_s[rank]
        ends[action] = free_s[rank] = start_s + lasts[action.kind][action.stage]
        spans[rank].append((action, start_s, ends[action]))
    return Timeline(tuple(map(tuple, spans)))


def in_flight(table: ScheduleTable) -> tuple[int, ...]:
    """The most activations that each rank stores at once, in microbatches of one stage: from F until B or W."""
    peaks = []
    for row in table.rows:
        stored = peak = 0
        for action in row:
            stored += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, stored)
        peaks.append(peak)
    return tuple(peaks)


def _by_stage(seconds: Seconds, table: ScheduleTable) -> list[float]:
    if isinstance(seconds, Sequence):
        if len(seconds) != table.stages:
            raise ValueError(f"{len(seconds)} durations for {table.stages} stages: give one, or one for each stage")
        return list(seconds)
    return [seconds] * table.stages


_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def drawn(table: ScheduleTable) -> str:
    """The picture for forward, input's and weights' gradients of equal length, then each rank's idle share and stored
    activations."""
    times = timeline(table, forward_s=1, backward_input_s=1, backward_weight_s=1)
    width = max(len(label(table, action)) for row in table.rows for action in row)
    ranks = range(table.ranks)
    lines = [f"rank {rank:>{len(str(table.ranks - 1))}} | {_line(table, times, rank, width=width)}" for rank in ranks]
    return "\n".join([_title(table), *lines, _figures(table, times)])


def label(table: ScheduleTable, action: Action) -> str:
    """What a cell says: `F3`, or `F3b` for the second stage of a rank that holds several."""
    stages = table.stages_of(table.placement[action.stage])
    chunk = stages.index(action.stage)
    if len(stages) == 1:
        return f"{action.kind}{action.microbatch}"
    return f"{action.kind}{action.microbatch}{ascii_lowercase[chunk] if len(stages) <= 26 else f'.{chunk}'}"


def _line(table: ScheduleTable, times: Timeline, rank: int, *, width: int) -> str:
    cells = ["." * width] * round(times.makespan_s)
    for action, start_s, _ in times.spans[rank]:
        for unit in range(_UNITS[action.kind]):
            cells[round(start_s) + unit] = label(table, action).ljust(width) if unit == 0 else "-" * width
    return " ".join(cells)


def _title(table: ScheduleTable) -> str:
    stages = f", {table.stages} stages" if table.stages != table.ranks else ""
    return f"{table.name}: {table.ranks} ranks{stages}, {table.microbatches} microbatches"


def _figures(table: ScheduleTable, times: Timeline) -> str:
    idle = " ".join(f"{share:.1%}" for share in times.idle_shares)
    stored = " ".join(map(str, in_flight(table)))
    return f"idle: {idle} (mean {times.bubble:.1%}); stored activations, at most: {stored}"
