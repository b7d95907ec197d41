"""What a played step says: its time, who waited, what the ports carried, what communication cost; and how it is shown.

phase        from the start until the last rank has computed its last backward
idle share   1 - computing / phase, of each rank: the bubble
period       the longest time from a rank's first to its last action: what a step takes where no rank waits for the
             others between steps (arXiv:2401.10241, section 4: the optimizer without a barrier)
exposed      step minus the same step on a network without latency and with unbounded rate, plus the collectives
             inside stages that nothing hides

It is shown as a timeline of the schedule, as lines of text (`shoal simulate`), and in the Trace Event Format, which
Perfetto (ui.perfetto.dev) and chrome://tracing open: one process a simulated device, three threads (what it computes,
what it sends, its collectives), complete events ("X") with times in microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shoal import units
from shoal.planner.explain.text import table
from shoal.planner.simulate.goodput import WEEK_S, Goodput
from shoal.planner.simulate.step import Fold, SimulatedStep, paces_of, perfect_step_s, simulate_step
from shoal.planner.simulate.work import StepWork, Stragglers
from shoal.schedules.table import Action, ScheduleTable
from shoal.schedules.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """One simulated device. Shares of `phase_s` (idle) and of the step (port out)."""

    replica: int
    rank: int
    computing_s: float
    idle_share: float
    port_share: float
    period_s: float


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of one step, seconds."""

    step_s: float
    phase_s: float
    period_s: float
    exposed_s: float
    inside_s: float
    ranks: tuple[RankShare, ...]
    step: SimulatedStep

    @property
    def bubble(self) -> float:
        """The mean idle share of the simulated ranks."""
        return statistics.fmean(one.idle_share for one in self.ranks)

    @property
    def communication_s(self) -> float:
        """All communication that the step's time contains: outside of stages and inside."""
        return self.exposed_s + self.inside_s


def outcome(
    table: ScheduleTable, work: StepWork, *, fold: Fold | None = None, stragglers: Stragglers | None = None
) -> StepFigures:
    """Plays the step; on a perfect network it is a longest path."""
    fold, stragglers = fold or Fold(), stragglers or Stragglers()
    real = simulate_step(table, work, fold=fold, stragglers=stragglers)
    perfect_s = perfect_step_s(table, work, paces_of(table, fold, stragglers))
    step_s, phase_s = real.played.makespan_s, _phase_s(real)
    shares = _shares(real, step_s, phase_s)
    return StepFigures(
        step_s=step_s,
        phase_s=phase_s,
        period_s=period_s(real),
        exposed_s=max(0.0, step_s - perfect_s),
        inside_s=_inside_s(table, work),
        ranks=shares,
        step=real,
    )


def period_s(step: SimulatedStep) -> float:
    """The longest time from a rank's first action to the end of its last."""
    ends, starts = step.played.ends_s, step.played.starts_s
    return max((ends[row[-1]] - starts[row[0]] for row in step.actions if row), default=0.0)


def _phase_s(step: SimulatedStep) -> float:
    return max((step.played.ends_s[row[-1]] for row in step.actions if row), default=0.0)


def _shares(step: SimulatedStep, step_s: float, phase_s: float) -> tuple[RankShare, ...]:
    played = step.played
    ports = [0.0] * (2 * len(step.places))
    for task in played.tasks:
        for port in task.ports:
            ports[port] += task.busy_s
    shares = []
    for place, row in zip(step.places, step.actions, strict=True):
        computing = sum(played.tasks[number].busy_s for number in row)
        period = played.ends_s[row[-1]] - played.starts_s[row[0]] if row else 0.0
        shares.append(
            RankShare(
                replica=place.replica,
                rank=place.rank,
                computing_s=computing,
                idle_share=1 - computing / phase_s if phase_s else 0.0,
                port_share=ports[place.out] / step_s if step_s else 0.0,
                period_s=period,
            )
        )
    return tuple(shares)


def _inside_s(table: ScheduleTable, work: StepWork) -> float:
    """Of the rank that has most of it."""
    by_rank = [sum(work.stages[stage].inside_s for stage in table.stages_of(rank)) for rank in range(table.ranks)]
    return table.microbatches * max(by_rank)


def timeline_of(step: SimulatedStep) -> Timeline:
    """Of the first simulated replica and peer. An action that was played in parts lasts from its first to its last."""
    first = {place.rank: place.number for place in reversed(step.places)}
    return Timeline(tuple(tuple(_spans(step, rank, first[rank])) for rank in range(step.table.ranks)))


def _spans(step: SimulatedStep, rank: int, place: int) -> Iterator[tuple[Action, float, float]]:
    played, numbers = step.played, list(step.actions[place])
    for action in step.table.rows[rank]:
        name = f"{action.kind}{action.microbatch} s{action.stage}"
        parts = next((i for i, number in enumerate(numbers) if played.tasks[number].name != name), len(numbers))
        mine, numbers = numbers[:parts], numbers[parts:]
        yield action, played.starts_s[mine[0]], played.ends_s[mine[-1]]


