"""Runs from a script, with the script's own objects: `shoal.train` takes the loop over, `shoal.start` leaves it there,
`shoal.verify` compares the run with one process. `shoal.plan` and `shoal.load_checkpoint` need no ranks.

A process that no launcher started starts the ranks, each with the script's own command line, and waits for them; in
each of them the same call trains, and other calls of the script are passed over. So one script serves a laptop,
torchrun and srun alike.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from blake3 import blake3

from shoal.assembly.finished_run import chosen_run, intent_of, with_flag
from shoal.assembly.objects import UserObjects
from shoal.assembly.start import RANK, leave_with, processes_of, run
from shoal.assembly.user_code import GIVEN, table_of_object
from shoal.config.load import apply, dumps, read, tables_of
from shoal.errors import RunEnded, RunFailed, RunStopped, ShoalError, UsageError
from shoal.files import temporary_folder
from shoal.launcher.environment import Place, place_from
from shoal.launcher.forks import forked_ranks
from shoal.launcher.own_script import (
    DESCRIBES,
    PROFILE,
    TRIAL,
    TRIAL_OF,
    Reached,
    ScriptCheck,
    own_command,
    reads_for,
    refuse_second,
    script_check,
)
from shoal.launcher.supervision import NOTHING_KEPT, Patience, say
from shoal.observe.facts import facts_path
from shoal.planning.arrange import LOOKING, PLANNER
from shoal.runfile.load import load_run, run_file_of
from shoal.runfile.run_file import RunFile, run_directory
from shoal.verification.refusals import require_provable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.data.dataset import Dataset
    from shoal.own_loop.loop import Training

ONLY_RUN = "SHOAL_ONLY_RUN"
"""Which run the ranks of a script were started for: they pass over its other calls of `train` and `verify`."""
VERDICT = "SHOAL_VERDICT"
"""The file in which rank 0 of a `verify` leaves what was found, for the process that started the ranks; with the hash
of a call behind it, what an earlier call has found, for ranks that pass over it.
"""

Configuration = str | Path | Mapping[str, Any] | RunFile


def train(
    config: Configuration,
    overrides: Sequence[str] = (),
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    resume: bool | None = None,
) -> Path:
    """Train, and return the run directory. Afterwards an `nn.Module` passed as `model` has the trained weights.

    A run that was cut off is resumed. One that is finished is trained again only if keys, the script or its code have
    changed, as a new run beside it (`runs/NAME-2`). `resume`: True keeps to the newest run in any case, False trains a
    new one; so do the overrides `--resume` and `--fresh`.

    `config` is a run file, its tables as `start` takes them, or a `RunFile`. `model` is an `nn.Module` or a function
    that returns one; `data` a map-style data set, an iterable, a DataLoader, a function that returns one of these, or a
    pair (training, held out); `loss` a callable of (outputs, targets) that returns one value per sample or position.
    What is not given, the configuration names. Samples may be those of transformers' data sets, whose `labels` are the
    targets.

    Raises `RunFailed` where the run is refused or one of its ranks fails, and `RunStopped` after a signal. What went
    wrong is on standard error already; a script that does not catch them ends with the exit code and no traceback.
    A rank itself ends with its own code, and does not return.
    """
    with _refusals_said():
        refuse_second("shoal.train", os.environ)
        if (check := script_check(os.environ)) is not None:
            _checked(check, config, overrides, {"model": model, "data": data, "loss": loss})
        return _trained(config, with_flag(overrides, resume), model=model, data=data, loss=loss)


def verify(
    config: Configuration,
    overrides: Sequence[str] = (),
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    steps: int | None = None,
    exact: bool = False,
) -> dict[str, Any] | None:
    """Compare some steps of a run with one process, and return what `shoal verify --json` prints.

    The arguments are those of `train`; `steps` are the optimizer steps to compare, `exact` does it in float64. Nothing
    is written to the run directory but which splits of a user's model have passed. Under a launcher rank 0 alone gets
    the verdict, other ranks None.

    Raises `RunFailed` where the two differ (exit code 6, with a sentence that names what differs first), where the run
    is refused, or where a rank fails; `RunStopped` after a signal.

    A script may call it several times, and `train` behind it: ranks that are started for one call pass over the others,
    and get from those before it what they have found.
    """
    with _refusals_said():
        refuse_second("shoal.verify", os.environ)
        return _verified(config, overrides, {"model": model, "data": data, "loss": loss}, steps=steps, exact=exact)


def plan(
    config: Configuration, overrides: Sequence[str] = (), *, cluster: str | Path | None = None, keep: int = 10
) -> list[dict[str, Any]]:
    """The `keep` fastest plans of a run that fit, the best first: the entries of `plans` in `shoal plan --json`.

    An entry has the predicted seconds of a step (`step_s`), bytes of the fullest rank (`memory_bytes`), what they are
    made of (`bill_s`, `memory`), and the choices (`layout`, `microbatch`, `zero`, `recompute`, ...). `cluster` is the
    file of the machine; without it, that of `layout.cluster`, else the cores of this one.

    Raises `ConfigError`, `LayoutError` where nothing fits, `UsageError`.
    """
    from shoal.planning.answer import best_plans

    run_file, _ = _resolved(config, overrides)
    return best_plans(run_file, None if cluster is None else Path(cluster), keep=keep)


def load_checkpoint(source: str | Path, model: nn.Module | None = None) -> dict[str, Tensor]:
    """The weights and buffers of a checkpoint, or of a run directory's newest whole one (of the best one that
    `checkpoint.keep_best` keeps: `RUN_DIR/checkpoints/best`), under the names of the unsplit
    model, on the CPU; every byte is verified. They are also copied into `model`, if it is given.

    A parameter that a model has under several names is there under the first.

    Raises `UsageError` where there is no checkpoint, or where it is not of such a model; `CorruptCheckpoint`.
    """
    from shoal.checkpoint.weights import copy_weights, require_weights_of, weights_of

    weights = weights_of(Path(source))
    if model is not None:
        require_weights_of(model, weights, source=source)
        copy_weights(weights, model)
    return weights


def _trained(config: Configuration, overrides: Sequence[str], *, model: Any, data: Any, loss: Any) -> Path:
    intent, keys = intent_of(overrides)
    run_file, file = _resolved(config, keys, model=model, data=data, loss=loss)
    run_file = chosen_run(run_file, intent)
    if TRIAL in os.environ:
        if str(run_directory(run_file).resolve()) != os.environ[TRIAL_OF]:
            return run_directory(run_file)
        run_file = load_run(Path(os.environ[TRIAL]))
    directory = run_directory(run_file)

    def be_rank(run_file: RunFile, place: Place) -> None:
        from shoal.planning.prediction import FORECAST
        from shoal.training import train_rank

        train_rank(run_file, place, UserObjects(model=model, data=data, loss=loss), forecast=FORECAST)

    if _is_for_another_call(directory, str(directory.resolve()), data):
        return directory
    _run_ranks(run_file, be_rank, directory=directory, file=file, wanted=str(directory.resolve()), imports=RANK)
    place = place_from(os.environ)
    if place is None and not facts_path(directory).exists():
        raise UsageError(
            f"the ranks ended without training into {directory}: the script, run again, did not come to the same "
            "call of shoal.train; what leads to it must not depend on time or chance"
        )
    if place is None and (PROFILE in os.environ or TRIAL in os.environ):
        sys.exit(0)  # the steps are recorded, and there are no weights that the script could go on with
    if place is None:
        _give_back(model, directory)
    return directory


def _checked(check: ScriptCheck, config: Configuration, overrides: Sequence[str], objects: dict[str, Any]) -> NoReturn:
    """A call of `train` in a script that `shoal verify` runs: it is verified, and the process ends."""
    if check.side == "plain":
        check.trains.touch()
    else:
        _, keys = intent_of(overrides)
        _verified(config, keys, objects, steps=check.steps, exact=check.exact)
    sys.exit(0)


def _verified(
    config: Configuration, overrides: Sequence[str], objects: dict[str, Any], *, steps: int | None, exact: bool
) -> dict[str, Any] | None:
    run_file, file = _resolved(config, overrides, **objects)
    require_provable(run_file)
    directory = run_directory(run_file)
    call = blake3(f"{dumps(run_file)} {steps} {exact}".encode()).hexdigest()[:16]
    wanted, earlier = f"verify {call}", f"{VERDICT}_{call}"
    if DESCRIBES in os.environ:
        return None  # it trains no run
    if _is_for_another_call(directory, wanted, objects["data"]):
        return json.loads(os.environ[earlier]) if earlier in os.environ else None
    found: list[dict[str, Any]] = []
    with temporary_folder() as folder:
        verdict = folder / "verdict.json"
        _run_ranks(
            run_file,
            partial(_verify_rank, objects=objects, steps=steps, exact=exact, told=found.append),
            directory=directory,
            file=file,
            wanted=wanted,
            imports=("shoal.verification.verify",),
            beside={VERDICT: str(verdict)},
            patience=NOTHING_KEPT,
        )
        if place_from(os.environ) is not None:
            return found[0] if found else None
        if not verdict.exists():
            raise UsageError(
                "the ranks ended without a verdict: the script, run again, did not come to the same call of "
                "shoal.verify; what leads to it must not depend on time or chance"
            )
        os.environ[earlier] = verdict.read_text(encoding="utf-8")
        return json.loads(os.environ[earlier])


def _verify_rank(
    run_file: RunFile,
    place: Place,
    *,
    objects: dict[str, Any],
    steps: int | None,
    exact: bool,
    told: Callable[[dict[str, Any]], object],
) -> None:
    """One rank's part; rank 0 has the verdict, tells it, and leaves it where the process that started it looks."""
    from torch import nn

    from shoal.errors import VerificationFailed
    from shoal.verification.verify import verify_rank

    model = objects["model"]
    if isinstance(model, nn.Module):  # the layout and the one process each train one of their own
        model = partial(deepcopy, model)
    given = UserObjects(model=model, data=objects["data"], loss=objects["loss"])
    verdict = verify_rank(run_file, place, given, steps=steps, exact=exact)
    if verdict is None:
        return
    told(verdict.to_json())
    if VERDICT in os.environ:
        Path(os.environ[VERDICT]).write_text(json.dumps(verdict.to_json()), encoding="utf-8")
    if (check := script_check(os.environ)) is not None:
        check.verdict.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
    if not verdict.holds:
        raise VerificationFailed(verdict.sentence())


