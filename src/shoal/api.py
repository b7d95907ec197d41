"""Runs from a script, with the script's own objects: `shoal.train` takes the loop over, `shoal.start` leaves it there.

A process that no launcher started starts the ranks, each with the script's own command line, and waits for them; in
each of them the same call trains, and other calls of the script are passed over. So one script serves a laptop,
torchrun and srun alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.assembly.objects import UserObjects
from shoal.assembly.start import run
from shoal.assembly.user_code import GIVEN
from shoal.config.load import apply, read
from shoal.errors import RunEnded, RunFailed, RunStopped, ShoalError, UsageError
from shoal.launch.environment import Place, place_from
from shoal.launch.own_script import Reached, own_command, reads_for
from shoal.launch.supervision import say
from shoal.observe.facts import facts_path
from shoal.planning.arrange import PLANNER
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile, run_directory

if TYPE_CHECKING:
    from shoal.data.dataset import Dataset
    from shoal.own_loop.loop import Training

ONLY_RUN = "SHOAL_ONLY_RUN"
"""Which run the ranks of a script were started for: they pass over its other calls of `train`."""


Configuration = str | Path | Mapping[str, Any] | RunFile


def train(
    config: Configuration,
    overrides: Sequence[str] = (),
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
) -> Path:
    """Train, and return the run directory. Afterwards an `nn.Module` passed as `model` has the trained weights.

    `config` is a run file, its tables as dictionaries, or a `RunFile`. `model` is an `nn.Module` or a function that
    returns one; `data` a map-style data set, an iterable, a function that returns one of these, or a pair (training,
    held out); `loss` a callable of (outputs, targets) that returns one value per sample or position. What is not given,
    the configuration names.

    Raises `RunFailed` where the run is refused or one of its ranks fails, and `RunStopped` after a signal. What went
    wrong is on standard error already; a script that does not catch them ends with the exit code and no traceback.
    A rank itself ends with its own code, and does not return.
    """
    try:
        return _trained(config, overrides, model=model, data=data, loss=loss)
    except RunEnded:
        raise
    except ShoalError as refusal:
        say(f"shoal: {refusal}")
        raise RunFailed(refusal.exit_code, rank=None, sentence=str(refusal)) from refusal


def _trained(config: Configuration, overrides: Sequence[str], *, model: Any, data: Any, loss: Any) -> Path:
    run_file, file = _resolved(config, overrides, model=model, data=data, loss=loss)
    directory = run_directory(run_file)

    def be_rank(run_file: RunFile, place: Place) -> None:
        from shoal.planning.prediction import FORECAST
        from shoal.training import train_rank

        train_rank(run_file, place, UserObjects(model=model, data=data, loss=loss), forecast=FORECAST)

    reads = reads_for(directory, os.environ)
    if reads is not None:
        if reads:
            raise Reached(data)
        return directory  # this process reads for another call of the script
    place, wanted = place_from(os.environ), str(directory.resolve())
    if place is not None and os.environ.get(ONLY_RUN, wanted) != wanted:
        return directory  # this rank was started for another call of the script
    environ = os.environ if place is not None else {**os.environ, ONLY_RUN: wanted}
    code = run(run_file, own_command(), be_rank, directory=directory, file=file, environ=environ, planner=PLANNER)
    if place is not None and place.launcher == "shoal":
        sys.exit(code)  # this process was made for the call above; what follows in the script runs once, in its parent
    if code != 0:
        kind = RunStopped if code.rank is None else RunFailed
        raise kind(int(code), rank=code.rank, sentence=code.sentence)
    if place is None and not facts_path(directory).exists():
        raise UsageError(
            f"the ranks ended without training into {directory}: the script, run again, did not come to the same "
            "call of shoal.train; what leads to it must not depend on time or chance"
        )
    if place is None:
        _give_back(model, directory)
    return directory


def start(
    config: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    model: Any,
    optimizer: Any,
    data: Any = None,
    batch_samples: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    state: Mapping[str, Any] | None = None,
) -> Training:
    """Begin a run whose loop is the script's own, and return its `Training`: see `shoal.own_loop.loop`.

    `config` is a run file or its tables as dictionaries; with the keywords below it may be left out. `model` is an
    `nn.Module`, `optimizer` a `torch.optim.Optimizer` over its parameters that has taken no step; or tuples of several,
    whose parameters are called "0.weight", "1.weight", ... in checkpoints. `data` is a map-style data set, an iterable,
    a function that returns one of these, a PyTorch DataLoader (its data set, batch size, order, `drop_last` and
    `collate_fn` are taken over), a pair (training, held out), or the keys of a table `[data]`, such as
    {"kind": "parquet", "files": [...], ...}; without it, the run file's `[data]` counts. Batches of such data are pairs
    (inputs, targets).
    `batch_samples` are the samples of one step over all ranks. `epochs` says how often to go through the data, or
    `steps` how many updates to make; `run.steps`, if it is set, counts instead. `state` are objects with
    `state_dict()`, by name, such as {"scheduler": scheduler}: they are saved with the run, and a resume restores them.

    Under a launcher every rank calls it. Without one, a run of several processes (`run.processes`; by default one a
    GPU, else one) starts them with this script, and ends the process with their exit code: what follows runs in the
    ranks alone. If the run directory holds a checkpoint, the run goes on from it.

    A refusal is one sentence on standard error, and the exit code of its kind.
    """
    from shoal.own_loop.start import start_own_loop

    tables, file = _tables(config)
    if isinstance(data, Mapping):
        tables["data"] = {**tables.get("data", {}), **data}
    return start_own_loop(
        tables,
        overrides,
        file=file,
        command=own_command,
        objects={"model": model, "optimizer": optimizer, "data": data, "state": dict(state or {})},
        batch_samples=batch_samples,
        epochs=epochs,
        steps=steps,
        planner=PLANNER,
    )


def open_data(table: Mapping[str, Any], *, sequence: int = 256) -> Dataset:
    """The data that a table `[data]` names, for a script to look into: `opened.train[i]`, `opened.held_out[i]` and
    their lengths. Token data comes in samples of `sequence` tokens.

    Raises `ConfigError` for a wrong key, `DataError` for a file that cannot be read, `MissingExtra`.
    """
    from shoal.assembly.objects import data_of

    tables = {
        "run": {"name": "data", "steps": 1},
        "model": {"kind": "python", "build": GIVEN},
        "data": dict(table),
        "batch": {"global_samples": 1, "sequence": sequence},
    }
    return data_of(run_file_of(tables, file="the table [data]"), UserObjects())


def _give_back(model: Any, directory: Path) -> None:
    """The trained weights and buffers to the script's own module: the ranks have trained copies of it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return
    from shoal.checkpoint.inspect import weights_of

    weights, own = weights_of(directory), model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in own.items():
            if name in weights:  # a tied parameter is saved under its first name alone
                tensor.copy_(weights[name])


def _resolved(config: Configuration, overrides: Sequence[str], **objects: Any) -> tuple[RunFile, str]:
    if isinstance(config, RunFile):
        return config, "the configuration"
    tables, file = _tables(config)
    for name, value in objects.items():
        if value is not None:
            written = tables.get(name, {})
            own = written if isinstance(written, Mapping) and written.get("kind") == "python" else {}
            tables[name] = {**own, "kind": "python", "build": GIVEN}
    return run_file_of(apply(tables, overrides, RunFile), file=file), file


def _tables(config: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """The tables, and how messages call what they are from."""
    if isinstance(config, str | Path):
        return read(Path(config)), str(config)
    return ({} if config is None else dict(config)), "the configuration"
