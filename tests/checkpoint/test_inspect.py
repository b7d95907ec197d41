"""What `shoal checkpoint ls` and `verify` show is what lies there."""

from __future__ import annotations

import time

import pytest

from shoal.checkpoint.inspect import listing, verify
from shoal.checkpoint.objects import Places
from shoal.errors import UsageError
from tests.checkpoint.states import save, saver_for, state_of


@pytest.fixture
def run(tmp_path):
    """A run directory with the checkpoints of steps 1, 2 and 3: step 2 lost its manifest, step 1 an object."""
    saver = saver_for(tmp_path)
    for step in (1, 2, 3):
        save(saver, step)
    Places(tmp_path).manifest(2).write_bytes(b"no")
    return tmp_path


def lose_an_object(directory, step):
    """Delete the object that holds the weights of `step`; its path."""
    from shoal.checkpoint.commit import read_manifest

    manifest = read_manifest(Places(directory).step(step))
    (weight,) = [tensor for tensor in manifest.tensors if tensor.name == "model/weight"]
    path = Places(directory).object(weight.boxes[0].object)
    path.unlink()
    return path


def test_a_listing_has_every_checkpoint_and_says_which_are_whole(run):
    """Newest first; a checkpoint that cannot be read is listed too."""
    lose_an_object(run, 1)
    newest, unreadable, damaged = listing(run)
    assert (newest.step, newest.tensors, newest.verified) == (3, len(state_of(3)), True)
    assert newest.created == pytest.approx(time.time(), abs=600)
    assert newest.nbytes is not None
    assert newest.nbytes > sum(tensor.nbytes for tensor in state_of(3).values())
    assert (unreadable.step, unreadable.nbytes, unreadable.verified) == (2, None, False)
    assert (damaged.step, damaged.verified) == (1, False)


def test_findings_name_step_file_and_tensors(run):
    """All checkpoints, or one; a whole one has no finding."""
    path = lose_an_object(run, 1)
    assert verify(run, 3) == []
    (lost,) = verify(run, 1)
    assert (lost.step, lost.path) == (1, str(path))
    assert "model/weight" in lost.tensors
    assert {finding.step for finding in verify(run)} == {1, 2}


def test_looking_changes_nothing(run):
    """Neither verb writes, renames or deletes."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    listing(run)
    verify(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_step_that_is_not_there_is_a_mistake_of_the_caller(run):
    """Not an empty list of findings, which would mean that all is well."""
    with pytest.raises(UsageError, match="has no checkpoint of step 8"):
        verify(run, 8)
    with pytest.raises(UsageError, match="is no folder"):
        listing(run / "elsewhere")
    with pytest.raises(UsageError, match="holds no checkpoint"):
        verify(run / "elsewhere")
