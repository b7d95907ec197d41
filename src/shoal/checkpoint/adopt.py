"""A checkpoint that comes from elsewhere, made one of a run directory: its objects, then its manifest by one rename.

Every object has to hash to its name before it is written. Objects that are here already are not asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.objects import MANIFEST, Disk, Places, damage, make_folders, temporary
from shoal.errors import CorruptCheckpoint


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
