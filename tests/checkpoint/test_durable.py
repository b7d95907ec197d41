"""Order of fsyncs and renames: nothing is committed before what it rests on would survive a power failure."""

from __future__ import annotations

import errno
import os

import pytest

from shoal.checkpoint.objects import POINTS, Disk, Places
from tests.checkpoint.ledger import Ledger, nothing
from tests.checkpoint.states import save, saver_for


def run_with(ledger: Ledger, patch: pytest.MonkeyPatch) -> None:
    """Three saves, of which the first is retired."""
    ledger.install(patch)
    saver = saver_for(ledger.places.run_directory, keep=2)
    for step in (1, 2, 3):
        assert save(saver, step).committed
    patch.undo()


def test_a_commit_rests_on_durable_files_only(tmp_path, monkeypatch):
    """At every rename of a save all that it builds on is durable, and in the end so is the whole checkpoint."""
    ledger = Ledger(tmp_path)
    run_with(ledger, monkeypatch)
    assert ledger.violations == []
    assert ledger.is_durable(Places(tmp_path).latest)


FORGOTTEN = {
    "objects": (lambda path: path.suffix == ".safetensors", "commit before its objects"),
    "names of objects": (lambda path: path.name == "objects", "commit before its objects"),
    "manifest": (lambda path: path.name == "manifest.json", "commit before its manifest"),
    "name of the manifest": (lambda path: path.name.startswith(".tmp-commit-step"), "commit before its manifest"),
    "commit": (lambda path: path.name == "checkpoints", "latest before the commit"),
    "latest": (lambda path: path.name.endswith("latest"), "rename of unsynced .tmp-commit-latest"),
}


@pytest.mark.parametrize(("forgotten", "rule"), FORGOTTEN.values(), ids=FORGOTTEN.keys())
def test_the_ledger_sees_every_fsync_that_is_left_out(tmp_path, monkeypatch, forgotten, rule):
    """Planted faults: without any one of the fsyncs the test above would fail."""
    ledger = Ledger(tmp_path, forgotten)
    run_with(ledger, monkeypatch)
    assert rule in ledger.violations


def test_the_ledger_sees_a_retired_folder_that_could_come_back(tmp_path, monkeypatch):
    """Planted fault: objects deleted before the retirement of their checkpoint is durable."""
    ledger = Ledger(tmp_path, nothing)
    sync = Disk.sync_folder
    monkeypatch.setattr(
        Disk,
        "sync_folder",
        lambda disk, path, *, action: None if action == "retention/fsync" else sync(disk, path, action=action),
    )
    run_with(ledger, monkeypatch)
    assert "objects deleted before their checkpoint" in ledger.violations


def test_a_save_passes_every_labelled_point(tmp_path):
    """The list of points is the truth: none is missing in it, none is never passed."""
    passed: list[str] = []
    saver = saver_for(tmp_path, keep=1, on_point=passed.append)
    save(saver, 1)
    save(saver, 2)
    sweep = {"retention/delete.before", "retention/delete.after"}
    assert set(passed) | sweep == set(POINTS)
    assert sweep <= set(passed)


def test_a_failed_write_leaves_no_file_and_names_its_path(tmp_path, monkeypatch):
    """Half a file is removed, and the error says which file, which the system's does not."""

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        Disk().write(tmp_path / "file", b"content", kind="object")
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_system_cuts_short_is_continued(tmp_path, monkeypatch):
    """`write` may take less than it is given: the file is whole all the same."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    Disk().write(tmp_path / "file", b"0123456789", kind="object")
    assert (tmp_path / "file").read_bytes() == b"0123456789"
