"""Retention: the newest stay, and no object goes that a checkpoint names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.commit import checkpoints, newest_verified
from shoal.checkpoint.objects import Places
from tests.checkpoint.states import leftovers, save, saver_for, state_of


def steps(directory: Path) -> list[int]:
    return Places(directory).steps()


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_stay_whole_and_the_rest_is_gone(tmp_path, keep):
    """After every save: the last `keep`, each verified, and no object that none of them names."""
    saver = saver_for(tmp_path, keep=keep)
    for step in range(1, 5):
        save(saver, step)
        assert steps(tmp_path) == list(range(step, max(0, step - keep), -1))
        assert leftovers(tmp_path) == []
        assert newest_verified(tmp_path)[1] == []


def test_an_object_goes_with_the_last_checkpoint_that_names_it(tmp_path):
    """Shared content survives the older checkpoint, and not the younger."""
    saver = saver_for(tmp_path, keep=1)
    shared = {"model/a": torch.ones(9)}
    save(saver, 1, shared | {"optimizer/x": torch.arange(5)})
    both = set(Places(tmp_path).objects.iterdir())
    save(saver, 2, shared)
    (kept,) = Places(tmp_path).objects.iterdir()
    assert len(both) == 2
    assert kept in both
    save(saver, 3, {"model/b": torch.zeros(7)})
    assert not kept.exists()
    assert newest_verified(tmp_path)[1] == []


def test_a_run_that_went_back_leaves_its_old_future(tmp_path):
    """After a fall back from step 9 to 4, the save of step 5 is the newest, whatever lay beyond it."""
    save(saver_for(tmp_path), 4)
    save(saver_for(tmp_path), 9)
    (Places(tmp_path).manifest(9)).write_text("damaged")
    save(saver_for(tmp_path, keep=1), 5)
    assert steps(tmp_path) == [5]
    assert leftovers(tmp_path) == []


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_good_one(tmp_path):
    """It is not counted among those to keep, and no object is deleted while its manifest cannot be read."""
    saver = saver_for(tmp_path, keep=2)
    save(saver, 1)
    save(saver, 2)
    objects = set(Places(tmp_path).objects.iterdir())
    Places(tmp_path).manifest(2).write_text("damaged")
    save(saver, 3)
    assert steps(tmp_path) == [3, 2, 1]
    assert objects <= set(Places(tmp_path).objects.iterdir())
    save(saver, 4)
    assert steps(tmp_path) == [4, 3]
    assert leftovers(tmp_path) == []


def test_what_is_not_shoals_is_left_alone(tmp_path):
    """A file that somebody put beside the checkpoints stays."""
    saver = saver_for(tmp_path, keep=1)
    note = Places(tmp_path).root / "notes.txt"
    note.write_text("best so far: step 2")
    save(saver, 1)
    save(saver, 2)
    assert note.exists()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]


def test_a_checkpoint_that_cannot_be_deleted_does_not_spoil_the_new_one(tmp_path):
    """The save counts, and its report says that the old one is still there."""

    def stuck(label: str) -> None:
        if label == "retention/rename.before":
            raise OSError(1, "Operation not permitted", "step-00000001")

    saver = saver_for(tmp_path, keep=1, on_point=stuck)
    save(saver, 1)
    report = save(saver, 2, state_of(2))
    assert report.committed
    assert "older ones not deleted" in str(report.error)
    manifest, problems = newest_verified(tmp_path)
    assert manifest is not None
    assert (manifest.step, problems) == (2, [])
