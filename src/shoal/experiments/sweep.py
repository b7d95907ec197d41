"""`shoal sweep`: starts the trials of a sweep side by side, stops the worse early, and goes on where it was killed.

A trial that was stopped has a checkpoint. When others have come to its rung, and it is among the best there after all,
it resumes from it.

    sweeps/NAME/
      sweep.json              what was decided: {"trial-0003": {"stopped_at": 50, "rungs": {"50": 2.31}}}
      proposals.json          the configurations that a Bayesian search has proposed, in their order
      trial-0003/             the run directory of a trial, as `shoal train` writes it

How a trial ended is read from its own run directory, so a sweep that was killed loses nothing: trials that had finished
are not trained again, those that had not go on from their checkpoints. A trial that fails costs itself.

`via` is a command before each trial's own that starts it elsewhere, `srun --nodes=1 --ntasks=1`. It passes SIGTERM on.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.assembly.start import RANK
from shoal.errors import Stopped, UsageError
from shoal.experiments.search import ASHA, Bayes, Known, Range, SweepFile, Trial, goes_on, propose, rungs, trials
from shoal.experiments.trial_command import command_of, devices_of, overrides_of, require_trained_with
from shoal.files import read_json
from shoal.launcher import warm
from shoal.launcher.children import stop
from shoal.launcher.lock import RunLock, is_locked
from shoal.observe.events import Event, read_events, series
from shoal.observe.facts import read_facts, replace_file
from shoal.observe.sink import ending_in
from shoal.runfile.load import load_run

LOOK_S = 0.2
DECISIONS, PROPOSALS = "sweep.json", "proposals.json"
MOST_BYTES = 16 << 20
"""A trial takes some hundred bytes."""


class Decision(msgspec.Struct):
    """Of one trial: its value at each rung (null: not finite), and the rung at which it stands still."""

    rungs: dict[int, float | None] = {}
    stopped_at: int | None = None


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial went: "finished", "stopped early", "failed" or "not finished", its steps and its objective."""

    trial: Trial
    state: str
    step: int
    value: float | None
    seconds: float


@dataclass
class _Running:
    trial: Trial
    slot: int
    process: subprocess.Popen


