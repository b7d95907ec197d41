"""A checkpoint that is named by its folder is verified before it is used; folders that vanished are made again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.commit import checkpoint_in, newest_verified, read_manifest
from shoal.checkpoint.inspect import compare
from shoal.checkpoint.objects import Places
from shoal.checkpoint.weights import export
from shoal.errors import CorruptCheckpoint, UsageError
from tests.checkpoint.states import leftovers, on_ranks, save, saver_for, state_of
from tests.waiting import HANG_S


@pytest.fixture
def run(tmp_path) -> Path:
    """The checkpoints of steps 1 and 2, of which an object of step 2 has lost a bit."""
    saver = saver_for(tmp_path / "run")
    save(saver, 1)
    save(saver, 2)
    places = Places(tmp_path / "run")
    one, two = (read_manifest(places.step(step)).objects for step in (1, 2))
    victim = places.object(next(digest for digest in two if digest not in one))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 4
    victim.write_bytes(content)
    return tmp_path / "run"


USES = {
    "checkpoint_in": lambda folder: checkpoint_in(folder),
    "export": lambda folder: export(folder, folder.parents[2] / "weights.safetensors"),
    "compare": lambda folder: compare(folder.parent / "step-00000001", folder),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_damaged_checkpoint_is_not_used_though_it_was_named(run, use):
    """The flipped bit is found, and the file and what it holds are named; the other one is used."""
    with pytest.raises(CorruptCheckpoint, match=r"step 2: .*does not hash to its name.*; it holds (model|optimizer)/"):
        use(Places(run).step(2))
    assert not (run.parent / "weights.safetensors").exists()
    use(Places(run).step(1))
    assert checkpoint_in(run) == Places(run).step(1)


def test_a_damaged_manifest_is_not_used_though_it_was_named(run):
    """Any byte of it."""
    path = Places(run).manifest(1)
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":3'))
    with pytest.raises(CorruptCheckpoint, match="do not hash to the hash in it"):
        checkpoint_in(path.parent)


def test_a_checkpoint_may_be_named_by_a_link_or_from_within(run, monkeypatch):
    """Its objects are found beside the real folder."""
    (run.parent / "best").symlink_to(Places(run).step(1), target_is_directory=True)
    assert checkpoint_in(run.parent / "best") == Places(run).step(1)
    monkeypatch.chdir(Places(run).step(1))
    assert checkpoint_in(Path()) == Places(run).step(1)


def test_a_folder_that_was_copied_without_its_objects_is_no_checkpoint(run, tmp_path):
    """The sentence names what is missing."""
    shutil.copytree(Places(run).step(1), tmp_path / "step-00000001")
    with pytest.raises(CorruptCheckpoint, match="is missing"):
        checkpoint_in(tmp_path / "step-00000001")
    with pytest.raises(UsageError, match="holds no checkpoint"):
        checkpoint_in(tmp_path)


@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/objects", "."])
def test_folders_that_were_removed_in_mid_run_are_made_again(tmp_path, gone):
    """The next save is whole, and the run resumes from it."""
    run = tmp_path / "run"
    saver = saver_for(run)
    assert save(saver, 1).committed
    shutil.rmtree(run / gone)
    report = save(saver, 2)
    assert (report.committed, report.error) == (True, None)
    found, _ = newest_verified(run)
    assert found is not None
    assert found.step == 2
    assert leftovers(run) == []


def test_ranks_make_them_again_together(tmp_path):
    """Whoever comes first; all report the same."""
    run, exchange, reports = tmp_path / "run", LocalExchange(), {}
    savers = [saver_for(run, rank=rank, world_size=3, exchange=exchange) for rank in range(3)]
    shutil.rmtree(run / "checkpoints")

    def work(rank: int) -> None:
        savers[rank].save(1, state_of(1), {}, layout={})
        (reports[rank],) = savers[rank].wait(HANG_S)

    on_ranks(3, work)
    assert [report.error for report in reports.values()] == [None] * 3
    found, problems = newest_verified(run)
    assert found is not None
    assert problems == []


def test_removed_between_writing_and_commit_costs_that_save_alone(tmp_path):
    """The save fails in words, and the next one is whole."""
    run, once = tmp_path / "run", [True]

    def remove(label: str) -> None:
        if label == "manifest/write.before" and once:
            once.clear()
            shutil.rmtree(run / "checkpoints")

    saver = saver_for(run, on_point=remove)
    report = save(saver, 1)
    assert not report.committed
    assert "step-00000001" in str(report.error)
    assert save(saver, 2).committed
    assert newest_verified(run)[1] == []


def test_a_tensor_without_elements_is_read_in_memory_of_its_own(tmp_path):
    """Nothing of it lies in an object."""
    save(saver_for(tmp_path), 1, {"model/none": torch.empty(0, 7)})
    assert export(tmp_path, tmp_path / "out") == 1
