"""How a run saves: its saver, when a checkpoint is due, and the copies in a remote store and on other hosts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import msgspec

from shoal.assembly.run import Run
from shoal.assembly.run_gradients import zero_of
from shoal.checkpoint.agreement import MessageExchange
from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.directories import Below, Directories, find_directories, share_newest
from shoal.checkpoint.objects import Places, unheard
from shoal.checkpoint.remote import RemoteCheckpoints, RemoteCopies, fetch_newest
from shoal.checkpoint.save import Saver
from shoal.comm.board import Board
from shoal.engine.save_policy import ByFailures, EverySteps, SaveInterval
from shoal.errors import EnvironmentFault
from shoal.fleet.processes import SEVERAL_HOSTS
from shoal.observe.events import attempts, failures, read_events, training_time_s
from shoal.observe.facts import number_of, read_facts, write_facts
from shoal.observe.sink import Sinks
from shoal.runfile.run_file import RunFile
from shoal.topology.layout import INSIDE_REPLICA

SAVE_INTERVAL = "save_interval_steps"
"""The fact of a run that holds the measured interval."""


def build_saver(run: Run, directory: Path, exchange: MessageExchange | None) -> Saver:
    """What saves this rank's share into `directory`; ranks meet by `exchange`, None: a board on the run's store.

    Where hosts see different directories, the ranks of each save a whole checkpoint there. Raises `EnvironmentFault`
    where those of one hold only a part of the state.
    """
    run_file, mesh, injector = run.run_file, run.mesh, run.process.injector
    exchange = exchange or _board(run)
    directories = _directories(run, directory, Below(exchange, f"save/{mesh.generation}"))
    _require_whole_state(run, directories)
    group = directories.group_of(mesh.rank)
    return Saver(
        directory,
        rank=group.index(mesh.rank),
        world_size=len(group),
        exchange=exchange if directories.shared else Below(exchange, f"directory-{group[0]}"),
        config=_with_staging(run_file),
        timeout_s=run_file.wire.timeout_s,
        split=mesh.layout.replica_size > 1
        or zero_of(run_file.memory, mesh) is not None
        or not run.generation.sync.keeps_replicas_equal
        or run.generation.coded is not None
        or not run.state.is_whole_on_replicas,
        on_point=unheard if injector is None else lambda label: injector.reached(f"save/{label}"),
    )


def _with_staging(run_file: RunFile) -> CheckpointConfig:
    """A share of a save is laid out where what it is copied from has room."""
    config, offload = run_file.checkpoint, run_file.memory.offload
    on_disk = "disk" in (offload.optimizer, offload.parameters) and config.compress != "deltas"
    return msgspec.structs.replace(config, staging="disk") if config.staging == "auto" and on_disk else config


def share_between_hosts(run: Run, directory: Path, exchange: MessageExchange | None, sinks: Sinks) -> None:
    """Brings the newest checkpoint of all hosts' directories to those that lack it; all ranks wait for it."""
    exchange = Below(exchange or _board(run), f"restore/{run.mesh.generation}")
    directories = _directories(run, directory, exchange)
    if directories.shared:
        return
    rank, timeout_s = run.mesh.rank, run.run_file.run.start_timeout_s
    if rank == 0:
        sinks.note(
            f"the hosts of ranks {', '.join(str(group[0]) for group in directories.groups)} share no run directory: "
            "each keeps all checkpoints"
        )
    said = share_newest(directory, directories, exchange, rank=rank, timeout_s=timeout_s)
    if said:
        sinks.note(said)


def _board(run: Run) -> Board:
    return Board(run.process.store, timeout_s=run.run_file.wire.timeout_s).clone()


def _directories(run: Run, directory: Path, exchange: MessageExchange) -> Directories:
    """Which ranks see the same directory. Those of one launcher do, and need not ask."""
    mesh = run.mesh
    if run.process.place.one_host and not run.process.environ.get(SEVERAL_HOSTS):
        return Directories((tuple(range(mesh.layout.world_size)),))
    return find_directories(
        directory,
        exchange,
        rank=mesh.rank,
        world_size=mesh.layout.world_size,
        timeout_s=run.run_file.run.start_timeout_s,
    )


