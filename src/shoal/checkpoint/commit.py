"""The commit: what all ranks wrote becomes a checkpoint by one atomic rename, and not before it is durable.

Order: objects (durable, verified) -> manifest in a temporary folder (durable, verified) -> rename of that folder ->
fsync of its parent -> the file `latest`. A crash between any two leaves the checkpoint before, or this one, whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from blake3 import blake3

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.durable import Disk
from shoal.checkpoint.grid import Parcel
from shoal.checkpoint.manifest import BoxEntry, Manifest, TensorEntry
from shoal.checkpoint.objects import Stored, damage
from shoal.checkpoint.places import MANIFEST, Places, step_name, temporary
from shoal.errors import CorruptCheckpoint, EnvironmentFault


def tensor_entries(parcels: Sequence[Parcel], stored: Sequence[Stored]) -> list[TensorEntry]:
    """The manifest's tensors, by name, where parcel `i` became the object `stored[i]`."""
    entries: dict[str, TensorEntry] = {}
    for parcel, item in zip(parcels, stored, strict=True):
        for key, (spec, box) in enumerate(parcel):
            entry = entries.setdefault(spec.name, TensorEntry(spec.name, spec.dtype, list(spec.shape), []))
            entry.boxes.append(BoxEntry(list(box.offset), list(box.shape), item.digest, str(key)))
    for entry in entries.values():
        entry.boxes.sort(key=lambda box: box.offset)
    return [entries[name] for name in sorted(entries)]


def writer() -> dict[str, str]:
    """The versions that wrote a checkpoint."""
    try:
        shoal = version("shoal")
    except PackageNotFoundError:
        shoal = "not installed"
    return {"shoal": shoal, "torch": str(torch.__version__)}


def commit(manifest: Manifest, places: Places, *, disk: Disk) -> None:
    """Make `manifest`, whose objects are durable and verified, the checkpoint of its step."""
    _require_visible(manifest, places)
    folder = _unfinished(manifest, places, disk)
    target = places.step(manifest.step)
    if target.exists():
        # The step was saved before, by a run that then went back: the new manifest takes the old one's place.
        disk.rename(folder / MANIFEST, target / MANIFEST, action="commit/rename")
        disk.sync_folder(target, action="folder/fsync")
    else:
        disk.rename(folder, target, action="commit/rename")
    disk.sync_folder(places.root, action="commit/fsync")


def _require_visible(manifest: Manifest, places: Places) -> None:
    for digest, nbytes in manifest.objects.items():
        path = places.object(digest)
        if not path.is_file() or path.stat().st_size != nbytes:
            raise EnvironmentFault(
                f"{path} was written by one rank and is not seen by rank 0: "
                "put run.directory on a file system that all ranks share"
            )


def _unfinished(manifest: Manifest, places: Places, disk: Disk) -> Path:
    folder = temporary(places.step(manifest.step), "commit")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    content = manifests.encode(manifest)
    path = folder / MANIFEST
    disk.write(path, content, kind="manifest")
    problem = damage(path, blake3(content).hexdigest(), nbytes=len(content))
    if problem:
        raise CorruptCheckpoint(f"{path} {problem} right after it was written: check this disk")
    disk.sync_folder(folder, action="folder/fsync")
    return folder


def point_latest(step: int, places: Places, *, disk: Disk) -> None:
    """Let the file `latest` name the checkpoint of `step`, which is committed."""
    unfinished = temporary(places.latest, "commit")
    disk.write(unfinished, f"{step_name(step)}\n".encode(), kind="latest")
    disk.rename(unfinished, places.latest, action="latest/rename")
    disk.sync_folder(places.root, action="pointer/fsync")
