"""From durable objects to a checkpoint that counts, and from an old checkpoint to free space.

Order of a commit: objects (durable, verified) -> manifest in a temporary folder (durable, verified) -> rename of that
folder -> fsync of its parent -> the file `latest`. A crash between any two leaves the checkpoint before, or this one,
whole. `latest` names the newest checkpoint and the hash of its manifest; it is deleted before the manifest that it
names is replaced, so that it never contradicts one.

A run has one timeline: the `keep` newest checkpoints up to the one just committed stay, and the best one where that is
asked for, to which the link `best` leads; later steps, left by a run that went back, go. A folder is renamed before
anything is deleted, and an object is deleted only when no manifest that remains names it; where a manifest cannot be
read, what it names is unknown, and no object is deleted while it is there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.objects import (
    MANIFEST,
    STAGED,
    TEMPORARY,
    Disk,
    Places,
    damage,
    make_folders,
    require_checkpoint,
    step_name,
    step_of,
    temporary,
)
from shoal.errors import CorruptCheckpoint, EnvironmentFault, UsageError, VerificationFailed
from shoal.files import read_file

# A checkpoint that comes from elsewhere, made one of a run directory: its objects, then its manifest by one rename.
#
# Every object has to hash to its name before it is written. Objects that are here already are not asked for.


def adopt(content: bytes, places: Places, *, source: str, get: Callable[[str], bytes]) -> None:
    """Brings the checkpoint whose manifest is `content` to the disk; `get` returns the object of a hash.

    A checkpoint of the same step on the disk is replaced. `source` names in messages where it comes from. Raises
    `CorruptCheckpoint` for a manifest or an object that is not what it should be, what `get` raises, and `OSError`.
    """
    manifest = manifests.decode(content, Path(source))
    make_folders(places)
    disk = Disk()
    for digest, nbytes in manifest.objects.items():
        path = places.object(digest)
        if damage(path, digest, nbytes=nbytes) is None:
            continue
        data = get(digest)
        if blake3(data).hexdigest() != digest:
            raise CorruptCheckpoint(f"{source}: object {digest} does not hash to its name")
        unfinished = temporary(path, "fetch")
        disk.write(unfinished, data, kind="object")
        disk.rename(unfinished, path, action="object/rename")
    disk.sync_folder(places.objects, action="objects/fsync")
    step = places.step(manifest.step)
    folder, replaced = temporary(step, "fetch"), temporary(step, "damaged")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    disk.write(folder / MANIFEST, content, kind="manifest")
    places.latest.unlink(missing_ok=True)  # it names an older one, or the one that is replaced
    shutil.rmtree(replaced, ignore_errors=True)
    if step.exists():  # no folder can be renamed to one that is not empty
        disk.rename(step, replaced, action="commit/aside")
    disk.rename(folder, step, action="commit/rename")
    disk.sync_folder(places.root, action="commit/fsync")
    shutil.rmtree(replaced, ignore_errors=True)


_LATEST = re.compile(r"(step-[0-9]+)\n(?:([0-9a-f]{64})\n)?\Z")


class Pointer(NamedTuple):
    """What `latest` says: the step of the newest checkpoint, and the hash of its manifest ("" in earlier versions)."""

    step: int
    hash: str


def commit(manifest: Manifest, places: Places, *, disk: Disk) -> Pointer:
    """Make `manifest`, whose objects are durable and verified, the checkpoint of its step; what `latest` is to say.

    Raises `EnvironmentFault` where an object of another rank is not seen here, `CorruptCheckpoint` where the disk does
    not give back what was written, `UsageError` for a manifest that is too large, and `OSError`.
    """
    _require_visible(manifest, places)
    content = manifests.encode(manifest)
    folder = _unfinished(content, places.step(manifest.step), disk)
    target = places.step(manifest.step)
    if target.exists():
        # The step was saved before, by a run that then went back: the new manifest takes the old one's place.
        places.latest.unlink(missing_ok=True)
        disk.sync_folder(places.root, action="commit/fsync")
        disk.rename(folder / MANIFEST, target / MANIFEST, action="commit/rename")
        disk.sync_folder(target, action="folder/fsync")
    else:
        disk.rename(folder, target, action="commit/rename")
    disk.sync_folder(places.root, action="commit/fsync")
    return Pointer(manifest.step, manifests.decode(content, target / MANIFEST).hash)


def _require_visible(manifest: Manifest, places: Places) -> None:
    for digest, nbytes in manifest.objects.items():
        path = places.object(digest)
        if not path.is_file() or path.stat().st_size != nbytes:
            raise EnvironmentFault(
                f"{path} was written by one rank and is not seen by rank 0: "
                "put run.directory on a file system that all ranks share"
            )


def _unfinished(content: bytes, target: Path, disk: Disk) -> Path:
    folder = temporary(target, "commit")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    path = folder / MANIFEST
    disk.write(path, content, kind="manifest")
    problem = damage(path, blake3(content).hexdigest(), nbytes=len(content))
    if problem:
        raise CorruptCheckpoint(f"{path} {problem} right after it was written: check this disk")
    disk.sync_folder(folder, action="folder/fsync")
    return folder


def point_latest(pointer: Pointer, places: Places, *, disk: Disk) -> None:
    """Let the file `latest` name a checkpoint that is committed."""
    unfinished = temporary(places.latest, "commit")
    disk.write(unfinished, f"{step_name(pointer.step)}\n{pointer.hash}\n".encode(), kind="latest")
    disk.rename(unfinished, places.latest, action="latest/rename")
    disk.sync_folder(places.root, action="pointer/fsync")


def read_latest(places: Places) -> Pointer | None:
    """What `latest` says; None where there is no such file. Raises `CorruptCheckpoint` where it cannot be read."""
    repair = "delete this file, the next save writes it again"
    if not places.latest.exists():
        return None
    content = read_file(places.latest, limit_bytes=1024, error=CorruptCheckpoint, repair=repair)
    match = _LATEST.match(content.decode("utf-8", "replace"))
    step = step_of(match[1]) if match else None
    if match is None or step is None:
        raise CorruptCheckpoint(f"{places.latest} does not name a checkpoint: {repair}")
    return Pointer(step, match[2] or "")


def best_step(state: Mapping[str, Any]) -> int | None:
    """The step whose weights are the best by `checkpoint.keep_best`, as the state of a later checkpoint says."""
    watch = state.get("watch")
    best = watch.get("best") if isinstance(watch, Mapping) else None
    step = best.get("step") if isinstance(best, Mapping) else None
    return step if isinstance(step, int) and step > 0 else None


def point_best(step: int | None, places: Places) -> None:
    """Let the link `best` name the checkpoint of `step`, if it is there; None: there is no best one.

    The state of the newest checkpoint says the same: a crash costs no more than the link, until the next save.
    """
    if step is None or not places.step(step).is_dir():
        places.best.unlink(missing_ok=True)
        return
    if places.best.is_symlink() and os.readlink(places.best) == step_name(step):
        return
    unfinished = temporary(places.best, "commit")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(step_name(step), target_is_directory=True)
    os.replace(unfinished, places.best)


def retain(places: Places, newest: int, *, keep: int, disk: Disk, best: int | None = None) -> None:
    """Keep the `keep` newest readable checkpoints up to step `newest`, and that of step `best`; the rest and their
    objects go.
    """
    doomed = [step for step in surplus(places, newest, keep=keep) if step != best]
    for step in doomed:
        disk.rename(places.step(step), temporary(places.step(step), "retired"), action="retention/rename")
    if doomed:
        # Were this not durable, a checkpoint could come back after a crash without its objects.
        disk.sync_folder(places.root, action="retention/fsync")
    sweep(places, disk=disk)


def surplus(places: Places, newest: int, *, keep: int) -> Iterator[int]:
    """The steps that do not stay: those after `newest`, and those before the `keep`-th readable one."""
    kept = 0
    for step in places.steps():
        if step > newest or kept >= keep:
            yield step
        elif referenced(places.manifest(step)) is not None:
            kept += 1


def sweep(places: Places, *, disk: Disk, staged: bool = False) -> None:
    """Delete what was left unfinished, and every object that no checkpoint names. Only while nobody is saving.

    `staged`: also files in which ranks lay out their shares. A rank that lives removes its own, and may be filling them
    for the next save while rank 0 ends this one.
    """
    for path in (*_entries(places.root), *_entries(places.objects)):
        if path.name.startswith(TEMPORARY) and (staged or not _is_staged(path)):
            with disk.point("retention/delete", path):
                _delete(path)
    named: set[str] = set()
    for step in places.steps():
        digests = referenced(places.manifest(step))
        if digests is None:
            return
        named.update(digests)
    wanted = {places.object(digest).name for digest in named}
    for path in _entries(places.objects):
        if path.name not in wanted and not _is_staged(path):
            disk.remove(path, action="retention/sweep")


def _is_staged(path: Path) -> bool:
    return path.name.startswith(TEMPORARY) and STAGED in path.name


def referenced(path: Path) -> Iterable[str] | None:
    """The hashes of the objects that the manifest at `path` names; None when it cannot be read."""
    try:
        return manifests.read(path).objects
    except VerificationFailed:
        return None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# Which checkpoints are there, and which of them are whole: read, hashed, and held against themselves.
#
# A checkpoint is whole when its manifest hashes to the hash in it and contradicts itself nowhere, and every object that
# it names hashes to its name. `latest` is a second witness: where it names another manifest than the one that is there,
# or a checkpoint that is gone, that is reported, and the newest whole checkpoint is used all the same.


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
    """The names of the tensors that have a box in each object, or in one that begins with it."""
    holds: dict[str, list[str]] = defaultdict(list)
    for tensor in manifest.tensors:
        own = {box.object for box in tensor.boxes}
        for digest in own | {base for each in own if (base := manifest.encoded.get(each))}:
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