def _require_whole_state(run: Run, directories: Directories) -> None:
    """Raises `EnvironmentFault` where the ranks that see one directory do not hold the whole state."""
    if directories.shared:
        return
    layout = run.mesh.layout
    several = f"ranks 0 and {directories.groups[1][0]} see different run directories, and a checkpoint needs"
    repair = "put run.directory on a file system that all hosts share"
    own_state = not run.generation.sync.keeps_replicas_equal or run.generation.coded is not None
    if own_state or not (run.state.is_whole_on_replicas or run.run_file.elastic is not None):
        raise EnvironmentFault(
            f"{several} what each replica has of its own (sync.kind, the error feedback of a codec, or an optimizer's "
            f"state of matrices that it owns): {repair}"
        )
    for group in directories.groups:
        if not any(set(layout.group(INSIDE_REPLICA, rank)) <= set(group) for rank in group):
            raise EnvironmentFault(
                f"{several} all parts of a replica, which is split between hosts: {repair}, or keep each replica on "
                "one host (layout.replicate = number of hosts)"
            )


def save_interval(run: Run, directory: Path, sinks: Sinks) -> SaveInterval:
    """When the run in `directory` saves, by the failures that its events show: ends of an attempt whose last steps were
    lost. All ranks make one, and ask it in the same steps. A generation of an elastic run goes on with the interval of
    the one before.
    """
    config, mesh = run.run_file.checkpoint, run.mesh
    if config.every == "steps" or config.every_steps == 0:
        return EverySteps(config.every_steps)
    board = Board(run.process.store, timeout_s=run.run_file.wire.timeout_s).under(f"saves/{mesh.generation}")
    found, step = attempts(read_events(directory)) if mesh.rank == 0 else [], run.state.progress.step

    def announce(key: str, find: Callable[[], str]) -> str:
        return board.announce(key, find, rank=mesh.rank)

    def tell(sentence: str, steps: int) -> None:
        if mesh.rank == 0:
            sinks.note(sentence)
            write_facts(directory, {SAVE_INTERVAL: steps})

    def known() -> str:
        interval = number_of(read_facts(directory).get(SAVE_INTERVAL))
        saved = [saved for saved in Places(directory).steps() if saved <= step]
        return f"{int(interval or config.every_steps)} {max(saved, default=0)}"

    interval, saved = map(int, announce("interval", known).split())
    return ByFailures(
        first=interval,
        step=step,
        saved_step=saved,
        announce=announce,
        failures=failures(found, resumed=step),
        running_s=training_time_s(found),
        expected_s=config.expected_failure_s,
        tell=tell,
    )


def fetch_newer(run: Run, directory: Path, sinks: Sinks) -> None:
    """The newest remote checkpoint, where it is newer than those in `directory`; all ranks wait for it.

    Raises `EnvironmentFault` where the store that the run file names cannot be reached: a fresh start would hide a run.
    """
    if run.run_file.checkpoint.remote is None:
        return

    def fetch() -> str:
        manifest, _ = newest_verified(directory)
        return fetch_newest(_store(run), directory, newest_here=None if manifest is None else manifest.step)

    said = run.process.announce("remote checkpoint", fetch)
    if said and run.mesh.rank == 0:
        sinks.note(said)


class CopySender:
    """Sends the checkpoints that this process commits as rank 0 to the remote store that the run file names, in one
    generation after the other. As a context manager, it waits for what is on its way, as `RemoteCopies` does.
    """

    def __init__(self) -> None:
        self._copies: RemoteCopies | None = None
        self._stack = ExitStack()

    def send(self, run: Run, saver: Saver, directory: Path, sinks: Sinks) -> None:
        """From now on every checkpoint that `saver` commits is sent; at first the newest of `directory`, of which the
        store may have all or a part. Waits for nothing.
        """
        config = run.run_file.checkpoint
        if config.remote is None or run.mesh.rank != 0:
            return
        if self._copies is None:
            copies = RemoteCopies(_store(run), directory, keep=config.keep, warn=sinks.warn)
            self._copies = self._stack.enter_context(copies)
            self._stack.callback(sinks.activity, f"waiting until the copies are in {config.remote}")
            manifest, _ = newest_verified(directory)
            if manifest is not None:
                self._copies.committed(manifest.step)
        saver.on_commit = self._copies.committed

    def __enter__(self) -> CopySender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _store(run: Run) -> RemoteCheckpoints:
    config = run.run_file.checkpoint
    assert config.remote is not None
    return RemoteCheckpoints(config.remote, attempts=config.remote_attempts, options=config.remote_options)
