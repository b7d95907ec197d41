"""The step of a crash capsule, computed again in this process: does it fail in the same way?

The run file is that of the capsule on one rank, without the tables in `DROPPED`. Most of these change no number beyond
the order of summation; a lossy codec, another strategy than the plain sum, and hooks do, and then losses that differ
are no finding. The run resumes from the capsule's checkpoint to the step that failed, and each step's loss is held
against the recorded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch._C._distributed_c10d import HashStore

from shoal.assembly.job import build_job, restore
from shoal.assembly.objects import UserObjects
from shoal.assembly.reading import order_of, short_epoch
from shoal.assembly.run import Run, open_run
from shoal.config.load import read as read_tables
from shoal.engine.loop import take_step
from shoal.errors import ConfigError, Diverged, UsageError
from shoal.launcher.environment import Place
from shoal.launcher.failure import failure_of
from shoal.observe.capsule import Capsule, read_capsule, shoal_version, unpack
from shoal.observe.sink import Sinks
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile

TOLERANCE = 1e-5
"""Relative, of losses in float32: the layouts' own (docs/reference/tolerances.md), for some steps of plain SGD."""
LOOSE_TOLERANCE = 1e-2
"""Of losses after several steps: optimizers such as Adam amplify the last digits."""
DROPPED = (
    "layout", "pipeline", "context", "wire", "gradients", "codec", "shard_codec", "sync", "elastic", "memory", "hooks",
)  # fmt: skip
CHANGING = ("codec", "shard_codec", "sync", "hooks")
"""Those of `DROPPED` that change what a step computes, where they are set; the others change the order of summation."""


class StepAgain(msgspec.Struct, frozen=True):
    """A step's loss here and as it was recorded; None: no finite one."""

    step: int
    loss: float | None
    recorded: float | None


class Replay(msgspec.Struct, frozen=True):
    """What came of it. `error` is this process's ("": none), `same`: None where the run ended by what one process
    cannot repeat, such as a kill.
    """

    step: int
    sample_ids: list[int]
    steps: list[StepAgain]
    recorded_error: str
    error: str
    traceback: str
    same: bool | None
    sentence: str


def replay_capsule(path: Path, folder: Path, *, run_directory: Path | None = None, any_version: bool = False) -> Replay:
    """Computes the step in `folder`, an empty one. `run_directory` has the checkpoint where the capsule does not.

    Raises `UsageError` for a capsule that is none, of another version (but with `any_version`), or whose checkpoint is
    not found.
    """
    capsule = read_capsule(path)
    if capsule.shoal != shoal_version() and not any_version:
        raise UsageError(
            f"{path} is a capsule of shoal {capsule.shoal}, and this is {shoal_version()}: the step may be another; "
            "replay it with that version, or with --any-version"
        )
    unpack(path, folder)
    directory = folder
    if capsule.checkpoint is not None and not capsule.holds_checkpoint:
        directory = run_directory or Path(capsule.directory)
        if not (directory / "checkpoints").is_dir():
            raise UsageError(
                f"the capsule's checkpoint was too large to be in it, and {directory} has none: give --run-directory"
            )
    path = folder / "run.toml"
    try:
        tables = read_tables(path)
    except ConfigError as fault:
        raise UsageError(f"run.toml of the capsule is damaged ({fault}): give a whole capsule") from fault
    name = f"{path} of the capsule"
    run_file = _on_one_rank(tables, capsule, folder, name=name)
    return _replayed(run_file, capsule, directory, changing=changing(run_file_of(tables, file=name), run_file))


def changing(recorded: RunFile, replayed: RunFile) -> list[str]:
    """The tables of `CHANGING`, and the key of `[pipeline]`, that are set in `recorded`, and not in `replayed`."""
    differ = [name for name in CHANGING if getattr(recorded, name) != getattr(replayed, name)]
    sums = recorded.sync.replicas_are == "lockstep"
    stages = ["pipeline.codec"] if recorded.pipeline.codec != replayed.pipeline.codec else []
    return [name for name in differ if not (name == "sync" and sums)] + stages


