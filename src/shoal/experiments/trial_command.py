"""The command of a trial: `shoal train` with its keys, its seed and its folder; and one trial by itself.

A trial that is over counts if it was trained with the keys that its sweep has now: an old result is no answer to them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from shoal.config.load import read as read_tables
from shoal.errors import ConfigError, UsageError
from shoal.experiments.search import Grid, Random, SweepFile, Trial, trials
from shoal.launcher.devices import gpus
from shoal.runfile.load import load_run, run_file_of
from shoal.runfile.run_file import RunFile

RUN_KEYS = ("steps", "seed", "warm_start")
TABLES = (
    "model", "data", "loss", "distillation", "optimizer", "schedule", "adapter", "quantisation", "freeze", "sparsity",
    "precision", "codec", "shard_codec", "sync",
)  # fmt: skip
"""What decides a result, besides `RUN_KEYS` and the samples of a step. The layout and what follows from it may differ:
they change the order of summation."""


def require_trained_with(run_file: Path, overrides: Sequence[str], folder: Path) -> None:
    """Raises `UsageError` where the run in `folder` had other keys than `run_file` with `overrides` has."""
    path = folder / "run.toml"
    if not path.is_file():
        return
    try:
        tables = read_tables(path)
    except ConfigError as fault:
        raise UsageError(f"{path} is damaged ({fault}): remove {folder}, and the trial is trained again") from fault
    recorded = run_file_of(tables, file=str(path))
    before, now = _deciding(recorded), _deciding(load_run(run_file, overrides))
    if changed := [key for key in now if before[key] != now[key]]:
        raise UsageError(
            f"{folder} was trained with another {' and '.join(changed)}, and is over: choose another folder for these "
            "keys, or remove that one"
        )


def _deciding(run_file: RunFile) -> dict[str, Any]:
    tables = {name: msgspec.to_builtins(getattr(run_file, name)) for name in TABLES}
    keys = {f"run.{name}": getattr(run_file.run, name) for name in RUN_KEYS}
    others = {"batch.global_samples": run_file.batch.global_samples, "pipeline.codec": run_file.pipeline.codec}
    return tables | keys | others


_PASSED_ON = (signal.SIGTERM, signal.SIGINT)


def command_of(trial: Trial, run_file: Path, directory: Path, *, via: Sequence[str] = ()) -> list[str]:
    """What trains a trial of the sweep in `directory`; `via` goes before it."""
    return [*via, sys.executable, "-m", "shoal", "train", str(run_file), *overrides_of(trial, directory)]


def overrides_of(trial: Trial, directory: Path) -> list[str]:
    """The keys by which a trial differs from the run file."""
    folder = str((directory / trial.name).resolve())
    own = {"run.seed": trial.seed, "run.name": trial.name, "run.directory": folder}
    return [f"{key}={_toml(value)}" for key, value in (dict(trial.parameters) | own).items()]


def independent_trials(sweep: SweepFile) -> list[Trial]:
    """The trials of a sweep that are known before any has run. Raises `UsageError` for a search that decides between
    them."""
    if not isinstance(sweep.search, Grid | Random):
        raise UsageError(
            f'search.kind = "{type(sweep.search).__name__.lower()}" decides between trials while they run, which '
            "single tasks cannot: start the whole sweep, with --via for its trials"
        )
    return trials(sweep)


def is_sweep(path: Path) -> bool:
    """Whether `path` looks like a sweep file, whose `run` is the name of a run file, and not like a run file."""
    try:
        return isinstance(read_tables(path).get("run"), str)
    except ConfigError:
        return False


def train_alone(sweep: SweepFile, number: int, run_file: Path, directory: Path) -> int:
    """Trains trial `number` of a sweep, as one task of a scheduler's array; its exit code, 128 + n for signal n.

    Raises `UsageError` for a number that there is not, and for a search that decides between its trials.
    """
    every = independent_trials(sweep)
    if not 0 <= number < len(every):
        raise UsageError(
            f"there is no trial {number}: the sweep has {len(every)}, from 0 on (--array=0-{len(every) - 1})"
        )
    trial = every[number]
    load_run(run_file, overrides_of(trial, directory))
    (directory / trial.name).mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(command_of(trial, run_file, directory))
    # The trial itself saves and stops, and its code says so.
    before = {one: signal.signal(one, lambda number, _: process.send_signal(number)) for one in _PASSED_ON}
    try:
        code = process.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return code if code >= 0 else 128 - code


def devices_of(slot: int, parallel: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The GPUs of one of `parallel` slots, as an environment variable; nothing where there are none to divide."""
    count = gpus(environ)
    if count < parallel or parallel == 1:
        return {}
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if environ.get("CUDA_VISIBLE_DEVICES") else None
    names = visible or [str(index) for index in range(count)]
    share = count // parallel
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot * share : (slot + 1) * share])}


def _toml(value: Any) -> str:
    return tomli_w.dumps({"x": value}).partition("=")[2].strip() if not isinstance(value, dict) else _inline(value)


def _inline(table: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key} = {_toml(value)}" for key, value in table.items()) + "}"