def _is_for_another_call(directory: Path, wanted: str, data: Any) -> bool:
    """Whether this process was started for another call of the script, which goes on behind this one. A process that
    reads data for this call ends here.
    """
    reads = reads_for(directory, os.environ)
    if reads:
        raise Reached(data)
    return reads is not None or (place_from(os.environ) is not None and os.environ.get(ONLY_RUN, wanted) != wanted)


def _run_ranks(
    run_file: RunFile,
    be_rank: Callable[[RunFile, Place], None],
    *,
    directory: Path,
    file: str,
    wanted: str,
    imports: Sequence[str],
    beside: Mapping[str, str] | None = None,
    patience: Patience = Patience(),
) -> None:
    """Starts the ranks with this script for the call `wanted`, or is one. `imports`: the modules that `be_rank` needs.
    `beside`: more variables that they get.

    Raises `RunFailed` and `RunStopped`; a rank that Shoal has started does not return.
    """
    startable = 0 if place_from(os.environ) or run_file.elastic else processes_of(run_file)
    with forked_ranks(startable, imports) as forks:
        place = place_from(os.environ)
        environ = os.environ if place is not None else {**os.environ, **forks, ONLY_RUN: wanted, **(beside or {})}
        code = run(
            run_file,
            own_command(),
            be_rank,
            directory=directory,
            file=file,
            patience=patience,
            environ=environ,
            planner=LOOKING if patience == NOTHING_KEPT else PLANNER,
        )
    if place is not None and place.launcher == "shoal":
        sys.exit(code)  # this process was made for the call above; what follows in the script runs once, in its parent
    if code != 0:
        kind = RunStopped if code.rank is None else RunFailed
        raise kind(int(code), rank=code.rank, sentence=code.sentence)


