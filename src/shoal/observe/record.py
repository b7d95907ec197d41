"""What a run directory says of its run, read once and without trust: files may be missing, torn or somebody else's."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import units
from shoal.config.load import FILE_LIMIT_BYTES, parse
from shoal.errors import UsageError
from shoal.files import meant, read_file
from shoal.launcher.lock import is_locked
from shoal.observe import events as curves
from shoal.observe.events import Event, scan_events, series
from shoal.observe.facts import facts_path, read_facts
from shoal.observe.sink import Ending, ending_in

# The load of every expert over the steps of a run, read from the events of the ranks that recorded it.
#
# moe/load/<mixture>/<expert>     tokens that chose this expert in a step, over all ranks


_NAME = re.compile(r"moe/load/(.{1,200})/(\d{1,4})")


@dataclass(frozen=True)
class LayerLoads:
    """Of one mixture: `tokens[i][expert]` in step `steps[i]`."""

    name: str
    steps: Sequence[int]
    tokens: Sequence[Sequence[float]]

    @property
    def experts(self) -> int:
        """How many experts it has."""
        return len(self.tokens[0])

    @property
    def totals(self) -> list[float]:
        """Tokens of each expert over all recorded steps."""
        return [math.fsum(column) for column in zip(*self.tokens, strict=True)]

    @property
    def imbalance(self) -> float:
        """The largest of `totals` over their mean: 1 where all are loaded alike."""
        totals = self.totals
        return max(totals) * len(totals) / math.fsum(totals)

    @property
    def step_imbalance(self) -> float:
        """What the fullest expert of a step gets over that step's mean, in the median of the steps.

        A step waits for its fullest expert, whichever it is; `imbalance` is 1 where each is the fullest in its turn.
        """
        return statistics.median(max(row) * len(row) / math.fsum(row) for row in self.tokens)


def mean_imbalance(layers: Sequence[LayerLoads]) -> float:
    """The mean `step_imbalance` of the mixtures of a run: their times add up. 1 without any."""
    return statistics.fmean(layer.step_imbalance for layer in layers) if layers else 1.0


def layer_loads(events: Iterable[Event]) -> list[LayerLoads]:
    """The mixtures that a rank recorded, in order.

    Where a step was computed again, the later attempt counts; steps whose record is not whole are left out.
    """
    kept: list[tuple[int, dict[str, dict[int, float]]]] = []
    for event in events:
        found = _found(event)
        while kept and (kept[-1][0] > event.step or (kept[-1][0] == event.step and found)):
            kept.pop()
        if found:
            kept.append((event.step, found))
    return [layer for name in dict.fromkeys(n for _, found in kept for n in found) if (layer := _layer(name, kept))]


def _found(event: Event) -> dict[str, dict[int, float]]:
    """Tokens by mixture and expert."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for key, value in event.values.items():
        if key.startswith("moe/load/") and value is not None and (match := _NAME.fullmatch(key)):
            found[match[1]][int(match[2])] = value
    return found


def _layer(name: str, kept: Sequence[tuple[int, dict[str, dict[int, float]]]]) -> LayerLoads | None:
    rows = [(step, found[name]) for step, found in kept if name in found]
    experts = max(len(row) for _, row in rows)
    whole = [(step, [row[e] for e in range(experts)]) for step, row in rows if row.keys() == set(range(experts))]
    whole = [(step, row) for step, row in whole if min(row) >= 0 and 0 < math.fsum(row) < math.inf]
    return LayerLoads(name, [step for step, _ in whole], [row for _, row in whole]) if whole else None


# Where the time of a step went, what each kind of collective cost, and how the ranks compare. Pure.


PARTS = (
    ("data", "waiting for data"),
    ("forward_backward", "forward and backward"),
    ("sync_exposed", "exposed sync"),
    ("optimizer", "optimizer"),
    ("checkpoint_stall", "checkpoint stall"),
)
"""Measurements `time/...` whose sum, with what is left over, is `time/step`."""

_COLLECTIVE = re.compile(r"wire/([a-z_]{1,60})/bytes_sent")

EVEN_SPREAD = 0.05
"""Ranks whose own work differs by less than this share are called even."""