@dataclass
class Sweep:
    """A sweep in its folder; `say` is told what happens."""

    file: SweepFile
    run_file: Path
    directory: Path
    say: Callable[[str], None]
    decisions: dict[str, Decision] = field(default_factory=dict)
    via: Sequence[str] = ()
    _proposed: list[dict[str, Any]] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)

    def run(self, environ: Mapping[str, str] = os.environ) -> list[TrialOutcome]:
        """Trains what is not finished; every trial's outcome.

        Raises `UsageError` where the objective is not measured, and where a trial that is over had other keys.
        """
        steps = {trial.name: self._checked(trial) for trial in trials(self.file)}
        with RunLock(self.directory):
            self._restore()
            all_trials = trials(self.file, self._proposed)
            waiting = [trial for trial in all_trials if self.outcome(trial).state in ("not finished", "failed")]
            for trial in all_trials:
                if trial not in waiting:
                    overrides = overrides_of(trial, self.directory)
                    require_trained_with(self.run_file, overrides, self.directory / trial.name)
            free = list(range(self.file.parallel))
            if not self.via and (len(waiting) > 1 or self._has_more()):
                environ = warm.preload(RANK, environ)
            try:
                while waiting or self._running or self._promoted(all_trials) is not None or self._has_more():
                    if free and not waiting and self._has_more():
                        waiting = self._propose(all_trials, steps)
                        all_trials += waiting
                    while free and (trial := self._promoted(all_trials)) is not None:
                        self._let_go_on(trial)
                        self._start(trial, free.pop(0), environ)
                    while free and (trial := self._next(waiting)) is not None:
                        waiting.remove(trial)
                        if self.outcome(trial).state in ("not finished", "failed"):
                            self._start(trial, free.pop(0), environ)
                    free += self._reap()
                    for one in self._running:
                        self._judge(one, steps[one.trial.name])
                    time.sleep(LOOK_S)
            except KeyboardInterrupt:
                raise Stopped(
                    f"interrupted: what was trained is in {self.directory}, and the same command resumes from there"
                ) from None
            finally:
                self._end_all()
        return [self.outcome(trial) for trial in all_trials]

    def outcome(self, trial: Trial) -> TrialOutcome:
        """Read from the trial's run directory and from what was decided of it."""
        folder = self.directory / trial.name
        events = read_events(folder)
        values = series(events, self.file.objective)[1]
        ending = ending_in(read_facts(folder))
        decision = self.decisions.get(trial.name, Decision())
        if decision.stopped_at is not None:
            state = "stopped early"
        elif ending is None or ending.state == "stopped":
            state = "not finished"
        else:
            state = "finished" if ending.state == "finished" else "failed"
        value = values[-1] if values and math.isfinite(values[-1]) else None
        seconds = sum(value for value in series(events, "time/step")[1] if math.isfinite(value))
        return TrialOutcome(trial, state, _last_step(events), value, seconds)

    def _has_more(self) -> bool:
        """Whether configurations are left to propose."""
        return isinstance(self.file.search, Bayes) and len(self._proposed) < self.file.search.trials

    def _propose(self, all_trials: Sequence[Trial], steps: dict[str, int]) -> list[Trial]:
        """The trials of the next configuration, which is checked and written down before any of them starts; their
        steps go to `steps`."""
        outcomes: dict[int, list[TrialOutcome]] = {}
        for trial in all_trials:
            outcomes.setdefault(trial.configuration, []).append(self.outcome(trial))
        running = {one.trial.configuration for one in self._running}
        known = [
            _known(parameters, outcomes[index], runs=index in running)
            for index, parameters in enumerate(self._proposed)
        ]
        proposed = [*self._proposed, propose(self.file, known)]
        found = trials(self.file, proposed)[-len(self.file.seeds) :]
        steps |= {trial.name: self._checked(trial) for trial in found}
        self._proposed = proposed
        replace_file(self.directory / PROPOSALS, msgspec.json.encode(proposed))
        return found

    def _next(self, waiting: Sequence[Trial]) -> Trial | None:
        """The next trial whose directory is free: one that a killed sweep left running is not started twice."""
        return next((trial for trial in waiting if not is_locked(self.directory / trial.name)), None)

    def _promoted(self, all_trials: Sequence[Trial]) -> Trial | None:
        """A stopped trial that is among the best of its rung by now, of the highest rung that has one."""
        if not isinstance(self.file.search, ASHA):
            return None
        running = {one.trial.name for one in self._running}
        stopped = [(d.stopped_at, t) for t in all_trials if (d := self.decisions.get(t.name)) and t.name not in running]
        for rung, trial in sorted(((r, t) for r, t in stopped if r is not None), key=lambda pair: -pair[0]):
            value = self.decisions[trial.name].rungs.get(rung)
            if value is not None and self._is_among_best(value, rung, trial):
                return None if is_locked(self.directory / trial.name) else trial
        return None

    def _let_go_on(self, trial: Trial) -> None:
        decision = self.decisions[trial.name]
        self.say(f"{trial.name} goes on: by now it is among the best at step {decision.stopped_at:,}")
        decision.stopped_at = None
        self._save()

    def _is_among_best(self, value: float, rung: int, trial: Trial) -> bool:
        assert isinstance(self.file.search, ASHA), "only its trials are judged"
        seen, minimize = self._seen(rung, trial.seed), self.file.goal == "minimize"
        return goes_on(value, seen, factor=self.file.search.factor, minimize=minimize)

    def _checked(self, trial: Trial) -> int:
        """The steps of a trial; a key of the run file that is wrong is refused before any trial starts."""
        return load_run(self.run_file, overrides_of(trial, self.directory)).run.steps

    def _start(self, trial: Trial, slot: int, environ: Mapping[str, str]) -> None:
        folder = self.directory / trial.name
        folder.mkdir(parents=True, exist_ok=True)
        command = command_of(trial, self.run_file, self.directory, via=self.via)
        with (folder / "output.txt").open("ab") as output:
            process = warm.start(
                command, stdout=output, stderr=subprocess.STDOUT,
                env={**environ, **({} if self.via else devices_of(slot, self.file.parallel, environ))},
            )  # fmt: skip
        self._running.append(_Running(trial, slot, process))
        chosen = ", ".join(f"{key} = {value}" for key, value in trial.parameters.items())
        self.say(f"{trial.name} starts: {chosen}, seed {trial.seed}")

    def _reap(self) -> list[int]:
        """The slots of the trials that have ended."""
        ended = [one for one in self._running if one.process.poll() is not None]
        self._running = [one for one in self._running if one.process.poll() is None]
        for one in ended:
            self._keep_finished(one.trial)
            found = self.outcome(one.trial)
            measured = series(read_events(self.directory / one.trial.name), self.file.objective)[0]
            if found.state == "finished" and not measured:
                raise UsageError(
                    f"objective = {self.file.objective!r} was not measured by {one.trial.name}: name a measurement "
                    "that its events hold, such as loss/train, or loss/eval with held-out data"
                )
            if found.state in ("failed", "not finished"):
                code = one.process.returncode
                output = self.directory / one.trial.name / "output.txt"
                self.say(
                    f"{one.trial.name} failed with exit code {code if code >= 0 else 128 - code}; {output} says why, "
                    "and the sweep goes on"
                )
            else:
                shown = "no value" if found.value is None else f"{self.file.objective} {found.value:.6g}"
                self.say(f"{one.trial.name} {found.state} at step {found.step:,}: {shown}")
        return [one.slot for one in ended]

    def _keep_finished(self, trial: Trial) -> None:
        """A trial that took its last step before it heard that it should stop has finished."""
        decision, ending = self.decisions.get(trial.name), ending_in(read_facts(self.directory / trial.name))
        if decision is not None and decision.stopped_at is not None and ending and ending.state == "finished":
            decision.stopped_at = None
            self._save()

    def _judge(self, one: _Running, steps: int) -> None:
        """Stops a trial at a rung where it is not among the best, with a checkpoint."""
        search = self.file.search
        decision = self.decisions.setdefault(one.trial.name, Decision(rungs={}))
        if not isinstance(search, ASHA) or decision.stopped_at is not None:
            return
        events = read_events(self.directory / one.trial.name)
        for rung in rungs(search, steps):
            if rung in decision.rungs or not is_recorded(events, self.file.objective, rung):
                continue
            value = self._value_at(events, rung, one.trial)
            decision.rungs[rung] = value if math.isfinite(value) else None
            if not self._is_among_best(value, rung, one.trial):
                decision.stopped_at = rung
                one.process.send_signal(signal.SIGTERM)
            self._save()
            if decision.stopped_at is not None:
                return

    def _value_at(self, events: Sequence[Event], rung: int, trial: Trial) -> float:
        known = [value for step, value in zip(*series(events, self.file.objective), strict=True) if step <= rung]
        if not known:
            raise UsageError(
                f"objective = {self.file.objective!r} was not measured by {trial.name} in its first {rung} steps, "
                "where it is judged: measure it as often (observe.evaluate_every_steps), or raise search.first_steps"
            )
        return known[-1]

    def _seen(self, rung: int, seed: int) -> list[float]:
        """The values at a rung of all trials of a seed."""
        same_seed = {trial.name for trial in trials(self.file) if trial.seed == seed}
        found = (one.rungs[rung] for name, one in self.decisions.items() if name in same_seed and rung in one.rungs)
        return [math.nan if value is None else value for value in found]

    def _restore(self) -> None:
        decisions = read_state(self.directory / DECISIONS, dict[str, Decision], "stopped trials are trained on")
        self.decisions = decisions if decisions is not None else self.decisions
        proposed = read_state(self.directory / PROPOSALS, list[dict[str, Any]], "the search begins anew")
        if proposed and not all(self._may_propose(one) for one in proposed):
            raise UsageError(
                f"{self.directory / PROPOSALS} has other parameters, or other values of them, than the sweep file: "
                "give the sweep another name, or remove its folder"
            )
        self._proposed = proposed or []

    def _may_propose(self, parameters: Mapping[str, Any]) -> bool:
        """Whether the sweep file has these parameters and values."""
        space = self.file.parameters
        return set(parameters) == set(space) and all(
            values.holds(parameters[key]) if isinstance(values, Range) else parameters[key] in values
            for key, values in space.items()
        )

    def _save(self) -> None:
        replace_file(self.directory / DECISIONS, msgspec.json.encode(self.decisions))

    def _end_all(self) -> None:
        """Asks the trials that still run to save and stop."""
        stop([one.process for one in self._running])


def _known(parameters: Mapping[str, Any], outcomes: Sequence[TrialOutcome], *, runs: bool) -> Known:
    """A configuration by the mean of its seeds that have finished."""
    values = [one.value for one in outcomes if one.state == "finished" and one.value is not None]
    if runs or (len(values) < len(outcomes) and any(one.state == "not finished" for one in outcomes)):
        return Known(parameters)
    return Known(parameters, statistics.fmean(values)) if values else Known(parameters, failed=True)


def read_state(path: Path, kind: Any, without: str) -> Any:
    """What a file of the sweep holds, None where it is not there. Raises `UsageError` where it is damaged."""
    if not path.exists():
        return None
    return read_json(path, kind, limit_bytes=MOST_BYTES, error=UsageError, repair=f"remove it, and {without}")


def is_recorded(events: Sequence[Event], objective: str, rung: int) -> bool:
    """Whether the newest value of the objective up to step `rung` is known: it stands at this step, or a later step is
    recorded. An evaluation after a step is recorded behind it, and may take long.
    """
    return _last_step(events) > rung or rung in series(events, objective)[0]


def _last_step(events: Sequence[Event]) -> int:
    return events[-1].step if events else 0
