"""One run directory, followed: `poll` takes in what is new, `snapshot` says what the page shows of it.

Everything comes from files: events, logs, `facts.json` and `run.toml`. So it works while a run trains, after it, and
for a run of another machine whose directory can be seen from here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal.config.load import read as read_tables
from shoal.errors import ConfigError, UsageError
from shoal.files import meant
from shoal.launcher.lock import is_locked
from shoal.observe.events import Event, Tail, events_path
from shoal.observe.facts import facts_path, number_of, read_facts, text_of
from shoal.observe.goodput import Waterfall
from shoal.observe.sink import Ending, ending_in
from shoal.page.lead import CollectiveMean, ExpertMap, Lead, LinkMean
from shoal.page.notices import (
    LogWarnings,
    Notice,
    ending_notice,
    hang_notices,
    membership_notices,
    nonfinite_notice,
    silent_notices,
    slow_notices,
)
from shoal.page.rank_times import HeatMap, RankTimes, RankValues, SlowRank
from shoal.resilience.hang_verdict import FILE as HANG_FILE
from shoal.resilience.hang_verdict import read_verdict

CURVES = (
    "loss/train", "loss/eval", "accuracy/eval", "throughput/tokens_per_second", "throughput/samples_per_second",
    "memory/peak_bytes", "lr", "grad/norm", "time/step", "wire/bytes_sent", "wire/inside_bytes", "wire/between_bytes",
    "moe/load_max_over_mean", "moe/dropped_share", "codec/error", "noise/scale", "scaling/speed_up",
    "sparsity/density", "freeze/share", "memory/to_device_bytes", "memory/to_host_bytes", "memory/exposed_s",
)  # fmt: skip
POLL_BYTES = 64 << 20
"""Read in one poll, over all ranks; what is left follows in the next."""
_EVENTS = re.compile(r"rank-(\d{1,9})\.jsonl")
_LOG = re.compile(r"rank-\d{1,9}\.log")
_LOADS = b'"moe/load/'


class RankLine(msgspec.Struct, frozen=True):
    """A line of any rank, as far as it is read."""

    step: int
    time_s: float = msgspec.field(name="time")
    values: RankValues = RankValues()


class RunSnapshot(msgspec.Struct, frozen=True):
    """What the page shows of a run. Curves are (last step, mean, lowest, highest) of neighbouring steps; null: NaN."""

    name: str
    directory: str
    state: str
    step: int
    total_steps: int | None
    ranks: int
    attempts: int
    updated_s: float
    left_s: float | None
    loss_unit: str
    baseline: tuple[str, float] | None
    last: dict[str, float]
    peak_bytes: float
    peak_rank: int | None
    curves: dict[str, list[tuple[int, float | None, float | None, float | None]]]
    curve_width: dict[str, int]
    restarts: list[int]
    waterfall: Waterfall | None
    collectives: list[CollectiveMean]
    links: list[LinkMean]
    heat: HeatMap | None
    slow: list[SlowRank]
    experts: list[ExpertMap]
    notices: list[Notice]
    unread_bytes: int


class LiveRun:
    """A run directory that is followed from its first byte."""

    def __init__(self, directory: Path, *, begun: bool = True, clock: Callable[[], float] = time.time) -> None:
        """Raises `UsageError` where there is nothing of a run that has `begun`."""
        if begun and not (
            facts_path(directory).exists() or any((directory / name).exists() for name in ("events", "run.toml"))
        ):
            found = "holds no run" if directory.is_dir() else "is a file" if directory.exists() else "is not there"
            raise UsageError(
                f"{directory} {found}{meant(directory)}: a page needs its events/, facts.json or run.toml; "
                "name the directory that 'shoal train' writes, such as runs/NAME"
            )
        self.directory = directory
        self.settings: dict[str, Any] = {}
        self.lead = Lead()
        self.times = RankTimes()
        self._clock = clock
        self._tails: dict[int, Tail] = {}
        self._logs = LogWarnings()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._facts: dict[str, Any] = {}
        self._locked = False
        self.unread_bytes = 0
        """Of the events, left for the next poll."""
        self._lead_line = msgspec.json.Decoder(Event).decode
        self._rank_line = msgspec.json.Decoder(RankLine).decode

    def poll(self, *, most_bytes: int = POLL_BYTES) -> bool:
        """Takes in what is new, up to about `most_bytes` of events; whether there was anything."""
        before = (self._locked, self.unread_bytes)
        self._locked = is_locked(self.directory)
        changed = self._read_settings() | self._read_facts() | self._read_logs() | self._read_events(most_bytes)
        changed |= self._is_new(self.directory / HANG_FILE)
        return changed or before != (self._locked, self.unread_bytes)

    def snapshot(self) -> RunSnapshot:
        """What is known now."""
        lead, times, ending = self.lead, self.times, ending_in(self._facts)
        total, state = self._total_steps(), self._state(ending)
        running = state == "running"
        hang = read_verdict(self.directory, since_s=lead.last_time_s) if state in ("running", "failed") else None
        said = [*([hang.sentence] if hang else []), *([ending.cause] if ending and ending.cause else [])]
        step_s = lead.last.get("time/step") or 0.0
        slow = times.slow_ranks()
        world = self._world()
        quiet = silent_notices(times, world=world, now_s=self._clock(), step_s=step_s) if running else []
        fullest = int(times.peak_bytes.argmax()) if times.peak_bytes.any() else None
        return RunSnapshot(
            name=text_of(self._run_table().get("name")) or self.directory.resolve().name,
            directory=str(self.directory),
            state=state,
            step=lead.last_step,
            total_steps=total,
            ranks=sum(rank < world for rank in times.ranks),
            attempts=max(1, lead.attempts - self._changes()) if lead.attempts else 0,
            updated_s=lead.last_time_s,
            left_s=self._left_s(total) if running and hang is None else None,
            loss_unit=text_of(self._facts.get("loss_unit")),
            baseline=self._baseline(),
            last=lead.last,
            peak_bytes=0.0 if fullest is None else float(times.peak_bytes[fullest]),
            peak_rank=None if fullest is None else times.ranks[fullest],
            curves={name: lead.series[name].points() for name in CURVES if name in lead.series},
            curve_width={name: lead.series[name].width for name in CURVES if name in lead.series},
            restarts=lead.restarts,
            waterfall=lead.waterfall(),
            collectives=lead.collectives(),
            links=lead.links(),
            heat=times.heat_map(),
            slow=slow,
            experts=lead.experts.maps(),
            notices=[
                *ending_notice(ending, state=state),
                *hang_notices(hang),
                *quiet,
                *membership_notices(self._facts),
                *slow_notices(slow),
                *nonfinite_notice(lead.nonfinite_steps),
                *(line for line in self._logs.notices() if not any(one in line.text for one in said)),
            ],
            unread_bytes=self.unread_bytes,
        )

    def _read_events(self, most_bytes: int) -> bool:
        sizes = {
            int(match[1]): size
            for name, size in _sizes(self.directory / "events")
            if (match := _EVENTS.fullmatch(name))
        }
        self.times.add_ranks(sorted(sizes))
        changed, left = False, most_bytes
        self.unread_bytes = 0
        for rank, size in sorted(sizes.items()):
            tail = self._tails.setdefault(rank, Tail(events_path(self.directory, rank)))
            if tail.offset == size:
                continue
            before = tail.offset
            self._read_rank(rank, tail, left)
            changed = True
            left = max(0, left - abs(tail.offset - before))
            self.unread_bytes += max(0, size - tail.offset)
        return changed

    def _read_rank(self, rank: int, tail: Tail, most_bytes: int) -> None:
        is_lead = rank == min(self.times.ranks)
        steps: list[int] = []
        seconds: list[tuple[float, ...]] = []
        last_s = peak_bytes = 0.0
        for line in tail.lines(most_bytes=most_bytes):
            try:
                event = self._rank_line(line)
                if is_lead:
                    self.lead.add(self._lead_line(line))
                elif _LOADS in line:
                    self.lead.experts.add(self._lead_line(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            last_s, peak_bytes = event.time_s, max(peak_bytes, event.values.peak_bytes or 0.0)
            if event.values.step is not None:
                steps.append(event.step)
                seconds.append(event.values.seconds())
        if last_s:
            self.times.add(rank, steps, seconds)
            self.times.note(rank, time_s=last_s, peak_bytes=peak_bytes)

    def _read_logs(self) -> bool:
        folder = self.directory / "logs"
        logs = [(folder / name, size) for name, size in _sizes(folder) if _LOG.fullmatch(name)]
        read = [self._logs.read(path, size) for path, size in sorted(logs)]
        return any(read)

    def _read_facts(self) -> bool:
        if not self._is_new(facts_path(self.directory)):
            return False
        try:
            self._facts = read_facts(self.directory)
        except (UsageError, OSError):
            return False
        return True

    def _read_settings(self) -> bool:
        path = self.directory / "run.toml"
        if not self._is_new(path):
            return False
        try:
            self.settings = read_tables(path)
        except ConfigError:
            return False
        return True

    def _is_new(self, path: Path) -> bool:
        """Whether a file has changed since the last call."""
        try:
            stat = path.stat()
        except OSError:
            return False
        stamp = (stat.st_mtime_ns, stat.st_size)
        changed = self._stamps.get(path.name) != stamp
        self._stamps[path.name] = stamp
        return changed

    def _run_table(self) -> dict[str, Any]:
        table = self.settings.get("run")
        return table if isinstance(table, dict) else {}

    def _world(self) -> int:
        """The ranks that the newest start, or change of the membership, has left."""
        found = number_of(self._facts.get("world"))
        return 1 + max(self.times.ranks, default=0) if found is None else int(found)

    def _changes(self) -> int:
        """Of the membership of an elastic run, which goes on through them without another start."""
        listed = self._facts.get("membership")
        return max(0, len(listed) - 1) if isinstance(listed, list) else 0

    def _total_steps(self) -> int | None:
        total = self._run_table().get("steps")
        return total if isinstance(total, int) and total > 0 else None

    def _state(self, ending: Ending | None) -> str:
        if ending is not None:
            return ending.state
        total = self._total_steps()
        if total is not None and self.lead.last_step >= total and not self._locked:
            return "finished"
        return "running" if self._locked else "killed"

    def _left_s(self, total: int | None) -> float | None:
        pace = self.lead.series.get("time/step")
        if total is None or pace is None or not pace.count():
            return None
        return max(0, total - self.lead.last_step) * pace.total() / pace.count()

    def _baseline(self) -> tuple[str, float] | None:
        found = self._facts.get("baseline")
        if not isinstance(found, dict) or not isinstance(found.get("loss"), int | float):
            return None
        return text_of(found.get("name")) or "baseline", float(found["loss"])


def _sizes(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of the files of a folder; [] where there is none."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.stat().st_size) for entry in entries if entry.is_file()]
    except OSError:
        return []