@dataclass(frozen=True)
class StepPart:
    """One part of the step: its share of all the time, and its seconds in one step."""

    key: str
    label: str
    share: float
    median_s: float
    mean_s: float


@dataclass(frozen=True)
class RankTime:
    """A rank's median step. Its own work is what the others wait for: data, forward and backward, optimizer."""

    rank: int
    steps: int
    step_s: float
    data_s: float
    forward_backward_s: float
    sync_exposed_s: float
    optimizer_s: float
    peak_bytes: float | None = None
    """The most memory that it held; None where that was not measured."""

    @property
    def work_s(self) -> float:
        """Seconds of a median step that this rank does not spend waiting for other ranks."""
        return self.data_s + self.forward_backward_s + self.optimizer_s


def parts_of_step(events: Sequence[Event]) -> list[StepPart]:
    """The parts that were measured, "other" last; [] where no step has a time. Shares are of the sum over all steps."""
    step_s = dict(zip(*series(events, "time/step"), strict=True))
    total_s = sum(value for value in step_s.values() if value > 0)
    if total_s <= 0:
        return []
    found: list[StepPart] = []
    rest = dict(step_s)
    for key, label in PARTS:
        steps, values = series(events, f"time/{key}")
        if not curves.finite(values):
            continue
        found.append(_part(key, label, values, total_s))
        for step, value in zip(steps, values, strict=True):
            rest[step] = rest.get(step, 0.0) - value
    left_over = [max(0.0, value) for step, value in rest.items() if step in step_s]
    return [*found, _part("other", "other", left_over, total_s)]


def rank_time(rank: int, events: Sequence[Event]) -> RankTime | None:
    """The medians of one rank, None where it has no timed step."""
    times = {key: curves.median(series(events, f"time/{key}")[1]) for key in ("step", *(key for key, _ in PARTS))}
    if times["step"] is None:
        return None
    return RankTime(
        rank=rank,
        steps=len(series(events, "time/step")[0]),
        step_s=times["step"],
        data_s=times["data"] or 0.0,
        forward_backward_s=times["forward_backward"] or 0.0,
        sync_exposed_s=times["sync_exposed"] or 0.0,
        optimizer_s=times["optimizer"] or 0.0,
        peak_bytes=max(curves.finite(series(events, "memory/peak_bytes")[1]), default=None),
    )


@dataclass(frozen=True)
class CollectiveCost:
    """What one kind of collective cost a rank in a mean step.

    Bytes that it sent, seconds that it stood still for it, and seconds in which it computed meanwhile.
    """

    name: str
    sent_bytes: float
    exposed_s: float
    hidden_s: float


def collective_costs(events: Sequence[Event]) -> list[CollectiveCost]:
    """The kinds that the rank used, the longest exposed time first; a step that did not use one counts as zero."""
    steps = len(series(events, "time/step")[0]) or 1
    names = {match[1] for event in events for key in event.values if (match := _COLLECTIVE.fullmatch(key))}
    found = [
        CollectiveCost(
            name, *(_sum(events, f"wire/{name}/{part}") / steps for part in ("bytes_sent", "exposed_s", "hidden_s"))
        )
        for name in sorted(names)
    ]
    return sorted(found, key=lambda cost: (-cost.exposed_s, -cost.sent_bytes))


def _sum(events: Sequence[Event], name: str) -> float:
    return sum(curves.finite(series(events, name)[1]))


def slowest(ranks: Iterable[RankTime]) -> tuple[RankTime, float] | None:
    """The rank with the most work of its own, and by what share that is above the median; None where ranks are even."""
    found = sorted(ranks, key=lambda time: time.work_s)
    if len(found) < 2:
        return None
    middle_s = statistics.median_low([time.work_s for time in found])
    excess = found[-1].work_s / middle_s - 1 if middle_s > 0 else 0.0
    return (found[-1], excess) if excess >= EVEN_SPREAD else None


def _part(key: str, label: str, values: Sequence[float], total_s: float) -> StepPart:
    numbers = curves.finite(values)
    total = sum(numbers)
    return StepPart(key, label, total / total_s, curves.median(numbers) or 0.0, curves.mean(numbers) or 0.0)