def _on_one_rank(tables: dict[str, Any], capsule: Capsule, folder: Path, *, name: str) -> RunFile:
    tables = dict(tables)
    for dropped in DROPPED:
        tables.pop(dropped, None)
    tables["run"] = tables.get("run", {}) | {
        "processes": 1,
        "steps": max(capsule.step, 1),
        "directory": str(folder),
        "device": "cpu",
    }
    tables["observe"] = {"report": False, "compare_every_steps": 0}
    tables["checkpoint"] = {"every_steps": 0}
    return run_file_of(tables, file=name)


def _replayed(run_file: RunFile, capsule: Capsule, directory: Path, *, changing: Sequence[str]) -> Replay:
    place, expected = Place(0, 1, 0, 1, 0, "shoal"), capsule.checkpoint or 0
    steps: list[StepAgain] = []
    error: BaseException | None = None
    with ExitStack() as stack:
        # What fails up to here is not the step: it is raised, and nothing is judged.
        run = open_run(run_file, place, UserObjects(), store=HashStore())
        restore(run, directory, Sinks())
        ids, at = sample_ids(run, capsule), run.state.progress.step
        if at != expected:
            raise UsageError(
                f"{directory} goes on from step {at} now, and the capsule from step {expected}: keep that checkpoint"
            )
        job = build_job(run, Path(run_file.run.directory or "."), Sinks(), stack, stop_requested=lambda: False)
        try:
            while job.progress.step < capsule.step:
                number = job.progress.step + 1
                result = take_step(job)
                steps.append(StepAgain(number, result.loss, capsule.losses.get(str(number))))
        except Exception as raised:
            error = raised
    return _judged(capsule, ids, steps, error, changing=changing)


def sample_ids(run: Run, capsule: Capsule) -> list[int]:
    """The samples of the step that failed, in order."""
    short, stop = short_epoch(run.run_file.batch, len(run.workload.data.train)), capsule.stop
    if short is not None:
        stop = min(stop, capsule.start - capsule.start % short + short)
    order = order_of(run.run_file, run.workload.data)
    return [int(found) for found in order.ids(np.arange(capsule.start, stop))]


def _judged(
    capsule: Capsule, ids: list[int], steps: list[StepAgain], error: BaseException | None, *, changing: Sequence[str]
) -> Replay:
    record = None if error is None else failure_of(error, 0)
    said = "" if record is None else record.headline
    recorded, same, where = capsule.failed.sentence, None, f"step {capsule.step} of {capsule.name}"
    apart = [step for step in steps if step.step < capsule.step and _differs(step, steps[0].step)]
    if record is not None:
        same = _head(said) == _head(recorded) or (isinstance(error, Diverged) and capsule.failed.exit_code == 4)
        sentence = f"{where} fails {'in the same way' if same else 'in another way'} on one process: {said}"
    elif apart:
        first = apart[0]
        sentence = f"step {first.step} has the loss {first.loss} on one process, and {first.recorded} was recorded"
        if changing:
            sentence += f": so it may be, as the replay is without {', '.join(changing)}, which changes the numbers"
        else:
            same = False
            sentence += (
                ": the layout, the data or the machine is to blame; `shoal verify` compares the layout with one process"
            )
    elif _is_of_the_step(capsule):
        same = False
        sentence = f"{where} does not fail on one process: look at what only rank {capsule.failed.rank} has"
    else:
        sentence = f"{where} does not fail on one process, and the run ended by {recorded or 'a signal'}"
        sentence += "; the losses before it are those that were recorded" if len(steps) > 1 else ""
    return Replay(capsule.step, ids, steps, recorded, said, "" if record is None else record.traceback, same, sentence)


def _is_of_the_step(capsule: Capsule) -> bool:
    """Whether the failure was an error of a rank's own, and not a kill or a lost peer."""
    return ": " in capsule.failed.sentence and not capsule.failed.sentence.startswith(("CollectiveError", "killed"))


def _head(sentence: str) -> str:
    return sentence.strip().splitlines()[0][:200] if sentence.strip() else ""


def _differs(step: StepAgain, first: int) -> bool:
    if step.loss is None or step.recorded is None:
        return False
    tolerance = TOLERANCE if step.step == first else LOOSE_TOLERANCE
    return abs(step.loss - step.recorded) > tolerance * max(1e-12, abs(step.recorded))
