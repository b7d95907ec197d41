"""Crash capsules: what is in them, what is not, and what is refused."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import msgspec
import pytest

from shoal.errors import UsageError
from shoal.observe.capsule import Failed, read_capsule, shoal_version, unpack, write_capsule
from shoal.observe.events import EventWriter
from shoal.observe.facts import write_facts
from tests.checkpoint.states import save, saver_for

FAILED = Failed(1, 1, "ArithmeticError: a mistake", "the whole traceback")


def run_with_losses(folder: Path, losses: list[float]) -> Path:
    """A run directory with a checkpoint of step 2, and these losses from step 1 on."""
    write_facts(folder, {"name": "own", "world": 2, "torch": "2.13", "data": {"train/samples": 30}})
    (folder / "run.toml").write_text("[run]\n")
    with EventWriter(folder, rank=0) as writer:
        for step, loss in enumerate(losses, start=1):
            values = {"loss/train": loss, "grad/norm": loss, "samples/consumed": 5 * step}
            writer.write(step, values, time_s=float(step))
    assert save(saver_for(folder), 2).committed
    return write_capsule(folder, FAILED, seed=7, global_samples=5, checkpoint=folder / "checkpoints/step-00000002")


def test_a_capsule_names_the_step_behind_the_last_finite_one(tmp_path: Path) -> None:
    """With its positions, the losses since the checkpoint, and the first error whole."""
    found = read_capsule(run_with_losses(tmp_path, [1.0, 0.9, 0.8]))
    assert (found.step, found.start, found.stop, found.samples) == (4, 15, 20, 30)
    assert (found.checkpoint, found.holds_checkpoint, found.losses) == (2, True, {"3": 0.8})
    assert (found.failed, found.shoal, found.seed, found.ranks) == (FAILED, shoal_version(), 7, 2)


def test_a_step_that_was_not_finite_is_the_one_that_failed(tmp_path: Path) -> None:
    """Its line is there, with a loss that is none."""
    found = read_capsule(run_with_losses(tmp_path, [1.0, 0.9, math.nan]))
    assert (found.step, found.start, found.stop) == (3, 10, 15)
    assert found.losses == {"3": None}


def test_the_checkpoint_in_it_is_whole(tmp_path: Path) -> None:
    """Unpacked elsewhere, it verifies; the file is readable by its owner alone."""
    from shoal.checkpoint.verify import newest_verified

    path = run_with_losses(tmp_path / "run", [1.0, 0.9])
    unpack(path, tmp_path / "out")
    manifest, problems = newest_verified(tmp_path / "out")
    assert manifest is not None
    assert (manifest.step, problems) == (2, [])
    assert path.stat().st_mode & 0o777 == 0o600


def rewritten(path: Path, target: Path, **changes: object) -> Path:
    """The capsule `path` with other values in its index."""
    with zipfile.ZipFile(path) as archive:
        index = json.loads(archive.read("capsule.json")) | changes
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("capsule.json", msgspec.json.encode(index))
    return target


def test_a_capsule_of_another_format_is_a_sentence(tmp_path: Path) -> None:
    """Which format, by which version, and what to do."""
    path = run_with_losses(tmp_path, [1.0])
    with pytest.raises(UsageError, match=r"format 9 by shoal .* reads format 1: replay it with the version"):
        read_capsule(rewritten(path, tmp_path / "other.zip", format=9))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04garbage", b"\x00" * 4096])
def test_a_file_that_is_no_capsule_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    """No traceback for any bytes."""
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(UsageError, match="is no crash capsule"):
        read_capsule(tmp_path / "x.zip")


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """Nothing is written outside of the folder."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("../outside", b"x")
    with pytest.raises(UsageError, match="lies outside of it"):
        unpack(tmp_path / "x.zip", tmp_path / "folder")
    assert not (tmp_path / "outside").exists()
