"""Schedules by name: those of PyTorch under its names, ZB-H1 and ZB-H2, and PipeDream's without a flush."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from shoal.errors import ConfigError, LayoutError
from shoal.schedules import table
from shoal.schedules.table import Action, ScheduleTable, in_rounds, looped, v_shaped, woven

# Which sizes a schedule takes, in sentences that offer the nearest that work.


def check_name(name: str, known: tuple[str, ...]) -> None:
    """Raises `ConfigError` for a schedule that does not exist."""
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"schedule {name!r} is not known: it is one of {', '.join(known)}{meant}")


def check_size(what: str, size: int) -> None:
    """Raises `LayoutError` unless there is one at least."""
    if size < 1:
        raise LayoutError(f"{size} {what}: a pipeline has at least 1; set 1 or more")


def check_stages_per_rank(name: str, given: int, required: int) -> None:
    """Raises `LayoutError` for a schedule whose number of stages a rank is not free."""
    if given != required:
        raise LayoutError(
            f"{name} with {given} stages per rank: it places exactly {required} on each; set {required}, or choose "
            f"Interleaved1F1B, which takes any number"
        )


def round_size(microbatches: int, ranks: int) -> int:
    """How many microbatches go through a stage before the next stage's turn: `ranks`, or a little more."""
    return microbatches // max(1, microbatches // ranks)


def fits_rounds(microbatches: int, ranks: int) -> bool:
    """Whether the microbatches fall into floor(microbatches / ranks) equal rounds."""
    return microbatches % max(1, microbatches // ranks) == 0


def check_rounds(name: str, microbatches: int, ranks: int) -> None:
    """Raises `LayoutError` unless `fits_rounds`; every multiple of `ranks` and every number below 2 ranks does."""
    if not fits_rounds(microbatches, ranks):
        near = _nearest(microbatches, lambda number: fits_rounds(number, ranks))
        raise LayoutError(
            f"{name} with {microbatches} microbatches on {ranks} ranks: they go in {microbatches // ranks} equal "
            f"rounds, which does not divide {microbatches}; nearest: {near}"
        )


def check_enough(name: str, microbatches: int, ranks: int) -> None:
    """Raises `LayoutError` unless there are as many microbatches as stages of a V."""
    if microbatches < 2 * ranks:
        raise LayoutError(
            f"{name} with {microbatches} microbatches on {ranks} ranks: its two stages a rank need at least "
            f"{2 * ranks}; set {2 * ranks} or more, or choose ZBVZeroBubble, which takes any number"
        )


def _nearest(size: int, works: Callable[[int], bool]) -> str:
    below = next((n for n in range(size - 1, 0, -1) if works(n)), None)
    above = next(n for n in range(size + 1, 2 * size + 2) if works(n))
    return f"{above}" if below is None else f"{below} or {above}"


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
        return round_size(self.microbatches, self.ranks)


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
    phases = table.zero_bubble_v(rank, ranks=sizes.ranks, microbatches=whole)
    row = table.played(phases, _of_v(rank, sizes))
    return tuple(action for action in row if action.microbatch < sizes.microbatches)


def _dual_pipe_v(rank: int, sizes: Sizes) -> Row:
    phases = table.dual_pipe_v(rank, ranks=sizes.ranks, microbatches=sizes.microbatches)
    return table.played(phases, _of_v(rank, sizes))


def _of_v(rank: int, sizes: Sizes) -> tuple[int, int]:
    return rank, 2 * sizes.ranks - 1 - rank


@dataclass(frozen=True)
class RowMaker:
    """How rows are made, and what sizes allow it. `stages_per_rank` 0: any number, 2 unless given."""

    row: Callable[[int, Sizes], Row]
    stages_per_rank: int
    rounds: bool = False
    enough: bool = False
    v: bool = False
    flushes: bool = True


_SCHEDULES = MappingProxyType(
    {
        "GPipe": RowMaker(_gpipe, 1),
        "1F1B": RowMaker(lambda rank, sizes: _one_by_one(rank, sizes, ahead=1), 1),
        "Interleaved1F1B": RowMaker(lambda rank, sizes: _interleaved(rank, sizes, ahead=2), 0, rounds=True),
        "LoopedBFS": RowMaker(_looped_bfs, 0),
        "InterleavedZeroBubble": RowMaker(
            lambda rank, sizes: _interleaved(rank, sizes, ahead=1, lag=rank), 0, rounds=True
        ),
        "ZBVZeroBubble": RowMaker(_zero_bubble_v, 2, v=True),
        "DualPipeV": RowMaker(_dual_pipe_v, 2, enough=True, v=True),
        "ZB-H1": RowMaker(lambda rank, sizes: _one_by_one(rank, sizes, ahead=1, lag=rank), 1),
        "ZB-H2": RowMaker(lambda rank, sizes: _one_by_one(rank, sizes, ahead=2, lag=2 * rank), 1),
        "PipeDream": RowMaker(lambda rank, sizes: _one_by_one(rank, sizes, ahead=1), 1, flushes=False),
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
    check_name(name, NAMES)
    required = _SCHEDULES[name].stages_per_rank
    if given is None:
        return required or 2
    check_size("stages per rank", given)
    if required:
        check_stages_per_rank(name, given, required)
    return given


def build(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> ScheduleTable:
    """The schedule `name` of these sizes.

    Raises:
        ConfigError: there is no such schedule.
        LayoutError: it does not take these sizes; the message names the number and the nearest that work.
    """
    per_rank = stages_per_rank_of(name, stages_per_rank)
    schedule = _SCHEDULES[name]
    check_size("ranks", ranks)
    check_size("microbatches", microbatches)
    if schedule.rounds:
        check_rounds(name, microbatches, ranks)
    if schedule.enough:
        check_enough(name, microbatches, ranks)
    sizes = Sizes(ranks, microbatches, per_rank)
    placement = v_shaped(ranks) if schedule.v else looped(ranks, per_rank)
    rows = tuple(schedule.row(rank, sizes) for rank in range(ranks))
    return ScheduleTable(name, ranks, ranks * per_rank, microbatches, placement, rows, flushes=schedule.flushes)
