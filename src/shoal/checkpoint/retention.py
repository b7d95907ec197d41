"""Which checkpoints stay, and how the others go: a crash at any point leaves only whole ones and sweepable remains.

A run has one timeline: the `keep` newest checkpoints up to the one just committed stay, and later steps, left by a run
that went back, go. A folder is renamed before anything is deleted, and an object is deleted only when no manifest that
remains names it; where a manifest cannot be read, what it names is unknown, and no object is deleted while it is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.durable import Disk
from shoal.checkpoint.objects import TEMPORARY, Places, temporary
from shoal.errors import VerificationFailed


def retain(places: Places, newest: int, *, keep: int, disk: Disk) -> None:
    """Keep the `keep` newest readable checkpoints up to step `newest`; the rest and their objects go."""
    doomed = list(surplus(places, newest, keep=keep))
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


def sweep(places: Places, *, disk: Disk) -> None:
    """Delete what was left unfinished, and every object that no checkpoint names. Only while nobody is saving."""
    for path in (*_entries(places.root), *_entries(places.objects)):
        if path.name.startswith(TEMPORARY):
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
        if path.name not in wanted:
            disk.remove(path, action="retention/sweep")


def referenced(path: Path) -> Iterable[str] | None:
    """The hashes of the objects that the manifest at `path` names; None when it cannot be read."""
    try:
        return manifests.read(path).objects
    except VerificationFailed:
        return None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