@contextmanager
def _refusals_said() -> Iterator[None]:
    """A refusal is one sentence on standard error, and `RunFailed` to the script."""
    try:
        yield
    except RunEnded:
        raise
    except ShoalError as refusal:
        say(f"shoal: {refusal}")
        raise RunFailed(refusal.exit_code, rank=None, sentence=str(refusal)) from refusal


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
    resume: bool | None = None,
) -> Training:
    """Begin a run whose loop is the script's own, and return its `Training`: see `shoal.own_loop.loop`.

    `config` is a run file or its tables, as dictionaries, other mappings (OmegaConf's) or dataclasses; with the
    keywords below it may be left out. `model` is an `nn.Module`, `optimizer` a `torch.optim.Optimizer` over its
    parameters that has taken no step; or tuples of several, whose parameters are called "0.weight", "1.weight", ... in
    checkpoints. `data` is a map-style data set, an iterable, a function that returns one of these, a PyTorch DataLoader
    (its data set, batch size, order, `drop_last` and `collate_fn` are taken over), a pair (training, held out), or the
    keys of a table `[data]`, such as {"kind": "parquet", "files": [...], ...}; without it, the run file's `[data]`
    counts. Batches of such data are pairs (inputs, targets).
    `batch_samples` are the samples of one step over all ranks. `epochs` says how often to go through the data, or
    `steps` how many updates to make; `run.steps`, if it is set, counts instead. `state` are objects with
    `state_dict()`, by name, such as {"scheduler": scheduler}: they are saved with the run, and a resume restores them.

    Under a launcher every rank calls it. Without one, a run of several processes (`run.processes`; by default one a
    GPU, else two, but one in a notebook) starts them with this script, and ends the process with their exit code: what
    follows runs in the ranks alone. If the run was cut off, it is resumed from its newest checkpoint. Once it is
    finished, it is trained again only if keys, the script or its code have changed, as a new run beside it; see
    `train`, for `resume` too.

    A refusal is one sentence on standard error, and the exit code of its kind.
    """
    from shoal.own_loop.start import start_own_loop

    try:
        tables, file = _tables(config)
    except ShoalError as refusal:
        leave_with(refusal, os.environ)
    if isinstance(data, Mapping):
        tables["data"] = {**tables.get("data", {}), **data}
    return start_own_loop(
        tables,
        with_flag(overrides, resume),
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
    if torch is not None and isinstance(model, torch.nn.Module):
        from shoal.checkpoint.weights import copy_weights, weights_of

        copy_weights(weights_of(directory), model)


def _resolved(config: Configuration, overrides: Sequence[str], **objects: Any) -> tuple[RunFile, str]:
    if isinstance(config, RunFile) and not overrides:
        return config, "the configuration"
    tables, file = _tables(tomllib.loads(dumps(config)) if isinstance(config, RunFile) else config)
    for name, value in objects.items():
        if value is not None:
            tables[name] = table_of_object(name, tables.get(name, {}))
    if "torch" in sys.modules and objects.get("data") is not None:
        from shoal.own_loop.objects import with_loader

        tables = with_loader(tables, objects["data"])
    return _with_types(tables, overrides, objects.get("model"), file=file), file


def _with_types(tables: dict[str, Any], overrides: Sequence[str], model: Any, *, file: str) -> RunFile:
    """The run file of `tables`, where they say no precision with that of a module that is all float64."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return run_file_of(apply(tables, overrides, RunFile), file=file)
    from shoal.own_loop.objects import widened, with_precision

    run_file = run_file_of(apply(with_precision(tables, model), overrides, RunFile), file=file)
    for sentence in widened(model, run_file) if place_from(os.environ) is None else []:
        say(f"shoal: {sentence}")
    return run_file


def _tables(config: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """The tables, and how messages call what they are from."""
    if isinstance(config, str | Path):
        return read(Path(config)), str(config)
    return ({} if config is None else tables_of(config)), "the configuration"