_RANK_FILE = re.compile(r"rank-(\d{1,9})\.jsonl")


@dataclass(frozen=True)
class Record:
    """A run as its directory shows it; `notices` are sentences on what could not be read."""

    name: str
    events: list[Event] = field(default_factory=list)
    """Those of the lead rank, which is the lowest that wrote any: it has the measurements that are not per rank."""
    lead_rank: int = 0
    rank_times: list[RankTime] = field(default_factory=list)
    expert_loads: list[LayerLoads] = field(default_factory=list)
    """Of all mixtures: each from the lowest rank that recorded it."""
    facts: dict[str, Any] = field(default_factory=dict)
    run_file: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """The run file, parsed; {} where it cannot be."""
    notices: list[str] = field(default_factory=list)
    ending: Ending | None = None
    """How it ended; None for a run that wrote no ending, because it still runs or was killed."""
    running: bool = False
    """A process holds the lock of the directory."""

    def setting(self, table: str, key: str) -> Any:
        """One key of the run file, None where it is not there."""
        found = self.settings.get(table)
        return found.get(key) if isinstance(found, dict) else None


def read_record(run_directory: Path) -> Record:
    """Reads a run directory. Raises `UsageError` where there is nothing of a run in it."""
    ranks = _ranks(run_directory)
    if not (ranks or facts_path(run_directory).is_file() or (run_directory / "run.toml").is_file()):
        found = "holds no run" if run_directory.is_dir() else "is a file" if run_directory.exists() else "is not there"
        raise UsageError(
            f"{run_directory} {found}{meant(run_directory)}: a report needs its events/, facts.json or run.toml; "
            "name the directory that 'shoal train' wrote, such as runs/NAME"
        )
    notices: list[str] = []
    run_file, settings = _run_file(run_directory / "run.toml", notices)
    events, rank_times, loads = _events(run_directory, ranks, notices)
    run_table = settings.get("run")
    name = run_table.get("name") if isinstance(run_table, dict) else None
    facts = _facts(run_directory, notices)
    return Record(
        name=name if isinstance(name, str) else run_directory.resolve().name,
        events=events,
        lead_rank=ranks[0] if ranks else 0,
        rank_times=rank_times,
        expert_loads=loads,
        facts=facts,
        run_file=run_file,
        settings=settings,
        notices=notices,
        ending=ending_in(facts),
        running=is_locked(run_directory),
    )


def _ranks(run_directory: Path) -> list[int]:
    names = (_RANK_FILE.fullmatch(path.name) for path in run_directory.glob("events/rank-*.jsonl"))
    return sorted(int(name.group(1)) for name in names if name)


def _events(
    run_directory: Path, ranks: list[int], notices: list[str]
) -> tuple[list[Event], list[RankTime], list[LayerLoads]]:
    lead: list[Event] = []
    times: list[RankTime] = []
    loads: dict[str, LayerLoads] = {}
    for rank in ranks:
        events, unreadable = scan_events(run_directory, rank)
        if unreadable:
            lines = units.plural(unreadable, "line")
            notices.append(f"{lines} of rank {rank}'s events could not be read; the report leaves them out.")
        if (time := rank_time(rank, events)) is not None:
            times.append(time)
        for layer in layer_loads(events):
            loads.setdefault(layer.name, layer)
        lead = lead or events
    return lead, times, list(loads.values())


def _facts(run_directory: Path, notices: list[str]) -> dict[str, Any]:
    try:
        return read_facts(run_directory)
    except UsageError as fault:
        notices.append(str(fault))
        return {}


def _run_file(path: Path, notices: list[str]) -> tuple[str, dict[str, Any]]:
    if not path.is_file():
        notices.append("There is no run.toml in this directory, so the planned number of steps is not known.")
        return "", {}
    repair = "it should be as 'shoal train' wrote it"
    text = read_file(path, limit_bytes=FILE_LIMIT_BYTES, error=UsageError, repair=repair).decode(errors="replace")
    try:
        return text, parse(text)
    except ValueError as fault:
        notices.append(f"run.toml is not TOML ({fault}), so the planned number of steps is not known.")
        return text, {}
