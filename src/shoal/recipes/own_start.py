"""The start of a user's own loop: from what a script hands over to its `Training`."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from shoal.config.load import apply
from shoal.data.as_inputs import AsInputs, Collated
from shoal.engine.config import Float16
from shoal.errors import ConfigError, ShoalError, UsageError, UserCodeError
from shoal.launch.devices import gpus
from shoal.launch.environment import ALONE, Place, place_from
from shoal.launch.lock import RunLock
from shoal.launch.signals import StopRequest
from shoal.models.embedding_table import tables_in
from shoal.observe.facts import write_facts
from shoal.recipes.facts import run_facts
from shoal.recipes.job import build_job, introduce, restore, run_start, sinks_of, write_run_file
from shoal.recipes.objects import UserObjects
from shoal.recipes.own_loop import Training
from shoal.recipes.run import open_run
from shoal.recipes.start import Planner, checked, in_rank, run
from shoal.recipes.user_code import GIVEN
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile, run_directory, with_processes
from shoal.sync.config import ServerConfig

STARTED = "SHOAL_STARTED"
"""Of which run this process is a rank: its own number, and the run's name."""


def start_own_loop(
    tables: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    file: str,
    command: Callable[[], list[str]],
    objects: Mapping[str, Any],
    batch_samples: int | None,
    epochs: int | None,
    steps: int | None,
    planner: Planner | None,
) -> Training:
    """See `shoal.start`. `command` gives the command that starts the script again; `objects` what the script handed
    over, by the names of `UserObjects`.
    """
    try:
        _refuse_second(os.environ)
        data, loader = _data_of(objects["data"])
        run_file = _run_file(
            tables, overrides, file=file, loader=loader, data=data, samples=batch_samples, epochs=epochs, steps=steps
        )
        place = place_from(os.environ)
        if place is None:
            processes = run_file.run.processes or run_file.layout.default_processes or gpus(os.environ) or 1
            if processes > 1:
                run_file = with_processes(run_file, processes)
                code = run(run_file, command(), _never, directory=run_directory(run_file), file=file, planner=planner)
                sys.exit(int(code))
            place = ALONE
        run_file = checked(with_processes(run_file, place.world_size), place, file=file, planner=planner)
        _check_layout(run_file)
        _check_servers(run_file, objects["model"])
        _check_optimizers(run_file, objects["optimizer"])
    except ShoalError as refusal:
        print(f"shoal: {refusal}", file=sys.stderr, flush=True)
        sys.exit(refusal.exit_code)
    stack = ExitStack()
    stack.enter_context(in_rank(place, os.environ))
    _leave_through(stack)
    try:
        stack.enter_context(_marked(run_file, place, os.environ))
        return _training(run_file, place, _objects(objects, data), stack)
    except BaseException:
        stack.__exit__(*sys.exc_info())  # leaves with the exit code and the sentence of the error
        raise


def _training(run_file: RunFile, place: Place, objects: UserObjects, stack: ExitStack) -> Training:
    directory = run_directory(run_file)
    if place.rank == 0 and place.launcher != "shoal":
        stack.enter_context(RunLock(directory))
    sinks = stack.enter_context(sinks_of(run_file, place))
    opened = open_run(run_file, place, objects, store=HashStore() if place is ALONE else None)
    resumed_step = restore(opened, directory, sinks)
    opened.state.restore_extra()
    if place.rank == 0:
        write_run_file(opened, directory, sinks)
        write_facts(directory, run_facts(opened))
    introduce(sinks, opened, resumed_step)
    stop = stack.enter_context(StopRequest())
    job = build_job(opened, directory, sinks, stack, stop_requested=lambda: stop.requested, own_loop=True)
    stack.callback(job.saver.close)
    opened.mesh.ledger.take()  # what the start sent belongs to no step
    sinks.start(run_start(opened))
    training = Training(opened, job, stack)
    atexit.register(_close_at_exit, training, stack)
    return training


def _close_at_exit(training: Training, stack: ExitStack) -> None:
    """What is due after the last step may fail where no frame of the script is left: the process has its code still."""
    try:
        training.close()
    except BaseException:
        stack.__exit__(*sys.exc_info())


def _objects(given: Mapping[str, Any], data: Any) -> UserObjects:
    """What the script handed over: several models as one module, whose parameters are called "0.weight", ..."""
    model, optimizer = given["model"], given["optimizer"]
    whole = nn.ModuleList(model) if isinstance(model, list | tuple) else model
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    return UserObjects(model=whole, data=data, optimizers=optimizers, state=given["state"])


@contextmanager
def _marked(run_file: RunFile, place: Place, environ: MutableMapping[str, str]) -> Iterator[None]:
    """This process is a rank of the run. One that was started as a rank is that of no other run afterwards."""
    environ[STARTED] = f"{os.getpid()} {run_file.run.name}"
    try:
        yield
    finally:
        if place is ALONE:
            environ.pop(STARTED, None)


def _refuse_second(environ: Mapping[str, str]) -> None:
    """Raises `UsageError` in a process that is a rank of a run already."""
    pid, _, name = environ.get(STARTED, "").partition(" ")
    if pid == str(os.getpid()):
        raise UsageError(
            f"shoal.start was called again in a rank of run {name!r}; a script has one run: pass several models and "
            "optimizers to one call, model=(g, d), optimizer=(first, second), or close() the first run of one process"
        )


def _leave_through(stack: ExitStack) -> None:
    """What the script raises ends the run with it."""
    before = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        stack.__exit__(kind, error, trace)
        before(kind, error, trace)

    sys.excepthook = failed


def _never(run_file: RunFile, place: Place) -> None:
    raise AssertionError("this process starts ranks and is none")


