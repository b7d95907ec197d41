"""The start of a user's own loop: from what a script hands over to its `Training`."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from torch._C._distributed_c10d import HashStore
from torch._dynamo.exc import TorchDynamoException
from torch.utils.data import DataLoader, IterableDataset

from shoal.assembly.conclusion import stop_request_of
from shoal.assembly.finished_run import chosen_run, intent_of
from shoal.assembly.hang_watch import watch_hangs
from shoal.assembly.job import build_job, introduce, restore, run_start, sinks_of
from shoal.assembly.objects import UserObjects, data_of
from shoal.assembly.reading import epoch_steps
from shoal.assembly.run import Run, open_run
from shoal.assembly.run_record import run_facts, write_run_file
from shoal.assembly.start import Planner, as_launched, checked, in_rank, leave_with, processes_of, run
from shoal.assembly.user_code import GIVEN, table_of_object
from shoal.config.load import apply
from shoal.data.dataset import Dataset
from shoal.errors import ConfigError, DataError, ShoalError, UsageError
from shoal.launcher.environment import ALONE, Place, place_from
from shoal.launcher.forks import forked_ranks
from shoal.launcher.lock import RunLock
from shoal.launcher.own_script import STARTED, ScriptCheck, refuse_second, script_check
from shoal.launcher.supervision import say
from shoal.observe.facts import write_facts
from shoal.own_loop.comparison import Comparison, comparable, start_as_plain
from shoal.own_loop.loop import Training
from shoal.own_loop.objects import (
    check_alone,
    data_of_script,
    is_compiled,
    is_endless,
    objects_of,
    order_of_loader,
    require_own_loop,
    samples_of_step,
    stop_in_reader,
    unread_arguments,
    unsaved_scheduler,
    widened,
    with_precision,
)
from shoal.own_loop.plain import PlainTraining
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile, run_directory, with_processes

# The run file of a script's own loop: what the script leaves out follows from what it hands over.


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
        if not epochs or epochs < 1:
            raise ConfigError(f"epochs = {epochs}: a run has at least 1")
        run_table["steps"] = epoch_steps(run_file.batch, _samples(run_file, data), epochs)
        run_file = run_file_of({**tables, "data": data_table}, file=file)
    return run_file


def _samples(run_file: RunFile, data: Any) -> int:
    """Samples of an epoch. Raises `ConfigError` for what has no length, `DataError` for what is empty."""
    if data is not None and is_endless(data[0]):
        raise ConfigError("epochs of an iterable, whose length is not known: pass steps")
    if data is not None and len(data[0]) == 0:
        raise DataError("the training data has no samples: give at least one")
    if data is not None:
        return len(data[0])
    found = data_named(run_file)
    if found.endless or found.parts:
        raise ConfigError("epochs of a stream or a mixture, which have none: pass steps")
    return len(found.train)


def data_named(run_file: RunFile) -> Dataset:
    """What `[data]` names."""
    return data_of(run_file, UserObjects())


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
        refuse_second("shoal.start", os.environ)
        check_alone()
        data, loader = data_of_script(objects["data"])
        intent, keys = intent_of(overrides)
        check = script_check(os.environ)
        run_file = run_file_of_loop(
            with_precision(dict(tables), objects["model"]), keys, file=file, loader=loader, data=data,
            samples=batch_samples, epochs=epochs, steps=steps,
        )  # fmt: skip
        run_file, notes = (chosen_run(run_file, intent), []) if check is None else comparable(run_file, check)
        stop_in_reader(data, run_directory(run_file))
        if check is not None and check.side == "plain":
            return _plain(run_file, objects, data, check)
        place = place_from(os.environ)
        if place is None:
            require_own_loop(run_file, model=objects["model"], optimizer=objects["optimizer"])
            processes = _processes(run_file, command)
            if processes > 1:
                run_file = with_processes(run_file, processes)
                directory = run_directory(run_file)
                with forked_ranks(processes) as forks:
                    place = place_from(os.environ)
                    if place is None:
                        environ = {**os.environ, **forks}
                        code = run(
                            run_file, command(), _never,
                            directory=directory, file=file, planner=planner, environ=environ,
                        )  # fmt: skip
                        sys.exit(int(code))
        place = place or ALONE
        run_file = checked(as_launched(run_file, place), place, file=file, planner=planner)
        require_own_loop(run_file, model=objects["model"], optimizer=objects["optimizer"])
        given = objects_of(objects, data_named(run_file) if data is None else data)
        narrow = widened(given.model, run_file)
        if check is not None:
            start_as_plain(given.model, check)
    except ShoalError as refusal:
        leave_with(refusal, os.environ)
    stack = ExitStack()
    advice = None if planner is None else partial(planner.memory_advice, run_file)
    stack.enter_context(in_rank(place, os.environ, advice))
    _leave_through(stack)
    try:
        stack.enter_context(_told_of_compiled(run_file))
        stack.enter_context(_marked(run_file, place, os.environ))
        compared = None if check is None else partial(Comparison, check=check, notes=notes)
        said = [*unread_arguments(loader), *narrow, *unsaved_scheduler(given)]
        compiled = is_compiled(objects["model"])
        return _training(run_file, place, given, stack, said=said, compared=compared, compiled=compiled)
    except BaseException:
        stack.__exit__(*sys.exc_info())  # leaves with the exit code and the sentence of the error
        raise


def _plain(run_file: RunFile, objects: Mapping[str, Any], data: Any, check: ScriptCheck) -> Training:
    """The loop in plain PyTorch, which has the calls of a `Training` (a test compares them)."""
    given = objects_of(objects, data_named(run_file) if data is None else data)
    return cast(Training, PlainTraining(run_file, given, check, compiled=is_compiled(objects["model"])))


def _training(
    run_file: RunFile,
    place: Place,
    objects: UserObjects,
    stack: ExitStack,
    *,
    said: Sequence[str] = (),
    compared: Callable[[Run], Comparison] | None = None,
    compiled: bool = False,
) -> Training:
    directory = run_directory(run_file)
    if place.rank == 0 and place.launcher != "shoal":
        stack.enter_context(RunLock(directory))
    sinks = stack.enter_context(sinks_of(run_file, place))
    store = HashStore() if place is ALONE else None
    opened = open_run(run_file, place, objects, store=store, activity=sinks.activity)
    stack.enter_context(opened.default_group())
    resumed_step = restore(opened, directory, sinks)
    opened.state.restore_extra()
    if place.rank == 0:
        write_run_file(opened, directory, sinks)
        write_facts(directory, run_facts(opened))
    introduce(sinks, opened, resumed_step)
    for sentence in said:
        sinks.note(sentence)
    stop = stack.enter_context(stop_request_of(opened, say=sinks.warn))
    stack.enter_context(watch_hangs(opened, directory, say=sinks.warn))
    job = build_job(opened, directory, sinks, stack, stop_requested=lambda: stop.requested, own_loop=True)
    stack.callback(job.saver.close)
    opened.mesh.ledger.take()  # what the start sent belongs to no step
    sinks.start(run_start(opened))
    comparison = None if compared is None else compared(opened)
    training = Training(opened, job, stack, comparison, compiled=compiled)
    atexit.register(_close_at_exit, training, stack)
    return training


def _close_at_exit(training: Training, stack: ExitStack) -> None:
    """What is due after the last step may fail where no frame of the script is left: the process has its code still."""
    try:
        training.close()
    except BaseException:
        stack.__exit__(*sys.exc_info())


@contextmanager
def _told_of_compiled(run_file: RunFile) -> Iterator[None]:
    """Raises `ConfigError` in the place of an error of the compiler's, which has met the collectives of ZeRO-3."""
    try:
        yield
    except TorchDynamoException as error:
        if run_file.layout.shard != 1 and run_file.memory.zero == 3:
            raise ConfigError(
                "the script compiles a function that calls the model, and under memory.zero = 3 its layers fetch their "
                "weights while they compute, which a compiled program cannot: leave torch.compile out, or set "
                "memory.zero to 1 or 2"
            ) from error
        raise


@contextmanager
def _marked(run_file: RunFile, place: Place, environ: MutableMapping[str, str]) -> Iterator[None]:
    """This process is a rank of the run. One that was started as a rank is that of no other run afterwards."""
    environ[STARTED] = f"{os.getpid()} {run_file.run.name}"
    try:
        yield
    finally:
        if place is ALONE:
            environ.pop(STARTED, None)


def _leave_through(stack: ExitStack) -> None:
    """What the script raises ends the run with it."""
    before = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        stack.__exit__(kind, error, trace)
        before(kind, error, trace)

    sys.excepthook = failed


def _never(run_file: RunFile, place: Place) -> None:
    raise AssertionError("this process starts ranks and is none")


def _processes(run_file: RunFile, command: Callable[[], list[str]]) -> int:
    """As many as of any run; one, which is said, where nobody asks for more and there is no script to start again."""
    wanted, asked = processes_of(run_file), run_file.run.processes or run_file.layout.default_processes
    if wanted == 1 or asked is not None:
        return wanted
    try:
        command()
    except UsageError:
        say("shoal: there is no script to start more ranks with: this process trains alone")
        return 1
    return wanted
