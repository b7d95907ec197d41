"""How a run saves: its saver, when a checkpoint is due, and the copies in a remote store."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from shoal.checkpoint.agreement import Exchange
from shoal.checkpoint.objects import unheard
from shoal.checkpoint.remote import RemoteCheckpoints, RemoteCopies, fetch_newest
from shoal.checkpoint.save import Saver
from shoal.checkpoint.verify import newest_verified
from shoal.comm.board import Board
from shoal.engine.save_interval import ByFailures, EverySteps, SaveInterval
from shoal.observe.attempts import attempts, training_time_s
from shoal.observe.events import read_events
from shoal.observe.sink import Sinks
from shoal.recipes.run import Run


def build_saver(run: Run, directory: Path, exchange: Exchange | None) -> Saver:
    """What saves this rank's share into `directory`; ranks meet by `exchange`, None: a board on the run's store."""
    run_file, mesh, injector = run.run_file, run.mesh, run.process.injector
    return Saver(
        directory,
        rank=mesh.rank,
        world_size=mesh.layout.world_size,
        exchange=exchange or Board(run.process.store, timeout_s=run_file.wire.timeout_s).clone(),
        keep=run_file.checkpoint.keep,
        object_bytes=run_file.checkpoint.object_bytes,
        split=mesh.layout.replica_size > 1
        or not run.generation.sync.keeps_replicas_equal
        or run.generation.coded is not None,
        on_point=unheard if injector is None else lambda label: injector.reached(f"save/{label}"),
    )


def save_interval(run: Run, directory: Path, sinks: Sinks) -> SaveInterval:
    """When the run in `directory` saves, by the failures that its events show: a start that is not the first counts as
    one. All ranks make one, and ask it in the same steps.
    """
    config, mesh = run.run_file.checkpoint, run.mesh
    if config.every == "steps" or config.every_steps == 0:
        return EverySteps(config.every_steps)
    board = Board(run.process.store, timeout_s=run.run_file.wire.timeout_s).under(f"saves/{mesh.generation}")
    found = attempts(read_events(directory)) if mesh.rank == 0 else []
    return ByFailures(
        first=config.every_steps,
        step=run.state.progress.step,
        announce=lambda key, find: board.announce(key, find, rank=mesh.rank),
        failures=len(found),
        running_s=training_time_s(found),
        expected_s=config.expected_failure_s,
        tell=sinks.note if mesh.rank == 0 else _unsaid,
    )


def _unsaid(sentence: str) -> None:
    """Rank 0 says it."""


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


def send_copies(run: Run, saver: Saver, directory: Path, sinks: Sinks, stack: ExitStack) -> None:
    """From now on every checkpoint that `saver` commits is sent; the newest of `directory` first, if it is not there.

    `stack` waits for them at its end.
    """
    config = run.run_file.checkpoint
    if config.remote is None or run.mesh.rank != 0:
        return
    store = _store(run)
    copies = stack.enter_context(RemoteCopies(store, directory, keep=config.keep, warn=sinks.warn))
    manifest, _ = newest_verified(directory)
    if manifest is not None and manifest.step not in store.steps():
        copies.committed(manifest.step)
    saver.on_commit = copies.committed


def _store(run: Run) -> RemoteCheckpoints:
    config = run.run_file.checkpoint
    assert config.remote is not None
    return RemoteCheckpoints(config.remote, attempts=config.remote_attempts, options=config.remote_options)