MOST_RANKS = 32
"""Lines of the table of ranks; longer pipelines show their idlest ranks."""


def step(one: StepFigures, *, predicted_s: float) -> str:
    """The step and its parts beside the prediction of the closed forms."""
    rows = [
        ("step", units.seconds(one.step_s), f"{units.seconds(predicted_s)} by closed forms"),
        (
            "bubble",
            units.seconds(one.bubble * one.phase_s),
            f"{100 * one.bubble:.1f} % of the pipeline's {units.seconds(one.phase_s)}",
        ),
        ("communication outside stages", units.seconds(one.exposed_s), "step minus the step on a perfect network"),
        (
            "communication inside stages",
            units.seconds(one.inside_s),
            "tensor, context, expert, ZeRO: what nothing hides",
        ),
        (
            "without a barrier between steps",
            units.seconds(one.period_s),
            "longest time from a rank's first to last action",
        ),
    ]
    return table(("simulated", "time", ""), rows)


def ranks(one: StepFigures, memory_bytes: Sequence[float], *, limit_bytes: float) -> str:
    """Every simulated pipeline rank of the first replica: computing, waiting, its port, its memory."""
    shown = [share for share in one.ranks if share.replica == 0]
    if len(shown) > MOST_RANKS:
        kept = sorted(sorted(shown, key=lambda share: -share.idle_share)[:MOST_RANKS], key=lambda share: share.rank)
        shown = kept
    rows = [
        (
            f"{share.rank}",
            units.seconds(share.computing_s),
            f"{100 * share.idle_share:.1f}",
            f"{100 * share.port_share:.1f}",
            units.memory_size(memory_bytes[share.rank]),
        )
        for share in shown
    ]
    limit = units.memory_size(limit_bytes)
    return table(("pipeline rank", "computes", "idle %", "port in use %", f"peak of {limit}"), rows)


def does_not_fit(need_bytes: float, *, limit_bytes: float, device: str) -> str:
    """One sentence: what is needed, what there is, what to do."""
    return (
        f"this run does not fit: its fullest rank needs {units.memory_size(need_bytes)}, and {device} has "
        f"{units.memory_size(limit_bytes)}; 'shoal plan' finds layouts that fit"
    )


def weeks(one: Goodput, *, every_s: float, stall_s: float, between_s: float | None, steps: float) -> str:
    """Where the time of the weeks went; `between_s` is the mean time between failures, None where there are none."""
    parts = (
        ("training that lasted", one.trained_s),
        ("saving", one.saving_s),
        ("lost and done again", one.lost_s),
        ("recovering", one.recovering_s),
    )
    rows = [(name, units.duration(value), f"{100 * value / one.wall_s:.2f}") for name, value in parts]
    failures = units.plural(one.failures, "failure")
    failures += "" if between_s is None else f" (one every {units.duration(between_s)} in the mean)"
    title = (
        f"{one.wall_s / WEEK_S:g} weeks: {failures}, a save every {units.duration(every_s)} that holds the job up "
        f"for {units.duration(stall_s)}, {steps:,.0f} steps"
    )
    return title + "\n" + table(("time", "", "%"), rows)


_THREADS = MappingProxyType({"compute": 0, "optimizer": 0, "transfer": 1, "collective": 2})
_NAMES = ("compute", "send", "collectives")
_MICRO = 1e6


def trace(step: SimulatedStep) -> dict[str, Any]:
    """The whole file as plain values."""
    return {"displayTimeUnit": "ms", "traceEvents": [*_headings(step), *_events(step)]}


def _headings(step: SimulatedStep) -> Iterator[dict[str, Any]]:
    for place in step.places:
        name = f"replica {place.replica}, pipeline rank {place.rank}" + (f", peer {place.peer}" if place.peer else "")
        yield {"ph": "M", "name": "process_name", "pid": place.number, "args": {"name": name}}
        for thread, what in enumerate(_NAMES):
            yield {"ph": "M", "name": "thread_name", "pid": place.number, "tid": thread, "args": {"name": what}}


def _events(step: SimulatedStep) -> Iterator[dict[str, Any]]:
    played = step.played
    for task, start_s, end_s in zip(played.tasks, played.starts_s, played.ends_s, strict=True):
        thread = _THREADS.get(task.kind)
        if thread is None or not end_s + task.latency_s > start_s:
            continue
        yield {
            "ph": "X",
            "name": task.name,
            "cat": task.kind,
            "pid": task.rank,
            "tid": thread,
            "ts": round(start_s * _MICRO, 3),
            "dur": round((end_s - start_s + task.latency_s) * _MICRO, 3),
        }
