"""One rehearsed run: `shoal train` in a directory of its own, struck as a scenario says, and started until it ends.

What is measured, with the clock of this host:

    noticed     from the strike to the first sentence about it, or to the end of the process
    recovered   from the strike to the end of the first step that was begun after the notice; of a network fault, to the
                end of the first step at all
    lost        steps that were taken again
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shoal.checkpoint.commit import checkpoints, newest_verified, read_manifest
from shoal.checkpoint.objects import Places
from shoal.errors import ConfigError, Diverged, UsageError
from shoal.experiments.rehearsal.faults import Relay, end_fill, fill, relay, small_disk
from shoal.experiments.rehearsal.scenarios import FULL_BYTES, GOING_S, STOPPED_S, Scenario
from shoal.experiments.rehearsal.two_hosts import CoordinatorProcess, Started, on_two_hosts
from shoal.launcher.children import THROWN_AWAY_S, stop
from shoal.launcher.own_script import KEYS
from shoal.observe.events import Event, attempts, read_events
from shoal.resilience.config import ElasticConfig
from shoal.resilience.faults import REHEARSAL, Strike, say_acted, strikes, write_faults

MOST_STARTS = 6
"""Starts of one run; a scenario strikes twice at most, and one start more is damaged by a rank that died late."""
POLL_S = 0.02
LEFT_S = 30.0
"""How long another host of an elastic run that is finished may take to see that it is."""
NO_RESTART = (UsageError.exit_code, ConfigError.exit_code, Diverged.exit_code)


@dataclass(frozen=True)
class Setup:
    """What all trials of a rehearsal share. `keys` are overrides of the run file, of `ranks` ranks. `arguments` are
    those of `file`, if it is a script; None: it is a run file.
    """

    file: Path
    keys: Sequence[str]
    folder: Path
    environ: Mapping[str, str]
    limit_s: float
    ranks: int = 1
    elastic: ElasticConfig | None = None
    arguments: Sequence[str] | None = None

    def command(self, keys: Sequence[str]) -> list[str]:
        """What a Python is given to train with `keys`."""
        if self.arguments is not None:
            return [str(self.file), *self.arguments]
        return ["-m", "shoal", "train", str(self.file), *self.keys, *keys]

    def variables(self, keys: Sequence[str]) -> dict[str, str]:
        """What a script is told of them."""
        return {} if self.arguments is None else {KEYS: json.dumps([*self.keys, *keys])}


@dataclass
class Line:
    """A line that a run has printed."""

    time_s: float
    text: str
    is_error: bool


@dataclass
class FaultTrial:
    """How a scenario went. `codes` are the exit codes of its starts; None: it was killed for being too slow. `missed`:
    the network had nothing that its fault could strike.
    """

    directory: Path
    scenario: Scenario
    codes: list[int | None] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    struck: list[Strike] = field(default_factory=list)
    damaged: str = ""
    damaged_s: float | None = None
    missed: bool = False

    @property
    def finished(self) -> bool:
        return bool(self.codes) and self.codes[-1] == 0

    @property
    def first_strike_s(self) -> float | None:
        """Unix time of the damage to a file, or of the first fault."""
        if self.damaged_s is not None:
            return self.damaged_s
        return self.struck[0].time_s if self.struck else None

    @property
    def noticed(self) -> Line | None:
        """What first told of the strike: a sentence, or the end of the process."""
        since_s = self.first_strike_s
        if since_s is None:
            return None
        said = (line for line in self.lines if line.time_s >= since_s and _tells(line))
        first = next(said, None)
        end_s = next((end for end in self.ends_s if end >= since_s), None)
        if first is None and end_s is not None and self.codes[0] != 0 and self.damaged_s is None:
            return Line(end_s, "", is_error=True)
        return first

    def recovered_s(self) -> float | None:
        """Unix time at which the run had taken a step again."""
        noticed, since_s = self.noticed, self.first_strike_s
        if since_s is not None and self.scenario.network is not None:  # the side that goes on may be the faster one
            return next((one.time_s for one in self.events() if one.time_s > since_s and _is_step(one)), None)
        if noticed is None:
            return None
        return next((event.time_s for event in self.events() if _step_start_s(event) >= noticed.time_s), None)

    def lost_steps(self) -> int:
        return sum(attempt.repeated_steps for attempt in attempts(self.events()))

    def events(self) -> list[Event]:
        return read_events(self.directory)


def _step_start_s(event: Event) -> float:
    """Unix time at which the step of `event` began; long ago for a line that is of no step."""
    return event.time_s - (event.get("time/step") or 0.0) if _is_step(event) else 0.0


def _is_step(event: Event) -> bool:
    return "loss/train" in event.values


def _tells(line: Line) -> bool:
    """Whether a line tells of trouble: all that is on standard error, and warnings."""
    return bool(line.text.strip()) and (line.is_error or line.text.startswith("warning:"))


def play(setup: Setup, scenario: Scenario) -> FaultTrial:
    """Plays `scenario` to its end."""
    trial = FaultTrial(setup.folder / scenario.slug, scenario)
    record = setup.folder / f"{scenario.slug}.faults"
    write_faults(list(scenario.faults), record)
    environ = {**setup.environ, REHEARSAL: str(record)} if scenario.faults else dict(setup.environ)
    keys = [
        f'run.directory="{trial.directory}"',
        f"run.steps={scenario.steps}",
        f"checkpoint.every_steps={scenario.save_every}",
        f"checkpoint.keep={scenario.keep}",
    ]
    train, environ = setup.command(keys), environ | setup.variables(keys)
    with ExitStack() as stack:
        joined, coordinator, commands = None, None, [Started([sys.executable, *train], environ)]
        if scenario.fills:
            stack.enter_context(small_disk(trial.directory, FULL_BYTES))
        if scenario.restarts_coordinator and setup.elastic is not None:
            folder = setup.folder / f"{scenario.slug}.coordinator"
            coordinator = stack.enter_context(CoordinatorProcess(setup.elastic, folder, environ))
            commands = [coordinator.command(train)]
        if scenario.network is not None:
            joined = stack.enter_context(relay())
            hosts = on_two_hosts(
                joined,
                train,
                ranks=setup.ranks,
                elastic=setup.elastic,
                folder=setup.folder / f"{scenario.slug}.hosts",
                environ=environ,
            )
            commands = stack.enter_context(hosts)
        while len(trial.codes) < MOST_STARTS:
            disturbed = None
            if scenario.faults:
                disturbed = Disturbance(scenario, record, trial.directory, joined=joined, coordinator=coordinator)
            any_may_finish = setup.elastic is not None
            trial.codes.append(_start(commands, trial, disturbed, any_may_finish=any_may_finish, limit_s=setup.limit_s))
            trial.ends_s.append(time.time())
            trial.missed = joined is not None and not joined.struck
            if trial.codes[-1] in (0, None, *NO_RESTART):
                break
            if scenario.damages and not trial.damaged:
                trial.damaged, trial.damaged_s = damage(trial.directory, scenario.damages), time.time()
    trial.struck = strikes(record)
    return trial


class Disturbance:
    """What a scenario does from outside once a fault of its `record` has struck in this start."""

    def __init__(
        self,
        scenario: Scenario,
        record: Path,
        directory: Path,
        *,
        joined: Relay | None,
        coordinator: CoordinatorProcess | None,
    ) -> None:
        self._scenario, self._record, self._relay = scenario, record, joined
        self._directory, self._coordinator = directory, coordinator
        self._before = len(strikes(record))
        self._struck_s: float | None = None
        self._stopped: int | None = None

    def act(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        """What is due now; called again and again until all processes have ended."""
        if self._struck_s is None:
            found = strikes(self._record)
            if len(found) == self._before:
                return
            self._struck_s = time.monotonic()
            if self._relay is not None and self._scenario.network is not None and self._before == 0:
                self._relay.begin(self._scenario.network)
            if self._coordinator is not None:
                self._coordinator.kill()
            if self._scenario.fills:
                fill(self._directory)
            say_acted(self._record)
        since_s = time.monotonic() - self._struck_s
        if self._scenario.grace_s is not None and since_s >= self._scenario.grace_s:
            for process in processes:
                _kill(process)
        if since_s >= self._scenario.lasts_s:
            self.end()
        if self._scenario.slows and self._before == 0:
            stands = since_s < self._scenario.lasts_s and since_s % (STOPPED_S + GOING_S) < STOPPED_S
            self._slow(strikes(self._record)[0].pid, stands=stands)

    def end(self) -> None:
        """The trouble is over, or the start is."""
        if self._relay is not None:
            self._relay.end()
        if self._coordinator is not None:
            self._coordinator.come_back()
        if self._scenario.fills:
            end_fill(self._directory)

    def _slow(self, pid: int, *, stands: bool) -> None:
        if stands != (self._stopped == pid):
            self._stopped = pid if stands else None
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stands else signal.SIGCONT)


def _start(
    commands: Sequence[Started],
    trial: FaultTrial,
    disturbed: Disturbance | None,
    *,
    any_may_finish: bool,
    limit_s: float,
) -> int | None:
    """One start on all hosts, to its end: its exit code, that of the first host that did not finish; None where it did
    not end in `limit_s`. `any_may_finish`: where one host has finished, the run has, and others have `LEFT_S`.
    """
    deadline_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        processes = [stack.enter_context(_process(one.command, one.environ, trial)) for one in commands]
        try:
            while any(process.poll() is None for process in processes):
                if disturbed is not None:
                    disturbed.act(processes)
                finished = any_may_finish and any(process.returncode == 0 for process in processes)
                if finished and len(processes) > 1:
                    deadline_s = min(deadline_s, time.monotonic() + LEFT_S)
                if time.monotonic() >= deadline_s:
                    return 0 if finished else None
                time.sleep(POLL_S)
        finally:
            if disturbed is not None:
                disturbed.end()
        codes = [process.returncode for process in processes]
        if any_may_finish and 0 in codes:
            return 0
        return next((code for code in codes if code), 0)


@contextmanager
def _process(command: Sequence[str], environ: Mapping[str, str], trial: FaultTrial) -> Iterator[subprocess.Popen[str]]:
    """The process of `command` in a group of its own, which ends with this block; its lines go to `trial`."""
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    streams = ((process.stdout, False), (process.stderr, True))
    readers = [threading.Thread(target=_read, args=(*stream, trial.lines), daemon=True) for stream in streams]
    for reader in readers:
        reader.start()
    try:
        yield process
    except KeyboardInterrupt:
        stop([process], patience_s=THROWN_AWAY_S)  # a launcher that is killed leaves its folder
        raise
    finally:
        _kill(process)
        process.wait()
        for reader in readers:
            reader.join(5.0)
        trial.lines.sort(key=lambda line: line.time_s)


def _read(stream: IO[str], is_error: bool, lines: list[Line]) -> None:
    for text in stream:
        lines.append(Line(time.time(), text.rstrip("\n"), is_error))


def _kill(process: subprocess.Popen[str]) -> None:
    """The launcher and its ranks, as a scheduler does at the end of the grace."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def damage(directory: Path, what: str) -> str:
    """Flips a bit in the middle of one file of the newest checkpoint of `directory`; the file's name, "" for none.

    `what`: "manifest", "latest", or "object": one that no other checkpoint names. "each": the manifest and all such
    objects, one after the other; "" where one of them goes unnoticed.
    """
    folders, places = checkpoints(directory), Places(directory)
    if not folders:
        return ""
    if what == "each":
        return _damage_each(directory, folders)
    path = places.latest if what == "latest" else folders[0] / "manifest.json"
    if what == "object":
        own = _own_objects(directory, folders)
        if not own:
            return ""
        path = own[0]
    _flip(path)
    return path.name


def _damage_each(directory: Path, folders: Sequence[Path]) -> str:
    newest = read_manifest(folders[0]).step
    files = [folders[0] / "manifest.json", *_own_objects(directory, folders)]
    for path in files:
        _flip(path)
        manifest, problems = newest_verified(directory)
        if (manifest is not None and manifest.step == newest) or not problems:
            return ""
        if path != files[-1]:
            _flip(path)
    return f"each of {len(files)} files"


def _own_objects(directory: Path, folders: Sequence[Path]) -> list[Path]:
    """The objects of the newest checkpoint that no other names."""
    older = {digest for folder in folders[1:] for digest in read_manifest(folder).objects}
    return [Places(directory).object(one) for one in read_manifest(folders[0]).objects if one not in older]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
