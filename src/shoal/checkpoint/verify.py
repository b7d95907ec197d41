"""Which checkpoints are there, and which of them are whole: read, hashed, and held against themselves.

A checkpoint is whole when its manifest hashes to the hash in it and contradicts itself nowhere, and every object that
it names hashes to its name. `latest` is a second witness: where it names another manifest than the one that is there,
or a checkpoint that is gone, that is reported, and the newest whole checkpoint is used all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.commit import read_latest
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import MANIFEST, Places, damage, require_checkpoint, step_name
from shoal.errors import CorruptCheckpoint, UsageError, VerificationFailed

_NAMED = 3


class Finding(msgspec.Struct, frozen=True):
    """Something wrong with the checkpoint of `step`: the file, the tensors that it holds, and a sentence with both."""

    step: int
    path: str
    tensors: list[str]
    sentence: str


def checkpoints(directory: Path) -> list[Path]:
    """The folders of the committed checkpoints of a run directory, newest first; not yet verified."""
    places = Places(directory)
    return [places.step(step) for step in places.steps()]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; `VerificationFailed` when it is damaged or of another format."""
    manifest = manifests.read(folder / MANIFEST)
    if folder.name != step_name(manifest.step):
        raise CorruptCheckpoint(f"{folder} holds step {manifest.step}: rename it to {step_name(manifest.step)}")
    return manifest


def findings(manifest: Manifest, directory: Path) -> Iterator[Finding]:
    """What is wrong with the objects of `manifest`, in the run directory `directory`; nothing when it is whole."""
    places = Places(directory)
    holds = tensors_by_object(manifest)
    for digest, nbytes in manifest.objects.items():
        path = places.object(digest)
        problem = damage(path, digest, nbytes=nbytes)
        if problem:
            names = holds[digest]
            yield Finding(manifest.step, str(path), names, _sentence(manifest.step, path, problem, names))


def tensors_by_object(manifest: Manifest) -> dict[str, list[str]]:
    """The names of the tensors that have a box in each object."""
    holds: dict[str, list[str]] = defaultdict(list)
    for tensor in manifest.tensors:
        for digest in {box.object for box in tensor.boxes}:
            holds[digest].append(tensor.name)
    return holds


def unprotected(manifest: Manifest) -> str | None:
    """A sentence where an earlier version wrote `manifest`, without a hash of its own; None otherwise."""
    if manifest.hash:
        return None
    return (
        f"the checkpoint of step {manifest.step} was written by an earlier version: its manifest has no hash, so a "
        "change in it may go unnoticed; the next save writes one"
    )


def latest_finding(directory: Path) -> Finding | None:
    """What is wrong with `latest`, or with the checkpoint that it names; None where they agree, or without `latest`.

    A manifest that cannot be read is not reported here.
    """
    places = Places(directory)
    newest = max(places.steps(), default=0)
    try:
        pointer = read_latest(places)
    except CorruptCheckpoint as error:
        return Finding(newest, str(places.latest), [], str(error))
    if pointer is None:
        return None
    name = step_name(pointer.step)
    if pointer.step not in places.steps():
        said = f"{places.latest} names {name}, which is not there: restore it, or delete `latest` if you removed it"
        return Finding(pointer.step, str(places.latest), [], said)
    try:
        found = read_manifest(places.step(pointer.step)).hash
    except VerificationFailed:
        return None
    if not pointer.hash or pointer.hash == found:
        return None
    said = (
        f"{places.latest} says that the manifest of {name} has the hash {pointer.hash}, and it has {found or 'none'}: "
        "one of the two files was changed since it was saved; delete `latest` if it is not the manifest"
    )
    return Finding(pointer.step, str(places.latest), [], said)


def newest_verified(
    directory: Path, *, accept: Callable[[Manifest], object] | None = None
) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint of a run directory that is whole, and a sentence for everything that was noticed.

    Every object is hashed. `accept(manifest)` may look at more, such as whether the state can be parsed; where it
    raises `VerificationFailed`, that checkpoint is passed over like one that is damaged, and any other exception is
    raised. None when there is no whole checkpoint: with sentences, because all are damaged or gone.
    """
    pointer = latest_finding(directory)
    problems = [pointer.sentence] if pointer is not None else []
    for folder in checkpoints(directory):
        try:
            manifest = read_manifest(folder)
            found = [finding.sentence for finding in findings(manifest, directory)]
            if not found and accept is not None:
                accept(manifest)
        except VerificationFailed as error:
            problems.append(str(error))
            continue
        problems.extend(found)
        if not found:
            note = unprotected(manifest)
            return manifest, [*problems, note] if note else problems
    return None, problems


def checkpoint_in(source: Path) -> Path:
    """The folder of the checkpoint that `source` means: itself, or the newest whole one of a run directory.

    Either is verified here, every byte of it. Raises `UsageError` where there is none, `CorruptCheckpoint` where
    `source` is a checkpoint that is not whole. One rank looks and tells the others, as a run that goes on may add
    another.
    """
    if (source / MANIFEST).exists():
        folder = source.resolve()
        damaged = next(findings(read_manifest(folder), run_directory_of(folder)), None)
        if damaged is not None:
            raise CorruptCheckpoint(damaged.sentence)
        return folder
    require_checkpoint(source)
    manifest, _ = newest_verified(source)
    if manifest is None:
        raise UsageError(f"{source}: none of its checkpoints is whole; 'shoal checkpoint verify {source}' says why")
    return Places(source).step(manifest.step)


def run_directory_of(folder: Path) -> Path:
    """The run directory in which the checkpoint `folder` lies."""
    return folder.parent.parent


def _sentence(step: int, path: Path, problem: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    held = f"{', '.join(names[:_NAMED])}{more}" if names else "no tensor"
    return f"checkpoint of step {step}: {path} {problem}; it holds {held}. Use another checkpoint, and check the disk"
