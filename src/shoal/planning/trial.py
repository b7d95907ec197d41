"""The plans that are predicted to be fastest, each tried for some steps: which of them is, on this machine.

Plans that are predicted within some percent of each other can only be told apart by running them. A trial is a short
`shoal train` by the plan, alone on the machine, in a folder that is thrown away. The plans take turns, there and back,
so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import msgspec

from shoal.assembly.user_code import GIVEN
from shoal.checkpoint.config import CheckpointConfig
from shoal.config.load import dumps
from shoal.errors import EnvironmentFault, UsageError
from shoal.launcher import warm
from shoal.launcher.children import THROWN_AWAY_S, stop
from shoal.launcher.devices import gpus
from shoal.launcher.orphans import arm_before_exec
from shoal.launcher.own_script import TRIAL, TRIAL_OF, own_command
from shoal.observe.config import ObserveConfig
from shoal.observe.events import read_events
from shoal.observe.terminal import ProgressBar
from shoal.planner.predict.predictor import Prediction
from shoal.planning.mixtures import with_values
from shoal.planning.plan_file import run_file_of
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile, run_directory
from shoal.topology.cluster import Cluster

WARM_UP, STEPS, TURNS = 3, 10, 2
MOST_TEXT = 4000
"""Characters of what a failed run said that are kept: the end."""


@dataclass(frozen=True, kw_only=True)
class PlanTrial:
    """A plan, and the median second of its steps; None where it did not run, for the reason in `failure`."""

    prediction: Prediction
    measured_s: float | None = None
    failure: str = ""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        predicted = self.prediction.record()
        return {"measured_s": self.measured_s, "failure": self.failure or None, "predicted": predicted}


def check_here(cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Raises `UsageError` where the cluster cannot be the machine that this process stands on."""
    on_cpu = cluster.machine.scale_up.kind == "memory"
    if cluster.nodes > 1 or (not on_cpu and gpus(environ) < cluster.devices):
        raise UsageError(
            f"--measure runs plans on this machine, which is not {cluster.name} ({cluster.nodes} x "
            f"{cluster.machine.devices} {cluster.device.name}): leave out --measure, or --cluster"
        )


def tried(
    path: Path,
    predictions: Sequence[Prediction],
    *,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    bar: ProgressBar,
    turns: int = TURNS,
) -> list[PlanTrial]:
    """The trials, fastest first and those that failed last. `bar` is told what is being tried.

    Raises `EnvironmentFault` where none of the plans ran.
    """
    times: dict[int, list[float]] = {number: [] for number in range(len(predictions))}
    failures: dict[int, str] = {}
    with TemporaryDirectory(prefix="shoal-trial-") as folder:
        for done, (turn, number) in enumerate(_there_and_back(len(predictions), turns)):
            if number in failures:
                continue
            plan = predictions[number].plan
            what = f"trying {plan.describe()} (turn {turn + 1} of {turns})"
            bar.update(what, done=done, total=turns * len(predictions))
            run = Path(folder) / f"plan-{number}-{turn}"
            _write_short(run.with_suffix(".toml"), run_file_of(path, plan, overrides))
            try:
                times[number] += _steps_s(run, environ)
            except _Failed as failed:
                failures[number] = str(failed)
    if len(failures) == len(predictions):
        raise EnvironmentFault(f"none of the {len(failures)} plans ran; the first: {failures[0]}")
    trials = [_trial(one, times[number], failures.get(number)) for number, one in enumerate(predictions)]
    return sorted(trials, key=lambda trial: trial.measured_s or math.inf)


def _there_and_back(plans: int, turns: int) -> Iterator[tuple[int, int]]:
    """(turn, plan)"""
    for turn in range(turns):
        yield from ((turn, plan) for plan in (range(plans) if turn % 2 == 0 else reversed(range(plans))))


def _trial(prediction: Prediction, seconds: Sequence[float], failure: str | None) -> PlanTrial:
    if failure is not None:
        return PlanTrial(prediction=prediction, failure=failure)
    return PlanTrial(prediction=prediction, measured_s=statistics.median(seconds))


class _Failed(Exception):
    """A run that did not end well; what it said."""


def _write_short(path: Path, text: str) -> None:
    """The run file `text` for some steps, of which those that are timed have the masks that its run will have."""
    path.write_text(text, encoding="utf-8")
    path.write_text(dumps(bare(masked_before(load_run(path, ()), WARM_UP))), encoding="utf-8")


def _steps_s(run: Path, environ: Mapping[str, str]) -> list[float]:
    """Seconds of each step of a short run of `run`.toml in the folder `run`. Raises `_Failed`."""
    command = [
        sys.executable, "-m", "shoal", "train", str(run.with_suffix(".toml")), f"run.directory={run}",
        f"run.steps={WARM_UP + STEPS}",
    ]  # fmt: skip
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as train:
        try:
            _, said = train.communicate()
        except KeyboardInterrupt:
            stop([train], patience_s=THROWN_AWAY_S)
            raise
    if train.returncode != 0:
        raise _Failed(f"exit code {train.returncode}\n{said.strip()[-MOST_TEXT:]}")
    return [step_s for event in read_events(run)[WARM_UP:] if (step_s := event.get("time/step")) is not None]


# The first steps of a run file, as it stands: what a rank's simulated device held, and the losses.


