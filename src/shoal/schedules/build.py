"""Schedules by name: those of PyTorch under its names, ZB-H1 and ZB-H2, and PipeDream's without a flush."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from shoal.schedules import limits, script
from shoal.schedules.script import in_rounds, woven
from shoal.schedules.table import Action, ScheduleTable, looped, v_shaped

Row = tuple[Action, ...]


@dataclass(frozen=True)
class Sizes:
    """What a row depends on, besides its rank."""

    ranks: int
    microbatches: int
    stages_per_rank: int

    def stages(self, rank: int) -> range:
        """The stages of a rank where they are looped."""
        return range(rank, self.ranks * self.stages_per_rank, self.ranks)

    @property
    def round_size(self) -> int:
        return limits.round_size(self.microbatches, self.ranks)


def _gpipe(rank: int, sizes: Sizes) -> Row:
    visits = [(rank, microbatch) for microbatch in range(sizes.microbatches)]
    return woven(visits, visits, warmup=len(visits))


def _one_by_one(rank: int, sizes: Sizes, *, ahead: int, lag: int | None = None) -> Row:
    visits = [(rank, microbatch) for microbatch in range(sizes.microbatches)]
    return woven(visits, visits, warmup=ahead * (sizes.ranks - 1 - rank), lag=lag)


def _looped_bfs(rank: int, sizes: Sizes) -> Row:
    """Breadth first (arXiv:2211.05953): all microbatches through a stage before the rank's next stage."""
    forwards = in_rounds(sizes.stages(rank), sizes.microbatches, round_size=sizes.microbatches)
    return woven(forwards, forwards[::-1], warmup=len(forwards))


def _interleaved(rank: int, sizes: Sizes, *, ahead: int, lag: int | None = None) -> Row:
    """Depth first (arXiv:2104.04473, section 2.2), with rounds of `round_size` where `ranks` does not divide."""
    stages, round_size = sizes.stages(rank), sizes.round_size
    return woven(
        in_rounds(stages, sizes.microbatches, round_size=round_size),
        in_rounds(stages[::-1], sizes.microbatches, round_size=round_size),
        warmup=(len(stages) - 1) * round_size + ahead * (sizes.ranks - 1 - rank),
        lag=lag,
    )


def _zero_bubble_v(rank: int, sizes: Sizes) -> Row:
    whole = max(sizes.microbatches, 2 * sizes.ranks - 1)
    phases = script.zero_bubble_v(rank, ranks=sizes.ranks, microbatches=whole)
    row = script.played(phases, _of_v(rank, sizes))
    return tuple(action for action in row if action.microbatch < sizes.microbatches)


def _dual_pipe_v(rank: int, sizes: Sizes) -> Row:
    phases = script.dual_pipe_v(rank, ranks=sizes.ranks, microbatches=sizes.microbatches)
    return script.played(phases, _of_v(rank, sizes))


def _of_v(rank: int, sizes: Sizes) -> tuple[int, int]:
    return rank, 2 * sizes.ranks - 1 - rank


@dataclass(frozen=True)
class Schedule:
    """How rows are made, and what sizes allow it. `stages_per_rank` 0: any number, 2 unless given."""

    row: Callable[[int, Sizes], Row]
    stages_per_rank: int
    rounds: bool = False
    enough: bool = False
    v: bool = False
    flushes: bool = True


_SCHEDULES = MappingProxyType(
    {
        "GPipe": Schedule(_gpipe, 1),
        "1F1B": Schedule(lambda rank, sizes: _one_by_one(rank, sizes, ahead=1), 1),
        "Interleaved1F1B": Schedule(lambda rank, sizes: _interleaved(rank, sizes, ahead=2), 0, rounds=True),
        "LoopedBFS": Schedule(_looped_bfs, 0),
        "InterleavedZeroBubble": Schedule(
            lambda rank, sizes: _interleaved(rank, sizes, ahead=1, lag=rank), 0, rounds=True
        ),
        "ZBVZeroBubble": Schedule(_zero_bubble_v, 2, v=True),
        "DualPipeV": Schedule(_dual_pipe_v, 2, enough=True, v=True),
        "ZB-H1": Schedule(lambda rank, sizes: _one_by_one(rank, sizes, ahead=1, lag=rank), 1),
        "ZB-H2": Schedule(lambda rank, sizes: _one_by_one(rank, sizes, ahead=2, lag=2 * rank), 1),
        "PipeDream": Schedule(lambda rank, sizes: _one_by_one(rank, sizes, ahead=1), 1, flushes=False),
    }
)
NAMES: tuple[str, ...] = tuple(_SCHEDULES)
"""What `build` knows. All but "PipeDream" compute the same gradients."""


def fixed_stages_of(name: str) -> int | None:
    """How many stages `name` places on each rank, where it leaves no choice. `name` is one of `NAMES`."""
    return _SCHEDULES[name].stages_per_rank or None


def stages_per_rank_of(name: str, given: int | None = None) -> int:
    """How many stages `name` places on each rank: its own number, or `given`, or 2 where it is free.

    Raises `ConfigError` for an unknown name, `LayoutError` for a number that the schedule does not take.
    """
    limits.check_name(name, NAMES)
    required = _SCHEDULES[name].stages_per_rank
    if given is None:
        return required or 2
    limits.check_size("stages per rank", given)
    if required:
        limits.check_stages_per_rank(name, given, required)
    return given


def build(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> ScheduleTable:
    """The schedule `name` of these sizes.

    Raises:
        ConfigError: there is no such schedule.
        LayoutError: it does not take these sizes; the message names the number and the nearest that work.
    """
    per_rank = stages_per_rank_of(name, stages_per_rank)
    schedule = _SCHEDULES[name]
    limits.check_size("ranks", ranks)
    limits.check_size("microbatches", microbatches)
    if schedule.rounds:
        limits.check_rounds(name, microbatches, ranks)
    if schedule.enough:
        limits.check_enough(name, microbatches, ranks)
    sizes = Sizes(ranks, microbatches, per_rank)
    placement = v_shaped(ranks) if schedule.v else looped(ranks, per_rank)
    rows = tuple(schedule.row(rank, sizes) for rank in range(ranks))
    return ScheduleTable(name, ranks, ranks * per_rank, microbatches, placement, rows, flushes=schedule.flushes)