def _data_of(data: Any) -> tuple[Any, DataLoader | None]:
    """The data sets, each sample as inputs alone; and the DataLoader they came in."""
    loader: DataLoader | None = data if isinstance(data, DataLoader) else None
    sets: Any = (loader.dataset, None) if loader is not None else data if _is_pair(data) else (data, None)
    for part in sets:
        if part is not None and not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise UserCodeError(
                f"the data is of type {type(part).__name__}; shoal.start takes a data set with len(d) and d[i], a "
                "DataLoader of one, or a pair (training, held out)"
            )
    if loader is not None and loader.collate_fn is not default_collate:
        collate = loader.collate_fn
        return (Collated(sets[0], collate), None), loader
    return tuple(None if part is None else AsInputs(part) for part in sets), loader


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and all(hasattr(part, "__getitem__") for part in data)


def _run_file(
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
    """The run file of a loop: what the script leaves out follows from what it handed over."""
    whole = apply(
        {**tables, "model": {}, "data": _without(tables.get("data"), "kind", "build", "arguments")}, overrides, RunFile
    )
    unread = next((name for name in ("optimizer", "schedule", "loss") if name in whole), None)
    if unread is not None:
        raise ConfigError(
            f"{file}: [{unread}] has no meaning where the loop is the script's own; set it in the script, and leave "
            "its keys out"
        )
    run_table, batch = dict(whole.get("run", {})), dict(whole.get("batch", {}))
    run_table.setdefault("name", Path(sys.argv[0]).stem or "script")
    if "global_samples" not in batch:
        size = samples if samples is not None else getattr(loader, "batch_size", None)
        if size is None:
            raise ConfigError(f"{file}: batch.global_samples is missing; pass batch_samples, the samples of one step")
        batch["global_samples"] = size
    if "steps" not in run_table:
        if (epochs is None) == (steps is None):
            raise ConfigError(f"{file}: run.steps is missing; pass epochs or steps, one of them, or set it")
        run_table["steps"] = steps or ceil((epochs or 0) * len(data[0]) / batch["global_samples"])
    given = {"kind": "python", "build": GIVEN}
    data_table = {**_of_loader(loader), **whole.get("data", {}), **given}
    return run_file_of(
        {**whole, "run": run_table, "batch": batch, "model": {**whole.get("model", {}), **given}, "data": data_table},
        file=file,
    )


def _without(table: Any, *keys: str) -> dict[str, Any]:
    return {} if table is None else {key: value for key, value in dict(table).items() if key not in keys}


def _of_loader(loader: DataLoader | None) -> dict[str, Any]:
    """The order of a DataLoader. Raises `UserCodeError` for one that Shoal cannot reproduce."""
    if loader is None:
        return {}
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler) or loader.batch_size is None:
        raise UserCodeError(
            f"the DataLoader has a sampler of its own ({type(loader.sampler).__name__}); Shoal divides the samples "
            "among ranks itself, so that a resumed run uses each once: leave the sampler out"
        )
    return {"shuffle": isinstance(loader.sampler, RandomSampler)}


def _check_optimizers(run_file: RunFile, optimizer: Any) -> None:
    """Raises `ConfigError` for a precision that several optimizers cannot share."""
    if isinstance(run_file.precision, Float16) and isinstance(optimizer, list | tuple) and len(optimizer) > 1:
        raise ConfigError(
            f'precision.kind = "float16" with {len(optimizer)} optimizers: one loss scale would follow from all of '
            'them; use "bfloat16", or one optimizer'
        )


def _check_servers(run_file: RunFile, model: Any) -> None:
    """Raises `ConfigError` for what would leave a rank without batches, or the script without its weights."""
    if run_file.sync.serving_only:
        raise ConfigError(
            f"sync.servers = {run_file.sync.serving_only}: dedicated servers run no script; set it to 0, or let "
            "shoal.train run the loop"
        )
    if isinstance(run_file.sync, ServerConfig) and isinstance(model, nn.Module) and tables_in(model):
        raise ConfigError(
            "the model has an EmbeddingTable, which would live on servers alone, out of reach of the script: let "
            "shoal.train run the loop, or use nn.Embedding"
        )


def _check_layout(run_file: RunFile) -> None:
    """Raises `ConfigError` for what takes the loop's own work from it."""
    layout = run_file.layout
    if run_file.elastic is not None:
        raise ConfigError("[elastic] needs the loop of shoal.train: leave the table out, or call shoal.train")
    for axis in ("tensor", "pipeline", "context", "expert"):
        if getattr(layout, axis, 1) not in (1, None):
            raise ConfigError(
                f"layout.{axis} = {getattr(layout, axis)}: a script's own loop can be replicated and sharded "
                "(layout.replicate, layout.shard); for the other axes let shoal.train run the loop"
            )
    observe = run_file.observe
    if run_file.gradients.schedule == "priority" or observe.noise_every_steps or observe.layer_norms_every_steps:
        raise ConfigError(
            'gradients.schedule = "priority", observe.noise_every_steps and observe.layer_norms_every_steps need the '
            "loop of shoal.train; leave them out"
        )
    shares = (run_file.run.processes or 1) if layout.shard != 1 else 1
    micro = run_file.batch.micro_samples or max(1, run_file.batch.global_samples // shares)
    if shares > 1 and run_file.batch.global_samples % (shares * micro):
        raise ConfigError(
            f"batch.global_samples = {run_file.batch.global_samples} is not {shares} shares of whole microbatches of "
            f"{micro}: under layout.shard every rank computes the same number of them; make it a multiple of "
            f"{shares * micro}"
        )
