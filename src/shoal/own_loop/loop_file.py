"""The run file of a script's own loop: what the script leaves out follows from what it hands over."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shoal.assembly.epoch_end import epoch_steps
from shoal.assembly.objects import UserObjects, data_of
from shoal.assembly.user_code import GIVEN, table_of_object
from shoal.config.load import apply
from shoal.data.dataset import Dataset
from shoal.errors import ConfigError
from shoal.own_loop.objects import is_endless, order_of_loader, samples_of_step
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile


def run_file_of_loop(
    tables: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    file: str,
    loader: DataLoader | None,
    data: Any,
    samples: int | None,
    epochs: int | None,
    steps: int | None,
) -> RunFile:
    """See above. `loader` is the DataLoader of the training data, if the script has one; `samples` are those of a step.

    Raises `ConfigError` for what is said twice, or not at all.
    """
    model = table_of_object("model", tables.get("model") or {})
    table = dict(tables.get("data") or {})
    if data is not None and table.get("kind", "python") != "python":
        raise ConfigError(
            f"{file}: data.kind = {table['kind']!r}, and the script hands over data of its own: leave one of them out"
        )
    if data is not None:
        table = table_of_object("data", table)
    whole = apply({**tables, "model": model, "data": table}, overrides, RunFile)
    if data is None and "kind" not in whole.get("data", {}):
        raise ConfigError(f"{file}: there is no data: pass data to shoal.start, or set data.kind")
    unread = next((name for name in ("optimizer", "schedule", "loss") if name in whole), None)
    if unread is not None:
        raise ConfigError(
            f"{file}: [{unread}] is for runs without a loop of their own, and shoal.start takes what the script "
            "makes; set it in the script, and remove its keys here"
        )
    run_table, batch = dict(whole.get("run", {})), dict(whole.get("batch", {}))
    run_table.setdefault("name", Path(sys.argv[0]).stem or "script")
    if "global_samples" not in batch:
        size = samples if samples is not None else samples_of_step(loader)
        if size is None:
            raise ConfigError(f"{file}: batch.global_samples is missing; pass batch_samples, the samples of one step")
        batch["global_samples"] = size
    if loader is not None and not isinstance(loader.dataset, IterableDataset):
        batch.setdefault("epoch_end", "drop" if loader.drop_last else "short")
    by_epochs = "steps" not in run_table and steps is None
    if "steps" not in run_table:
        if (epochs is None) == (steps is None):
            raise ConfigError(f"{file}: run.steps is missing; pass epochs or steps, one of them, or set it")
        run_table["steps"] = 1 if steps is None else steps
    given = {"kind": "python", "build": GIVEN}
    said = whole.get("data", {})
    data_table = said if data is None else {**order_of_loader(loader, said), **said, **given}
    tables = {**whole, "run": run_table, "batch": batch, "model": {**whole.get("model", {}), **given}}
    run_file = run_file_of({**tables, "data": data_table}, file=file)
    if by_epochs:
        run_table["steps"] = epoch_steps(run_file.batch, _samples(run_file, data), epochs or 0)
        run_file = run_file_of({**tables, "data": data_table}, file=file)
    return run_file


def _samples(run_file: RunFile, data: Any) -> int:
    """Samples of an epoch. Raises `ConfigError` for what has no length."""
    if data is not None and is_endless(data[0]):
        raise ConfigError("epochs of an iterable, whose length is not known: pass steps")
    if data is not None:
        return len(data[0])
    found = data_named(run_file)
    if found.endless or found.parts:
        raise ConfigError("epochs of a stream or a mixture, which have none: pass steps")
    return len(found.train)


def data_named(run_file: RunFile) -> Dataset:
    """What `[data]` names."""
    return data_of(run_file, UserObjects())
