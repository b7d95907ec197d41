"""Crash capsules: what is in them, what is not, and what is refused."""

from __future__ import annotations

import json
import math
import tomllib
import zipfile
from pathlib import Path

import msgspec
import pytest

from shoal.data.config import AdaptiveBatch, BatchConfig
from shoal.errors import UsageError
from shoal.observe.capsule import NEXT_SAMPLES, Failed, read_capsule, shoal_version, unpack, write_capsule
from shoal.observe.events import EventWriter
from shoal.observe.facts import write_facts
from tests.checkpoint.states import save, saver_for

FAILED = Failed(1, 1, "ArithmeticError: a mistake", "the whole traceback")


def run_with_losses(folder: Path, losses: list[float], text: str = "[run]\n") -> Path:
    """A run directory with a checkpoint of step 2, and these losses from step 1 on."""
    write_facts(folder, {"name": "own", "world": 2, "torch": "2.13", "data": {"train/samples": 30}})
    (folder / "run.toml").write_text(text)
    with EventWriter(folder, rank=0) as writer:
        for step, loss in enumerate(losses, start=1):
            values = {"loss/train": loss, "grad/norm": loss, "samples/consumed": 5 * step}
            writer.write(step, values, time_s=float(step))
    assert save(saver_for(folder), 2).committed
    return write_capsule(
        folder, FAILED, seed=7, samples_at=lambda _: 5, checkpoint=folder / "checkpoints/step-00000002"
    )


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


def test_after_a_restart_the_last_start_counts(tmp_path: Path) -> None:
    """It resumes from step 2 of three: without a step of its own, step 3 failed, on the samples behind those of step 2;
    a loss that is none counts with its own samples."""
    run_with_losses(tmp_path, [1.0, 0.9, 0.8])

    def capsule_after(*losses: float) -> tuple[int, int, int]:
        with EventWriter(tmp_path, rank=0) as writer:
            writer.resume(2, time_s=10.0)
            for step, loss in enumerate(losses, start=3):
                values = {"loss/train": loss, "grad/norm": loss, "samples/consumed": 5 * step}
                writer.write(step, values, time_s=10.0 + step)
        found = read_capsule(write_capsule(tmp_path, FAILED, seed=7, samples_at=lambda _: 5, checkpoint=None))
        return found.step, found.start, found.stop

    assert capsule_after() == (3, 10, 15)
    assert capsule_after(math.nan) == (3, 10, 15)
    assert capsule_after(0.8, 0.7) == (5, 20, 25)


def test_a_step_before_says_how_many_samples_the_failed_one_has(tmp_path: Path) -> None:
    """Where a batch grows by its noise; the first step of all has those of the first."""

    def capsule_after(*steps: tuple[int, int, float]) -> tuple[int, int, int]:
        folder = tmp_path / str(len(steps))
        folder.mkdir()
        write_facts(folder, {"name": "own"})
        with EventWriter(folder, rank=0) as writer:
            for step, (consumed, following, loss) in enumerate(steps, start=1):
                values = {"loss/train": loss, "grad/norm": loss, "samples/consumed": consumed}
                writer.write(step, values | {NEXT_SAMPLES: following}, time_s=float(step))
        batch = BatchConfig(global_samples=64, adaptive=AdaptiveBatch(first=4))
        found = read_capsule(write_capsule(folder, FAILED, seed=7, samples_at=batch.samples_at, checkpoint=None))
        return found.step, found.start, found.stop

    assert capsule_after() == (1, 0, 4)
    assert capsule_after((4, 8, 1.0)) == (2, 4, 12)
    assert capsule_after((4, 8, 1.0), (12, 16, math.nan)) == (2, 4, 12)
    assert capsule_after((4, 8, 1.0), (12, 8, 1.0), (20, 16, 1.0)) == (4, 20, 36)


def test_a_capsule_without_a_run_file_is_a_sentence(tmp_path: Path) -> None:
    """And so is one that was cut in the middle of a file."""
    path = rewritten(run_with_losses(tmp_path / "run", [1.0]), tmp_path / "bare.zip")
    with pytest.raises(UsageError, match=r"holds no run\.toml"):
        unpack(path, tmp_path / "out")
    content = bytearray((tmp_path / "run/capsule.zip").read_bytes())
    content[60:80] = bytes(20)
    (tmp_path / "damaged.zip").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be unpacked"):
        unpack(tmp_path / "damaged.zip", tmp_path / "out")


def test_secrets_of_the_run_file_are_left_out(tmp_path: Path) -> None:
    """The webhook and the store's options; all other keys stay."""
    text = '[run]\nname = "own"\n[observe]\nwebhook = "http://a/hidden"\nreport = false\n'
    (tmp_path / "run").mkdir()
    text += '[checkpoint]\nkeep = 3\n[checkpoint.remote_options]\nsecret = "hidden"\n'
    path = run_with_losses(tmp_path / "run", [1.0], text)
    unpack(path, tmp_path / "out")
    found = tomllib.loads((tmp_path / "out/run.toml").read_text())
    assert found == {"run": {"name": "own"}, "observe": {"report": False}, "checkpoint": {"keep": 3}}


def test_the_checkpoint_in_it_is_whole(tmp_path: Path) -> None:
    """Unpacked elsewhere, it verifies; the file is readable by its owner alone."""
    from shoal.checkpoint.commit import newest_verified

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
