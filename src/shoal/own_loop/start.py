"""The start of a user's own loop: from what a script hands over to its `Training`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, cast

from torch._C._distributed_c10d import HashStore

from shoal.assembly.finished_run import chosen_run, intent_of
from shoal.assembly.hang_watch import watch_hangs
from shoal.assembly.job import build_job, introduce, restore, run_start, sinks_of
from shoal.assembly.objects import UserObjects
from shoal.assembly.preempted import stop_request_of
from shoal.assembly.run import Run, open_run
from shoal.assembly.run_record import run_facts, write_run_file
from shoal.assembly.start import Planner, as_launched, checked, in_rank, leave_with, processes_of, run
from shoal.errors import ShoalError, UsageError
from shoal.launch.environment import ALONE, Place, place_from
from shoal.launch.forks import forked_ranks
from shoal.launch.lock import RunLock
from shoal.launch.own_script import ScriptCheck, script_check
from shoal.launch.supervision import say
from shoal.observe.facts import write_facts
from shoal.own_loop.comparison import Comparison, comparable, start_as_plain
from shoal.own_loop.loop import Training
from shoal.own_loop.loop_file import data_named, run_file_of_loop
from shoal.own_loop.objects import (
    check_alone,
    data_of_script,
    objects_of,
    stop_in_reader,
    unread_arguments,
)
from shoal.own_loop.plain import PlainTraining
from shoal.own_loop.refusals import require_own_loop
from shoal.runfile.run_file import RunFile, run_directory, with_processes

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
        check_alone()
        data, loader = data_of_script(objects["data"])
        intent, keys = intent_of(overrides)
        check = script_check(os.environ)
        run_file = run_file_of_loop(
            tables, keys, file=file, loader=loader, data=data, samples=batch_samples, epochs=epochs, steps=steps
        )
        run_file, notes = (chosen_run(run_file, intent), []) if check is None else comparable(run_file, check)
        stop_in_reader(data, run_directory(run_file))
        if check is not None and check.side == "plain":
            return _plain(run_file, objects, data, check)
        place = place_from(os.environ)
        if place is None:
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
        if check is not None:
            start_as_plain(given.model, check)
    except ShoalError as refusal:
        leave_with(refusal, os.environ)
    stack = ExitStack()
    advice = None if planner is None else partial(planner.memory_advice, run_file)
    stack.enter_context(in_rank(place, os.environ, advice))
    _leave_through(stack)
    try:
        stack.enter_context(_marked(run_file, place, os.environ))
        compared = None if check is None else partial(Comparison, check=check, notes=notes)
        return _training(run_file, place, given, stack, said=unread_arguments(loader), compared=compared)
    except BaseException:
        stack.__exit__(*sys.exc_info())  # leaves with the exit code and the sentence of the error
        raise


def _plain(run_file: RunFile, objects: Mapping[str, Any], data: Any, check: ScriptCheck) -> Training:
    """The loop in plain PyTorch, which has the calls of a `Training` (a test compares them)."""
    given = objects_of(objects, data_named(run_file) if data is None else data)
    return cast(Training, PlainTraining(run_file, given, check))


def _training(
    run_file: RunFile,
    place: Place,
    objects: UserObjects,
    stack: ExitStack,
    *,
    said: Sequence[str] = (),
    compared: Callable[[Run], Comparison] | None = None,
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
    training = Training(opened, job, stack, None if compared is None else compared(opened))
    atexit.register(gc.freeze)  # the interpreter's last collection takes down torch, object by object: half a second
    atexit.register(_close_at_exit, training, stack)
    return training


def _close_at_exit(training: Training, stack: ExitStack) -> None:
    """What is due after the last step may fail where no frame of the script is left: the process has its code still."""
    try:
        training.close()
    except BaseException:
        stack.__exit__(*sys.exc_info())


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