MEASURED = (
    "compare_every_steps", "expert_loads_every_steps", "noise_every_steps", "noise_by_layer", "layer_norms_every_steps",
)  # fmt: skip
"""Keys of `[observe]` that have a step do more."""
TRIED_STEPS = 3
"""State is made in the first, and comes and goes in the others."""


class FirstSteps(msgspec.Struct, frozen=True):
    """What the fullest rank needs, the loss of each step, and the seconds of the fastest one after the first."""

    peak_bytes: int
    losses: list[float] = []
    step_s: float = 0.0


def trial_of(run_file: RunFile) -> FirstSteps | str:
    """Some first steps of the run, in processes and a folder of their own; or why there are none."""
    folder = Path(mkdtemp(prefix="shoal-budget-"))  # a TemporaryDirectory would end with the first fork that does
    try:
        return first_steps(run_file, folder, steps=TRIED_STEPS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def first_steps(run_file: RunFile, folder: Path, *, steps: int) -> FirstSteps | str:
    """What the first steps of the run come to, in processes of their own; or why there are none. `folder` is theirs."""
    code, said = short_run(run_file, folder, steps=steps)
    if code != 0:
        return said
    ranks = [read_events(folder / "run", rank=rank) for rank in range(run_file.run.processes or 1)]
    peaks = [[peak for event in own if (peak := event.get("memory/device_peak_bytes")) is not None] for own in ranks]
    losses = [loss for event in ranks[0] if (loss := event.get("loss/train")) is not None]
    times = [step_s for event in ranks[0][1:] if (step_s := event.get("time/step")) is not None]
    if not all(peaks):
        return "it took no step"
    return FirstSteps(max(map(needed, peaks)), losses, min(times, default=0.0))


def needed(peaks: Sequence[float]) -> int:
    """Bytes of a device in whose steps these were the peaks: the highest, and what those after the first differ by."""
    later = peaks[1:] or peaks
    return int(max(peaks) + max(later) - min(later))


def bare(run_file: RunFile) -> RunFile:
    """The run file of which nothing but its steps is asked: it takes up and sends no checkpoint, evaluates nothing, and
    tells nobody.
    """
    measured = {key: getattr(run_file.observe, key) for key in MEASURED}
    observe = msgspec.structs.replace(ObserveConfig(), report=False, evaluate_samples=1, **measured)
    return msgspec.structs.replace(run_file, checkpoint=CheckpointConfig(every_steps=0), observe=observe)


def short_run(run_file: RunFile, folder: Path, *, steps: int) -> tuple[int, str]:
    """The exit code of the first steps of the run, whose directory is `run` in `folder`, and why it failed. A run of
    objects that a script hands over is one of that script, started again. It ends with this process, and at Ctrl-C.
    """
    path = folder / "run.toml"
    tried = hurried(run_file, steps)
    own = {"run.directory": str(folder / "run"), "run.steps": tried.run.steps}
    path.write_text(dumps(with_values(bare(tried), own)), encoding="utf-8")
    command, environ = [sys.executable, "-m", "shoal", "train", str(path)], dict(os.environ)
    if any(getattr(table, "build", None) == GIVEN for table in (run_file.model, run_file.data, run_file.loss)):
        command, own_directory = own_command(), str(run_directory(run_file).resolve())
        environ |= {TRIAL: str(path), TRIAL_OF: own_directory}
    process = warm.start(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, first=arm_before_exec()
    )
    try:
        said = process.communicate()[1].decode(errors="replace").strip()
    except KeyboardInterrupt:
        stop([process], patience_s=THROWN_AWAY_S)
        raise
    return process.returncode, _cause(said.splitlines()) or f"exit code {process.returncode}"


def hurried(run_file: RunFile, steps: int) -> RunFile:
    """The run file of `steps` that have all that its run will hold: masks, gates, what freezing compares with. It has
    more of them where nothing could be frozen otherwise; the last one may be followed by a freezing, no other.
    """
    replaced, freeze, run_file = msgspec.structs.replace, run_file.freeze, masked_before(run_file, steps)
    if freeze is not None and freeze.progress is not None:
        soonest = replaced(freeze.progress, every=1, window=3, patience=1)
        least = soonest.first(steps)
        progress = replaced(soonest, patience=1 + max(0, steps - least))
        run_file = replaced(run_file, freeze=replaced(freeze, progress=progress))
        steps = max(steps, least)
    return replaced(run_file, run=replaced(run_file.run, steps=steps))


def masked_before(run_file: RunFile, step: int) -> RunFile:
    """The run file whose masks change for the last time before that step, which is one as most of the run are."""
    replaced, sparsity, last = msgspec.structs.replace, run_file.sparsity, max(1, step - 1)
    if sparsity is None:
        return run_file
    schedule = replaced(sparsity.schedule, begin=min(sparsity.schedule.begin, last), end=last, every=1)
    return replaced(run_file, sparsity=replaced(sparsity, schedule=schedule))


def _cause(lines: Sequence[str]) -> str:
    """The line beside that which says which rank failed (`shoal.launcher.root_cause`); without one, the last."""
    for number, line in enumerate(lines[:-1]):
        if re.match(r"rank \d+ of \d+ failed \(", line):
            return lines[number + 1]
        if re.match(r"\d+ of \d+ ranks failed with this", lines[number + 1]):
            return line
    return lines[-1] if lines else ""
