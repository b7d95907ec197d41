"""Who is slow, when, and in what: the parts of every rank's steps, as means over columns of neighbouring steps.

The excess of a rank in a part of the step is how much longer it takes than the median rank, as a share of the median
step:

    excess[rank, column, part] = (seconds - median over ranks of seconds) / median over ranks of the whole step

Memory does not grow with the run: when the steps outgrow the columns, each two neighbours become one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.observe.record import EVEN_SPREAD

PARTS = ("step", "data", "forward_backward", "sync_exposed", "optimizer", "checkpoint_stall")
WORK = (1, 2, 4)
"""The parts that are a rank's own work: the others wait for them."""
COLUMNS = 96
MAX_ROWS = 64
"""More ranks than these are shown in groups of neighbours, each by its largest excess."""
RECENT_COLUMNS = 4
NAMED = 8


class RankValues(msgspec.Struct, frozen=True):
    """What is read of a rank's line: the parts of its step in seconds, and its peak memory in bytes."""

    step: float | None = msgspec.field(name="time/step", default=None)
    data: float | None = msgspec.field(name="time/data", default=None)
    forward_backward: float | None = msgspec.field(name="time/forward_backward", default=None)
    sync_exposed: float | None = msgspec.field(name="time/sync_exposed", default=None)
    optimizer: float | None = msgspec.field(name="time/optimizer", default=None)
    checkpoint_stall: float | None = msgspec.field(name="time/checkpoint_stall", default=None)
    peak_bytes: float | None = msgspec.field(name="memory/peak_bytes", default=None)

    def seconds(self) -> tuple[float, ...]:
        """In the order of `PARTS`; what was not measured is zero."""
        return (self.step or 0.0, self.data or 0.0, self.forward_backward or 0.0, self.sync_exposed or 0.0,
                self.optimizer or 0.0, self.checkpoint_stall or 0.0)  # fmt: skip


class SlowRank(msgspec.Struct, frozen=True):
    """A rank whose own work takes longer than the median rank's now: by what share of it, in what part, since when."""

    rank: int
    excess: float
    part: str
    since_step: int


class HeatMap(msgspec.Struct, frozen=True):
    """`excess[part][row][column]`, null where a rank recorded nothing; "work" is the sum of a rank's own parts."""

    rows: list[str]
    last_steps: list[int]
    excess: dict[str, list[list[float | None]]]


