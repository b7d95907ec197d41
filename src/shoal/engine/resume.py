"""Where a run goes on: rank 0 looks for the newest verified checkpoint, all ranks load the one it found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from shoal.checkpoint.load import read_into
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import Places
from shoal.checkpoint.verify import checkpoint_in, newest_verified, read_manifest
from shoal.engine.state import TrainState
from shoal.errors import CorruptCheckpoint

Announce = Callable[[str, Callable[[], str]], str]
"""`announce(key, find)`: rank 0 calls `find`; every rank gets its answer."""


def resume(state: TrainState, directory: Path, *, announce: Announce, warn: Callable[[str], None]) -> int | None:
    """Loads the newest verified checkpoint of `directory` into `state`; its step, or None where there is none.

    Raises `CorruptCheckpoint` where there are checkpoints and none is whole: starting afresh would hide the loss.
    """

    def find() -> str:
        manifest, problems = newest_verified(directory)
        for problem in problems:
            warn(problem)
        if manifest is None and problems:
            raise CorruptCheckpoint(
                f"{directory} holds checkpoints, but none is whole: {problems[0]}. Restore one, or give "
                "another run.directory"
            )
        return str(manifest.step) if manifest is not None else ""

    step = announce("resume", find)
    if not step:
        return None
    manifest = read_manifest(Places(directory).step(int(step)))
    state.load_json(manifest.state)
    dtypes = _dtypes(manifest)
    read_into(manifest, directory, state.targets(dtypes), elsewhere=state.elsewhere(dtypes))
    return int(step)


def load_weights(state: TrainState, source: Path, *, announce: Announce) -> int:
    """Loads the weights alone, from a run directory (its newest verified checkpoint) or from one checkpoint in it.

    The step that they are from. Raises `UsageError` where there is none, or where names or shapes differ.
    """
    folder = Path(announce("weights", lambda: str(checkpoint_in(source))))
    manifest = read_manifest(folder)
    read_into(manifest, folder.parent.parent, state.model.targets(), cast=True)
    return manifest.step


def _dtypes(manifest: Manifest) -> dict[str, torch.dtype]:
    return {entry.name: getattr(torch, entry.dtype) for entry in manifest.tensors}
