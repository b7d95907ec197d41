"""What a run directory says of its run, read once and without trust: files may be missing, torn or somebody else's."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import units
from shoal.config.load import FILE_LIMIT_BYTES, parse
from shoal.errors import UsageError
from shoal.files import read_file
from shoal.launch.lock import is_locked
from shoal.observe.ending import Ending, ending_in
from shoal.observe.events import Event, scan_events
from shoal.observe.expert_loads import LayerLoads, layer_loads
from shoal.observe.facts import facts_path, read_facts
from shoal.observe.timing import RankTime, rank_time

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
            f"{run_directory} {found}: a report needs its events/, facts.json or run.toml; "
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