class RankTimes:
    """Sums of the parts of all steps, by rank and column."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self.ranks: list[int] = []
        self.width = 1
        self._columns = columns
        self._row: dict[int, int] = {}
        self._sums = np.zeros((0, columns, len(PARTS)))
        self._counts = np.zeros((0, columns), dtype=np.int64)
        self.last_step = np.zeros(0, dtype=np.int64)
        self.last_time_s = np.zeros(0)
        self.peak_bytes = np.zeros(0)

    def add_ranks(self, ranks: Sequence[int]) -> None:
        """Makes room for ranks that are new."""
        new = [rank for rank in ranks if rank not in self._row]
        for rank in new:
            self._row[rank] = len(self.ranks)
            self.ranks.append(rank)
        more = len(new)
        self._sums = np.concatenate([self._sums, np.zeros((more, self._columns, len(PARTS)))])
        self._counts = np.concatenate([self._counts, np.zeros((more, self._columns), dtype=np.int64)])
        self.last_step = np.concatenate([self.last_step, np.zeros(more, dtype=np.int64)])
        self.last_time_s = np.concatenate([self.last_time_s, np.zeros(more)])
        self.peak_bytes = np.concatenate([self.peak_bytes, np.zeros(more)])

    def add(self, rank: int, steps: Sequence[int], seconds: Sequence[Sequence[float]]) -> None:
        """Steps of one rank in the order of its file, `seconds[i]` in the order of `PARTS`.

        A step that is not behind the one before it was computed again: it voids the columns from its own on.
        """
        row, begin = self._row[rank], 0
        for index, step in enumerate(steps):
            if step <= (steps[index - 1] if index else self.last_step[row]):
                self._sum(row, steps[begin:index], seconds[begin:index])
                self._void_from(row, step)
                begin = index
        self._sum(row, steps[begin:], seconds[begin:])
        if steps:
            self.last_step[row] = steps[-1]

    def heat_map(self) -> HeatMap | None:
        """The excess of every rank or group of ranks; None for fewer than two ranks."""
        if len(self.ranks) < 2:
            return None
        order = np.argsort(self.ranks)
        used = self._used()
        excess = self._excess()[order][:, :used]
        group = -(-len(self.ranks) // MAX_ROWS)
        starts = range(0, len(self.ranks), group)
        ranks = [self.ranks[index] for index in order]
        return HeatMap(
            rows=[_row_name(ranks[start : start + group]) for start in starts],
            last_steps=[min((column + 1) * self.width, int(self.last_step.max())) for column in range(used)],
            excess={
                name: [_cells(excess[start : start + group, :, index]) for start in starts]
                for index, name in enumerate(("work", *PARTS))
            },
        )

    def slow_ranks(self) -> list[SlowRank]:
        """Those whose work in the newest columns is over `EVEN_SPREAD` above the median rank's, the slowest first."""
        used = self._used()
        if len(self.ranks) < 2 or used == 0:
            return []
        means = self._means()[:, :used]
        work = means[:, :, list(WORK)].sum(axis=2)
        middle = _median(work)
        share = np.divide(work, middle, out=np.full_like(work, np.nan), where=middle > 0) - 1
        recent = slice(max(0, used - RECENT_COLUMNS), used)
        now = _mean(share[:, recent])
        found = [int(row) for row in np.argsort(-np.nan_to_num(now, nan=-1.0))[:NAMED] if now[row] >= EVEN_SPREAD]
        parts = _mean((means - _median(means))[:, recent])
        return [
            SlowRank(
                rank=self.ranks[row],
                excess=float(now[row]),
                part=PARTS[max(WORK, key=lambda part: float(np.nan_to_num(parts[row, part])))],
                since_step=self._since(share[row]),
            )
            for row in found
        ]

    def note(self, rank: int, *, time_s: float, peak_bytes: float) -> None:
        """When the rank wrote its newest line (Unix time), and the most memory that it held."""
        row = self._row[rank]
        self.last_time_s[row] = time_s
        self.peak_bytes[row] = max(self.peak_bytes[row], peak_bytes)

    def _sum(self, row: int, steps: Sequence[int], seconds: Sequence[Sequence[float]]) -> None:
        if not steps:
            return
        while (max(steps) - 1) // self.width >= self._columns:
            self._widen()
        columns = np.maximum(np.asarray(steps) - 1, 0) // self.width
        np.add.at(self._sums[row], columns, np.asarray(seconds))
        np.add.at(self._counts[row], columns, 1)

    def _void_from(self, row: int, step: int) -> None:
        column = min(max(0, step - 1) // self.width, self._columns)
        self._sums[row, column:] = 0.0
        self._counts[row, column:] = 0

    def _widen(self) -> None:
        half = -(-self._columns // 2)
        for name in ("_sums", "_counts"):
            old: NDArray = getattr(self, name)
            new = np.zeros_like(old)
            new[:, :half] += old[:, 0::2]
            new[:, : self._columns - half] += old[:, 1::2]
            setattr(self, name, new)
        self.width *= 2

    def _used(self) -> int:
        filled = np.flatnonzero(self._counts.any(axis=0))
        return int(filled[-1]) + 1 if len(filled) else 0

    def _means(self) -> NDArray:
        counts = self._counts[:, :, None]
        return np.divide(self._sums, counts, out=np.full_like(self._sums, np.nan), where=counts > 0)

    def _excess(self) -> NDArray:
        """[rank, column, 1 + part], the own work first."""
        means = self._means()
        with_work = np.concatenate([means[:, :, list(WORK)].sum(axis=2, keepdims=True), means], axis=2)
        step_s = _median(means[:, :, :1])
        return np.divide(with_work - _median(with_work), step_s, out=np.full_like(with_work, np.nan), where=step_s > 0)

    def _since(self, share: NDArray) -> int:
        """The first step of the stretch, up to the newest column, in which a rank was slow."""
        column = int(np.flatnonzero(~np.isnan(share))[-1])
        while column > 0 and not share[column - 1] < EVEN_SPREAD:
            column -= 1
        return column * self.width + 1


def _row_name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"


def _cells(excess: NDArray) -> list[float | None]:
    """The largest of a group of ranks, rounded to a hundredth."""
    filled = ~np.isnan(excess)
    largest = np.where(filled, excess, -np.inf).max(axis=0)
    return [round(float(value), 2) if np.isfinite(value) else None for value in largest]


def _median(values: NDArray) -> NDArray:
    """Over the ranks that have a value, of an even number the lower of the two in the middle, so that it is that of a
    rank, and of two ranks the faster one's; NaN in columns where none has.
    """
    ranks = (~np.isnan(values)).sum(axis=0, keepdims=True)
    return np.take_along_axis(np.sort(values, axis=0), np.maximum(ranks - 1, 0) // 2, axis=0)  # NaN is sorted last


def _mean(values: NDArray) -> NDArray:
    """Over the columns that have a value; NaN where none has."""
    counts = (~np.isnan(values)).sum(axis=1)
    return np.divide(np.nansum(values, axis=1), counts, out=np.full(counts.shape, np.nan), where=counts > 0)
