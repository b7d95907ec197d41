"""Where a run goes on: rank 0 looks for the newest verified checkpoint, all ranks load the one it found.

A checkpoint can be whole and still not load: another version wrote it, or a program that was wrong. Then all ranks take
the one before it, and the run says so. What a user has changed (another model, another optimizer) is an error at once:
the one before it is no other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.checkpoint.load import read_into
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import Places
from shoal.checkpoint.verify import checkpoint_in, checkpoints, newest_verified, read_manifest
from shoal.engine.state import TrainState
from shoal.errors import CorruptCheckpoint, VerificationFailed
from shoal.models.adapters import is_adapter

Announce = Callable[[str, Callable[[], str]], str]
"""`announce(key, find)`: rank 0 calls `find`; every rank gets its answer."""
Collect = Callable[[str], list[str]]
"""Every rank's text, in rank order."""


class Loaded(NamedTuple):
    """What this rank has loaded: the checkpoint of `step`, whose manifest hashes to `hash` ("" of format 1)."""

    step: int
    hash: str


def _unsaid(text: str) -> None:
    """Nobody listens."""


def resume(
    state: TrainState,
    directory: Path,
    *,
    announce: Announce,
    warn: Callable[[str], None],
    collect: Collect | None = None,
    activity: Callable[[str], None] = _unsaid,
) -> Loaded | None:
    """Loads the newest checkpoint of `directory` that verifies and loads on every rank into `state`; None where there
    is none.

    `activity` hears what takes long.
    `collect` tells every rank what the others could not load; None: this rank is alone, or loads what rank 0 does.
    Raises `CorruptCheckpoint` where there are checkpoints and none loads: starting afresh would hide the loss. Raises
    `UsageError` for the checkpoint of another model or run.
    """
    refused: dict[int, str] = {}
    warned: set[str] = set()

    def warn_once(problem: str) -> None:
        if problem not in warned:
            warned.add(problem)
            warn(problem)

    if checkpoints(directory):
        activity("verifying the newest checkpoint")
    while True:
        step = announce(f"resume/{len(refused)}", lambda: _newest(directory, refused, warn_once))
        if not step:
            return None
        activity(f"loading the checkpoint of step {step}")
        loaded, problem = _load(state, directory, int(step))
        problems = [problem] if collect is None else collect(problem)
        if not any(problems):
            return loaded
        rank, said = next((rank, text) for rank, text in enumerate(problems) if text)
        refused[int(step)] = f"rank {rank} cannot load the checkpoint of step {step}: {said}"


def _newest(directory: Path, refused: dict[int, str], warn: Callable[[str], None]) -> str:
    """The step of the newest checkpoint that is whole and not `refused`, "" where there is no checkpoint."""

    def accept(manifest: Manifest) -> None:
        if manifest.step in refused:
            raise CorruptCheckpoint(refused[manifest.step])

    manifest, problems = newest_verified(directory, accept=accept)
    for problem in problems:
        warn(problem)
    if manifest is None and problems:
        raise CorruptCheckpoint(
            f"{directory} holds checkpoints, but none can be used: {problems[0]}. Restore one, or give "
            "another run.directory"
        )
    return str(manifest.step) if manifest is not None else ""


def _load(state: TrainState, directory: Path, step: int) -> tuple[Loaded, str]:
    """Fills `state`; what this rank has loaded, and why it could not ("": it could)."""
    try:
        manifest = read_manifest(Places(directory).step(step))
    except VerificationFailed as error:
        return Loaded(step, ""), str(error)
    loaded = Loaded(step, manifest.hash)
    dtypes = _dtypes(manifest)
    try:
        state.load_json(manifest.state)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return loaded, f"its state is not one of this version ({type(error).__name__}: {error})"
    try:
        read_into(manifest, directory, state.targets(dtypes), elsewhere=state.elsewhere(dtypes))
    except CorruptCheckpoint as error:
        return loaded, str(error)
    state.pack()
    return loaded, ""


def load_weights(state: TrainState, source: Path, *, announce: Announce, repair: str) -> int:
    """Loads the weights alone, from a run directory (its newest verified checkpoint) or from one checkpoint in it.
    Adapters that it does not have keep their first values.

    The step that they are from. Raises `UsageError` where there is none, or, with the sentence `repair`, where names or
    shapes differ.
    """
    folder = Path(announce("weights", lambda: str(checkpoint_in(source))))
    manifest = read_manifest(folder)
    saved = {entry.name for entry in manifest.tensors}
    targets = {n: t for n, t in state.model.targets().items() if n in saved or not is_adapter(n)}
    read_into(manifest, folder.parent.parent, targets, cast=True, repair=repair)
    return manifest.step


def _dtypes(manifest: Manifest) -> dict[str, torch.dtype]:
    return {entry.name: getattr(torch, entry.dtype) for entry in manifest.tensors}
