"""What would survive a power failure: a record of writes, fsyncs and renames, and the rules that a save must keep.

A kill leaves the page cache intact, so it cannot show a forgotten fsync. This can: file contents count as durable after
an fsync of the file, names after an fsync of their folder, and a commit that relies on anything else is a violation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.objects import MANIFEST, Places


def nothing(path: Path) -> bool:
    return False


class Ledger:
    """Records the calls of this process; fsyncs of paths that `forgotten` picks do not count, as if left out."""

    def __init__(self, directory: Path, forgotten: Callable[[Path], bool] = nothing) -> None:
        self.places = Places(directory)
        self.violations: list[str] = []
        self._forgotten = forgotten
        self._contents: set[int] = set()
        self._names: dict[Path, dict[str, int]] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Listen to the calls of `os` until `patch` is undone."""
        write, fsync, replace, unlink = os.write, os.fsync, os.replace, Path.unlink

        def heard_write(descriptor: int, data: memoryview) -> int:
            self._contents.discard(os.fstat(descriptor).st_ino)
            return write(descriptor, data)

        def heard_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self._synced(Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor).st_ino)

        def heard_replace(source: Path, target: Path) -> None:
            self._renaming(Path(source), Path(target))
            replace(source, target)

        def heard_unlink(path: Path, missing_ok: bool = False) -> None:
            self._deleting(path)
            unlink(path, missing_ok=missing_ok)

        patch.setattr(os, "write", heard_write)
        patch.setattr(os, "fsync", heard_fsync)
        patch.setattr(os, "replace", heard_replace)
        patch.setattr(Path, "unlink", heard_unlink)

    def is_durable(self, path: Path) -> bool:
        """Whether both the content and the name of the file `path` would survive."""
        return path.exists() and path.stat().st_ino in self._contents and self._has_name(path)

    def _has_name(self, path: Path) -> bool:
        return path.exists() and self._names.get(path.parent, {}).get(path.name) == path.stat().st_ino

    def _synced(self, path: Path, inode: int) -> None:
        if self._forgotten(path):
            return
        if path.is_dir():
            self._names[path] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self._contents.add(inode)

    def _renaming(self, source: Path, target: Path) -> None:
        if target.name.startswith("step-"):
            self._require(self.is_durable(source / MANIFEST), "commit before its manifest")
            self._require_objects(source / MANIFEST)
        elif target == self.places.latest:
            self._require(self._has_name(self.places.root / source.read_text().split()[0]), "latest before the commit")
        if source.is_file():
            self._require(source.stat().st_ino in self._contents, f"rename of unsynced {source.name}")

    def _require_objects(self, manifest: Path) -> None:
        for digest in manifests.read(manifest).objects:
            self._require(self.is_durable(self.places.object(digest)), "commit before its objects")

    def _deleting(self, path: Path) -> None:
        if path.parent != self.places.objects or path.name.startswith("."):
            return
        for name in self._names.get(self.places.root, {}):
            manifest = self.places.root / name / MANIFEST
            retired = name.startswith("step-") and not manifest.exists()
            self._require(not retired, "objects deleted before their checkpoint")

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            self.violations.append(rule)
