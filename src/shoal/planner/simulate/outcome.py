"""What a played step says: its time, who waited, what the ports carried, what communication cost.

phase        from the start until the last rank has computed its last backward
idle share   1 - computing / phase, of each rank: the bubble
period       the longest time from a rank's first to its last action: what a step takes where no rank waits for the
             others between steps (arXiv:2401.10241, section 4: the optimizer without a barrier)
exposed      step minus the same step on a network without latency and with unbounded rate, plus the collectives
             inside stages that nothing hides
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from shoal.planner.simulate.pace import Stragglers
from shoal.planner.simulate.step import Fold, SimulatedStep, simulate_step
from shoal.planner.simulate.work import Work
from shoal.schedules.table import Table


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
class Outcome:
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


def outcome(table: Table, work: Work, *, fold: Fold | None = None, stragglers: Stragglers | None = None) -> Outcome:
    """Plays the step, and again on a perfect network."""
    real = simulate_step(table, work, fold=fold, stragglers=stragglers)
    ideal = simulate_step(table, work.on_perfect_network(), fold=fold, stragglers=stragglers)
    step_s, phase_s = real.played.makespan_s, _phase_s(real)
    shares = _shares(real, step_s, phase_s)
    return Outcome(
        step_s=step_s,
        phase_s=phase_s,
        period_s=period_s(real),
        exposed_s=max(0.0, step_s - ideal.played.makespan_s),
        inside_s=_inside_s(table, work),
        ranks=shares,
        step=real,
    )


def bubble_rate(table: Table, work: Work) -> float:
    """1 - m (F + I + W) / period: how arXiv:2401.10241 counts it, for stages of equal times."""
    step = simulate_step(table, work)
    chunks = len(table.stages_of(0)) * table.microbatches
    stage = work.stages[0]
    computing = chunks * (stage.forward_s + stage.input_s + stage.weight_s)
    return 1 - computing / period_s(step)


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


def _inside_s(table: Table, work: Work) -> float:
    """Of the rank that has most of it."""
    by_rank = [sum(work.stages[stage].inside_s for stage in table.stages_of(rank)) for rank in range(table.ranks)]
    return table.microbatches * max(by_rank)
