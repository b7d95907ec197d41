"""Being a rank, or starting them: what a process of `shoal train` or of a user's script does first.

A process that a launcher started (Shoal's own, torchrun, srun, mpiexec) is a rank. Any other starts the ranks, each
with the command that it was itself started with, and waits for them. It checks the run before it imports torch, once
for all ranks of `shoal train`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from shoal.assembly.failed_run import alerts, largest_tensors, tell_of_failure
from shoal.assembly.lab import processes_in
from shoal.comm.mpi_world import why_no_mpi
from shoal.errors import EnvironmentFault, OutOfMemory, ShoalError, Stopped, UsageError
from shoal.files import leave_without_collection, refused_file, temporary_folder
from shoal.launcher.devices import ONE_RANK_DEVICES, gpus, too_few_gpus
from shoal.launcher.environment import Place, place_from
from shoal.launcher.failure import FAILURE_FOLDER, TORCHRUN_FILE, failure_of, is_out_of_memory, report_failure
from shoal.launcher.lab.lab_file import Lab
from shoal.launcher.lab.network import run_in_lab
from shoal.launcher.lock import RunLock
from shoal.launcher.orphans import die_with_parent
from shoal.launcher.signals import end_at_once
from shoal.launcher.spawn import ExitCode, run_ranks
from shoal.launcher.supervision import NOTHING_KEPT, Patience, say
from shoal.launcher.versions import check_torch_version, installed
from shoal.launcher.warm import is_shoals_own, preload
from shoal.observe.busy import importing_torch
from shoal.observe.facts import facts_path, write_facts
from shoal.resilience.config import COORDINATOR, ElasticConfig
from shoal.runfile.federated_rules import without_clients
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile, statistics_group, with_processes

DEFAULT_PROCESSES = 2
RANK = ("torch", "numpy", "shoal.cli.main", "shoal.planning.prediction", "shoal.training")
"""What a rank of `shoal train` imports, by name: it is above this room. The ranks of a host are forks of the process
that has made these imports once."""


@dataclass(frozen=True)
class Planner:
    """What the planner does for a start. `arrange` completes the layout of a run file on a known number of ranks
    (`layout.auto`; no place: in the process that starts the ranks), `memory_advice` says what would free memory.
    `made_smaller` makes the next start of a run that ran out of memory need less, and says how; None: it cannot.
    """

    arrange: Callable[[RunFile, Place | None], RunFile]
    memory_advice: Callable[[RunFile], str]
    made_smaller: Callable[[RunFile], str | None]


def processes_of(run_file: RunFile, environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks to start: as the run file says, else the layout's product, else one per GPU, else two."""
    if run_file.elastic is not None:
        return run_file.run.processes or run_file.elastic.max * run_file.layout.replica_size
    if run_file.run.processes is not None:
        run_file.layout.layout(run_file.run.processes)
        return run_file.run.processes
    if run_file.layout.default_processes is not None:
        return run_file.layout.default_processes
    there = gpus(environ) if run_file.run.device != "cpu" else 0
    return there or min(DEFAULT_PROCESSES, max(1, run_file.batch.global_samples // statistics_group(run_file.model)))


def run(
    run_file: RunFile,
    command: Sequence[str],
    be_rank: Callable[[RunFile, Place], None],
    *,
    directory: Path,
    file: str,
    patience: Patience = Patience(),
    lab: Lab | None = None,
    planner: Planner | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ExitCode:
    """The exit code of the whole run; a rank never returns from a failure, it leaves with its code.

    A run holds the lock of its directory, unless the `patience` with its ranks is `NOTHING_KEPT`: then nothing is
    written there. In a `lab` there are as many ranks as it has. Raises `UsageError` and `EnvironmentFault` before any
    process has started.
    """
    leave_without_collection()
    writes = patience != NOTHING_KEPT
    place = place_from(environ)
    started_here = processes_of(run_file, environ) if lab is None else processes_in(lab, run_file.run, place)
    if place is None or run_file.elastic is not None:
        processes, sized = started_here, with_processes(run_file, started_here)
    else:
        processes, sized = place.world_size, as_launched(run_file, place)
    run_file = checked(sized, place, file=file, planner=planner)
    if run_file.run.device == "cuda" and (installed("torch") or "").endswith("+cpu"):
        raise EnvironmentFault(
            f'run.device = "cuda", and torch {installed("torch")} is built without CUDA: install a build with it, or '
            'set run.device to "auto" or "cpu"'
        )
    if place is None and lab is None:
        _check_gpus(run_file, processes, environ)
    if place is None and run_file.wire.transport == "mpi":
        raise EnvironmentFault(f'wire.transport = "mpi", but {why_no_mpi(environ)}; or set it to "auto"')
    if place is None:
        return _Launch(run_file, sized, command, processes, directory, patience, lab, planner, environ).to_the_end()

    def ranked() -> None:
        locks = writes and place.rank == 0 and place.launcher != "shoal"
        try:
            with RunLock(directory) if locks else nullcontext():
                be_rank(run_file, place)
        except OSError as error:
            if not writes or directory.is_dir():
                raise
            raise EnvironmentFault(
                f"the run directory {directory} was removed while the run wrote to it ({error}): start the run again, "
                "and remove a run directory only when its run is over"
            ) from error

    as_rank(place, ranked, environ, None if planner is None else partial(planner.memory_advice, run_file))
    return ExitCode(0)


@dataclass(frozen=True)
class _Launch:
    """A run whose ranks this process starts: `processes` of them, each with `command`. `sized` is the run file as it
    was before the planner completed it."""

    run_file: RunFile
    sized: RunFile
    command: Sequence[str]
    processes: int
    directory: Path
    patience: Patience
    lab: Lab | None
    planner: Planner | None
    environ: Mapping[str, str]

    def to_the_end(self) -> ExitCode:
        """Starts the ranks and waits for them; says what is to be done where the run failed. Raises `EnvironmentFault`
        where a file is refused that this process writes, as on a full disk.
        """
        try:
            return self._to_the_end()
        except OSError as error:
            if (fault := refused_file(error)) is None:
                raise
            raise fault from error

    def _to_the_end(self) -> ExitCode:
        joins, writes = _joins_a_coordinator(self.run_file.elastic, self.environ), self.patience != NOTHING_KEPT
        began_s = time.time()
        with ExitStack() as stack:
            keep_fds = [stack.enter_context(RunLock(self.directory, shared=joins)).fd] if writes else []
            logs = self.directory if writes else stack.enter_context(temporary_folder())
            if writes and not joins and facts_path(self.directory).is_file():
                write_facts(self.directory, {"state": ""})  # that of the start before
            code, goes_on_elsewhere = self._started(stack, logs, keep_fds)
        if code == OutOfMemory.exit_code and self.planner is not None:
            print(self.planner.memory_advice(self.run_file), file=sys.stderr, flush=True)
        if writes and not goes_on_elsewhere and code not in (0, Stopped.exit_code):
            tell_of_failure(self.run_file, self.directory, code, since_s=began_s)
        return code

    def _started(self, stack: ExitStack, logs: Path, keep_fds: Sequence[int]) -> tuple[ExitCode, bool]:
        """The exit code, and whether the run goes on at other hosts."""
        # A script of the user's own may do anything before it calls Shoal.
        start_s = self.run_file.run.start_timeout_s if is_shoals_own(self.command) else None
        patience = replace(self.patience, start_s=start_s)
        if self.lab is not None:
            code = run_in_lab(
                self.lab, self.command, run_directory=logs, environ=self.environ, keep_fds=keep_fds, patience=patience
            )
            return code, False
        if self.run_file.elastic is not None:
            return self._elastic(self.run_file.elastic, stack, logs, keep_fds, start_s)
        return self._fixed(logs, keep_fds, patience), False

    def _elastic(
        self, config: ElasticConfig, stack: ExitStack, logs: Path, keep_fds: Sequence[int], start_s: float | None
    ) -> tuple[ExitCode, bool]:
        from shoal.fleet.launch import ElasticJob, run_elastic

        run, ranks = self.run_file.run, self.run_file.layout.replica_size
        warn = stack.enter_context(alerts(self.run_file.observe.webhook, self.directory.name))
        job = ElasticJob(
            self.command, ranks, run.steps, logs, self.run_file.batch.global_samples, warn, start_s,
            (run.preemption_file, run.preemption_url),
        )  # fmt: skip
        as_many = msgspec.structs.replace(config, max=self.processes // ranks)
        return run_elastic(job, as_many, environ=self.environ, keep_fds=keep_fds)

    def _fixed(self, logs: Path, keep_fds: Sequence[int], patience: Patience) -> ExitCode:
        """Ranks that all stay to the end. Where memory runs out, they start again while the planner makes them need
        less."""
        environ = self.environ
        if is_shoals_own(self.command) and self.processes > 1:
            with importing_torch():
                environ = preload(RANK, environ)
        started = partial(
            run_ranks,
            self.command,
            processes=self.processes,
            run_directory=logs,
            environ=environ,
            keep_fds=keep_fds,
            patience=patience,
        )
        code = started()
        while code == OutOfMemory.exit_code and self.planner and (how := self.planner.made_smaller(self.sized)):
            say(f"shoal: {how}")
            code = started()
        return code


def _check_gpus(run_file: RunFile, processes: int, environ: Mapping[str, str]) -> None:
    """Raises `EnvironmentFault` for ranks of this host that would share a GPU. Where the driver shows none, they look
    themselves.
    """
    if run_file.run.device in ONE_RANK_DEVICES and processes > 1:
        raise EnvironmentFault(
            f'run.device = "{run_file.run.device}" with {processes} ranks: it is for one rank so far; set '
            'run.processes=1, or run.device to "auto"'
        )
    on_gpus = run_file.run.device == "cuda" or (
        run_file.run.device == "auto" and not (installed("torch") or "").endswith("+cpu")
    )
    there = gpus(environ)
    if on_gpus and 0 < there < processes and not run_file.run.share_gpus:
        raise EnvironmentFault(too_few_gpus(processes, there))


def _joins_a_coordinator(elastic: ElasticConfig | None, environ: Mapping[str, str]) -> bool:
    """Whether launchers on other hosts may be part of the same run. Raises `UsageError` where none can be."""
    named = bool(environ.get(COORDINATOR))
    if named and elastic is None:
        raise UsageError(
            "a coordinator is named, and the run file has no table [elastic]: it says how many replicas train; add it, "
            "or leave the coordinator out"
        )
    return named


def as_launched(run_file: RunFile, place: Place) -> RunFile:
    """The run file on the ranks that a launcher has started. Rank 0 says so where `run.processes` is another number."""
    asked = run_file.run.processes
    if asked not in (None, place.world_size) and place.rank == 0:
        ranks = f"{place.world_size} rank{'s' * (place.world_size > 1)}"
        say(f"shoal: run.processes = {asked} is passed over: the launcher has started {ranks}, and all of them train")
    return with_processes(run_file, place.world_size)


def checked(run_file: RunFile, place: Place | None, *, file: str, planner: Planner | None) -> RunFile:
    """The run file with its layout completed, after every check that needs no rank. Raises `ConfigError` and others."""
    if planner is not None:
        run_file = planner.arrange(run_file, place)
    check_across(without_clients(run_file), file=file)
    check_torch_version()
    return run_file


def as_rank(
    place: Place, work: Callable[[], None], environ: Mapping[str, str], advice: Callable[[], str] | None = None
) -> None:
    """Does a rank's `work`; see `in_rank`."""
    with in_rank(place, environ, advice):
        work()
    sys.stdout.flush()


@contextmanager
def in_rank(place: Place, environ: Mapping[str, str], advice: Callable[[], str] | None = None) -> Iterator[None]:
    """A rank's work: the process ends with its launcher; if it fails, it leaves a record and never comes out.

    `advice` says what would free memory, to a rank that ran out of it under another launcher than Shoal's own, which
    says it itself.
    """
    leave_without_collection()
    folder, torchrun_file = (
        Path(path) if (path := environ.get(name)) else None for name in (FAILURE_FOLDER, TORCHRUN_FILE)
    )
    with report_failure(place, folder, torchrun_file=torchrun_file), end_at_once():
        if place.launcher == "shoal":
            die_with_parent(environ)
        try:
            yield
        except Exception as error:
            if place.launcher != "shoal" and place.world_size > 1:
                _tell_others(place, environ, error)
            if is_out_of_memory(error) and not isinstance(error, OutOfMemory):
                said = [] if place.launcher == "shoal" or advice is None else _said(advice)
                lines = [failure_of(error, place.rank).message, *_said(largest_tensors), *said]
                raise OutOfMemory("\n".join(lines)) from error
            raise


def leave_with(refusal: ShoalError, environ: Mapping[str, str]) -> NoReturn:
    """Ends the process with what a script's call was refused for. A rank of Shoal's own launcher leaves a record: the
    launcher says it once for all.
    """
    place = place_from(environ) if FAILURE_FOLDER in environ else None
    if place is not None:
        with in_rank(place, environ):
            raise refusal
    say(f"shoal: {refusal}")
    sys.exit(refusal.exit_code)


def _said(advice: Callable[[], str]) -> list[str]:
    try:
        return [advice()]
    except MemoryError:
        return []  # there is none left for it either


def _tell_others(place: Place, environ: Mapping[str, str], error: Exception) -> None:
    """Of a failure of this rank's own: ranks that still wait for it at the start then end too, with its sentence."""
    failure = failure_of(error, place.rank)
    if not failure.secondary and failure.exit_code != Stopped.exit_code:
        from shoal.launcher.rendezvous import tell_failure

        tell_failure(place, environ, failure.message or failure.kind)
