"""Whether a trial that is over was trained with the keys that its sweep has now: an old result is no answer to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.config.load import read as read_tables
from shoal.errors import ConfigError, UsageError
from shoal.runfile.load import load_run, run_file_of
from shoal.runfile.run_file import RunFile

RUN_KEYS = ("steps", "seed", "warm_start")
TABLES = ("model", "data", "loss", "optimizer", "schedule", "precision", "codec", "shard_codec", "sync")
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
