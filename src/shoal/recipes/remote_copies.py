"""Copies of a run's checkpoints in a remote store: what the first rank fetches at a start, and sends from then on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from shoal.checkpoint.remote import RemoteCopies, RemoteStore, fetch_newest
from shoal.checkpoint.save import Saver
from shoal.checkpoint.verify import newest_verified
from shoal.observe.sink import Sinks
from shoal.recipes.run import Run


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


def _store(run: Run) -> RemoteStore:
    config = run.run_file.checkpoint
    assert config.remote is not None
    return RemoteStore(config.remote, attempts=config.remote_attempts, options=config.remote_options)
