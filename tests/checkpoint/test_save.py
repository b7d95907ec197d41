"""Saving: what was saved comes back, training is never stopped by a disk, and a bad disk is found out."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import round as rounds
from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.commit import checkpoints, newest_verified, read_manifest
from shoal.checkpoint.load import read_all
from shoal.checkpoint.objects import OnPoint, Places, unheard
from shoal.checkpoint.save import Saver, SaveReport
from shoal.errors import EnvironmentFault, UsageError
from tests.checkpoint.states import LAYOUT, OBJECT_BYTES, leftovers, on_ranks, same, save, saver_for, state_of
from tests.waiting import HANG_S, NEVER_S


def loaded(directory: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the tensors of the newest checkpoint, which must be whole."""
    manifest, problems = newest_verified(directory)
    assert manifest is not None
    assert problems == []
    return manifest.step, read_all(manifest, directory)


def test_what_was_saved_comes_back_bit_by_bit(tmp_path):
    """Tensors of all kinds, the state, the layout and the versions are those that were given."""
    report = save(saver_for(tmp_path), 7)
    assert (report.step, report.committed, report.error) == (7, True, None)
    step, tensors = loaded(tmp_path)
    assert step == 7
    assert same(tensors, state_of(7))
    manifest = read_manifest(checkpoints(tmp_path)[0])
    assert (manifest.state, manifest.layout, manifest.writer["torch"]) == ({"step": 7}, LAYOUT, str(torch.__version__))
    assert Places(tmp_path).latest.read_text() == f"step-00000007\n{manifest.hash}\n"


def test_training_may_change_its_tensors_as_soon_as_save_returns(tmp_path):
    """The checkpoint has the values at the call, though it is written later."""
    hold = threading.Event()
    saver = saver_for(tmp_path, on_point=lambda label: label != "object/write.before" or hold.wait(HANG_S))
    tensors, state = state_of(1), {"cursor": [1]}
    saver.save(1, tensors, state, layout={})
    for tensor in tensors.values():
        tensor.zero_()
    state["cursor"].append(2)
    hold.set()
    saver.wait(HANG_S)
    assert same(loaded(tmp_path)[1], state_of(1))
    assert read_manifest(checkpoints(tmp_path)[0]).state == {"cursor": [1]}


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    """Both are whole, in order, and the wait is part of the second one's stall."""
    hold, waits = threading.Event(), threading.Event()

    def release() -> None:
        waits.wait(HANG_S)
        time.sleep(0.1)
        hold.set()

    saver = saver_for(tmp_path, on_point=lambda label: label != "commit/rename.before" or hold.wait(HANG_S))
    saver.save(1, state_of(1), {}, layout={})
    assert saver.poll() == []
    assert saver.wait(0.01) == []
    join = saver._join
    monkeypatch.setattr(saver, "_join", lambda within_s: (waits.set(), join(within_s)))
    threading.Thread(target=release).start()
    assert saver.save(2, state_of(2), {}, layout={}) >= 0.1
    assert [(report.step, report.committed) for report in saver.wait(HANG_S)] == [(1, True), (2, True)]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000001"]


def test_the_memory_is_used_again(tmp_path):
    """Saves of the same shapes stage into the same memory; `prepare` has allocated it already; other shapes work."""
    saver = saver_for(tmp_path)
    saver.prepare(state_of(0))
    ready = saver._ready
    save(saver, 1)
    save(saver, 2)
    assert saver._ready is ready
    other = {"model/other": torch.ones(3)}
    save(saver, 3, other)
    assert same(loaded(tmp_path)[1], other)


def test_what_did_not_change_is_not_written_again(tmp_path):
    """A second save of equal tensors writes nothing; a change in one tensor rewrites its own objects alone."""
    saver = saver_for(tmp_path)
    first = save(saver, 1)
    again = save(saver, 2, state_of(1))
    assert (again.bytes_written, again.bytes_reused) == (0, first.bytes_written)
    changed = state_of(1)
    changed["model/weight"][0, 0] += 1
    third = save(saver, 3, changed)
    assert 0 < third.bytes_written <= OBJECT_BYTES + 1024
    assert third.bytes_written + third.bytes_reused == first.bytes_written


def test_a_reused_object_is_verified_too(tmp_path):
    """An object that rotted since it was written is not relied on: it is written again."""
    saver = saver_for(tmp_path)
    save(saver, 1)
    victim = next(Places(tmp_path).objects.iterdir())
    rot(victim)
    report = save(saver, 2, state_of(1))
    assert report.bytes_written == victim.stat().st_size
    assert same(loaded(tmp_path)[1], state_of(1))


def test_the_same_step_can_be_saved_again(tmp_path):
    """A run that went back and came to the same step replaces that checkpoint, by one rename."""
    save(saver_for(tmp_path), 5, state_of(1))
    assert save(saver_for(tmp_path), 5, state_of(2)).committed
    assert same(loaded(tmp_path)[1], state_of(2))
    assert leftovers(tmp_path) == []


def rot(path: Path) -> None:
    """Flip one bit in the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def lying_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stores something else than it was given, without an error."""
    write = os.write

    def lying(descriptor: int, data: memoryview) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            return write(descriptor, data)
        return write(descriptor, bytes(data[:-1]) + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(os, "write", lying)


def test_a_disk_that_lies_is_found_out_before_the_commit(tmp_path, monkeypatch):
    """What is read back differs: the save fails in words, the one before stays, nothing unfinished is left."""
    saver = saver_for(tmp_path)
    save(saver, 1)
    lying_write(monkeypatch)
    report = save(saver, 2)
    monkeypatch.undo()
    assert not report.committed
    assert "does not hash to its name" in str(report.error)
    assert loaded(tmp_path)[0] == 1
    assert leftovers(tmp_path) == []
    assert save(saver, 3).committed


def test_without_the_read_back_the_lie_would_be_committed(tmp_path, monkeypatch):
    """Planted fault: the test above depends on the verification, and fails without it."""
    lying_write(monkeypatch)
    monkeypatch.setattr(rounds, "settle", lambda stored, places, *, disk: None)
    assert save(saver_for(tmp_path), 2).committed
    assert newest_verified(tmp_path)[0] is None


@pytest.fixture
def tiny_disk(tmp_path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root; the faults of the next tests are simulated")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def expect_survival(saver: Saver, directory: Path, said: str) -> None:
    """The save of step 2 fails with a sentence, and step 1 is still the newest checkpoint."""
    large = {"model/weight": torch.randn(200, 1024)}
    report = save(saver, 2, large)
    assert not report.committed
    assert str(report.error).startswith("the checkpoint of step 2 was not saved, that of step 1 is still the newest: ")
    assert said in str(report.error)
    assert str(directory) in str(report.error)
    assert loaded(directory)[0] == 1


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tiny_disk):
    """The sentence names path and repair; what was written is removed; with space again the next save works."""
    saver = saver_for(tiny_disk)
    save(saver, 1)
    full = f"{tiny_disk}/checkpoints: No space left on device; free space on that disk, or lower checkpoint.keep"
    expect_survival(saver, tiny_disk, full)
    assert leftovers(tiny_disk) == []
    assert save(saver, 3).committed


def test_a_disk_that_becomes_read_only_costs_a_checkpoint_and_not_the_run(tiny_disk):
    """A file system that was remounted read-only is named; after the repair the next save works."""
    saver = saver_for(tiny_disk)
    save(saver, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    expect_survival(saver, tiny_disk, "Read-only file system; make the folder writable")
    subprocess.run(["mount", "-o", "remount,rw", str(tiny_disk)], check=True)
    assert save(saver, 3).committed


def test_a_run_that_could_never_save_does_not_start(tiny_disk):
    """Read-only from the beginning: better to hear it before the first step."""
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(EnvironmentFault, match=r"no checkpoint can be saved in .*/checkpoints"):
        saver_for(tiny_disk)


def test_a_limit_on_file_sizes_is_named(tmp_path):
    """`ulimit -f`, a real error of the system in the middle of a write."""
    saver = saver_for(tmp_path, object_bytes=1 << 20)
    save(saver, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        expect_survival(saver, tmp_path, "ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "repair"), [(errno.ENOSPC, "free space"), (errno.EACCES, "writable"), (errno.EIO, "check the disk")]
)
@pytest.mark.parametrize("suffix", [".safetensors", "manifest.json", "latest"])
def test_an_error_in_any_file_becomes_a_sentence(tmp_path, monkeypatch, code, repair, suffix):
    """Whichever file cannot be written: a report with path and repair, and a whole checkpoint to load. Of a full disk
    the folder is named: the file is gone by then."""
    saver = saver_for(tmp_path)
    save(saver, 1)
    write = os.write

    def failing(descriptor: int, data: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix):
            raise OSError(code, os.strerror(code))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", failing)
    report = save(saver, 2)
    monkeypatch.undo()
    assert (f"{tmp_path}/checkpoints: " if code == errno.ENOSPC else suffix) in str(report.error)
    assert repair in str(report.error)
    assert loaded(tmp_path)[0] == (2 if report.committed else 1)


def test_ranks_share_the_work_and_hear_the_same(tmp_path):
    """Three ranks write a part each, of about equal size; all reports agree; the checkpoint equals that of one rank."""
    exchange, written, reports = LocalExchange(), [0] * 3, {}

    def work(rank: int) -> None:
        def count(label: str) -> None:
            written[rank] += label == "object/write.after"

        saver = saver_for(tmp_path / "many", rank=rank, world_size=3, exchange=exchange, on_point=count)
        saver.save(1, state_of(1), {"step": 1}, layout=LAYOUT)
        (reports[rank],) = saver.wait(HANG_S)

    on_ranks(3, work)
    assert min(written) >= 2
    assert max(written) - min(written) <= 2
    assert len({(report.committed, report.error, report.bytes_written) for report in reports.values()}) == 1
    save(saver_for(tmp_path / "one"), 1)
    many, one = (read_manifest(checkpoints(tmp_path / name)[0]) for name in ("many", "one"))
    assert (many.tensors, many.objects) == (one.tensors, one.objects)
    assert same(loaded(tmp_path / "many")[1], state_of(1))


class Asked(LocalExchange):
    """Knows when the first rank waits for a word."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        self.asked.set()
        return super().collect(keys, timeout_s)


def test_no_rank_writes_while_rank_0_may_still_clear_up(tmp_path):
    """Rank 0 comes late, and deletes what was left: rank 1 waits with what would be taken for that."""
    exchange, heard, reports = Asked(), [], {}

    def saved_by(rank: int, on_point: OnPoint) -> Saver:
        saver = saver_for(tmp_path, rank=rank, world_size=2, exchange=exchange, timeout_s=HANG_S, on_point=on_point)
        with pytest.raises(UsageError):  # on all ranks alike: the round after it is the first that writes
            saver.save(1, state_of(1), {"not JSON": torch.ones(1)}, layout=LAYOUT)
        saver.save(1, state_of(1), {"step": 1}, layout=LAYOUT)
        return saver

    savers = [saved_by(1, heard.append)]
    assert exchange.asked.wait(HANG_S)
    assert heard == []
    savers.append(saved_by(0, unheard))
    for saver in savers:
        (reports[saver],) = saver.wait(HANG_S)
    assert [report.error for report in reports.values()] == [None, None]
    assert "object/write.after" in heard
    assert same(loaded(tmp_path)[1], state_of(1))


def saves_of_ranks(directory: Path, tensors_of, **options) -> dict[int, SaveReport]:
    """Two ranks save step 2; the reports of each."""
    exchange, reports = LocalExchange(), {}

    def work(rank: int) -> None:
        heard = {"on_point": options["on_point"]} if "on_point" in options and rank == 1 else {}
        saver = saver_for(directory, rank=rank, world_size=2, exchange=exchange, timeout_s=HANG_S, **heard)
        saver.save(2, tensors_of(rank), {}, layout={})
        (reports[rank],) = saver.wait(HANG_S)

    on_ranks(2, work)
    return reports


def test_one_rank_that_fails_is_named_to_all_and_nobody_waits(tmp_path):
    """Both ranks report rank 1's error; the checkpoint before stays; what rank 0 wrote is removed."""
    save(saver_for(tmp_path), 1)

    def broken(label: str) -> None:
        if label == "object/fsync.before":
            raise OSError(errno.EIO, "Input/output error", "the disk of rank 1")

    reports = saves_of_ranks(tmp_path, lambda rank: state_of(2), on_point=broken)
    assert not any(report.committed for report in reports.values())
    assert all("rank 1: " in str(report.error) for report in reports.values())
    assert loaded(tmp_path)[0] == 1
    assert leftovers(tmp_path) == []


def test_ranks_with_other_tensors_are_refused(tmp_path):
    """A rank whose model differs cannot make a checkpoint of two models."""
    reports = saves_of_ranks(tmp_path, lambda rank: {"model/w": torch.zeros(3 + rank)})
    assert all("rank 1 saves tensors of other names" in str(report.error) for report in reports.values())
    assert newest_verified(tmp_path) == (None, [])


def test_a_rank_that_never_answers_is_an_error_in_time(tmp_path):
    """Rank 0 does not wait for ever for a rank that is gone; nor does a rank whose rank 0 is gone."""
    exchange = LocalExchange()
    for rank in (0, 1):
        saver = saver_for(tmp_path, rank=rank, world_size=2, exchange=exchange, timeout_s=0.05)
        report = save(saver, 10 + rank)
        assert not report.committed
        assert "a rank did not answer" in str(report.error)


def test_a_late_rank_0_hears_at_once_who_gave_up(tmp_path):
    """It does not wait for the share of a rank that has waited for it in vain."""
    exchange = LocalExchange()
    assert not save(saver_for(tmp_path, rank=1, world_size=2, exchange=exchange, timeout_s=0.05), 1).committed
    report = save(saver_for(tmp_path, rank=0, world_size=2, exchange=exchange, timeout_s=NEVER_S), 1)
    assert "rank 1: " in str(report.error)


def test_closing_does_not_wait_for_the_dead(tmp_path):
    """A rank that leaves because others died is not held back by a save that they will never finish."""
    saver = saver_for(tmp_path, world_size=2, timeout_s=HANG_S)
    saver.save(1, state_of(1), {}, layout={})
    assert saver.close(0.05) == []


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    """A type without a place in the format, and a state that is not JSON."""
    saver = saver_for(tmp_path)
    with pytest.raises(UsageError, match="'model/z' is complex64"):
        saver.save(1, {"model/z": torch.zeros(2, dtype=torch.complex64)}, {}, layout={})
    with pytest.raises(UsageError, match=r"state\.rng is of type Tensor"):
        saver.save(1, state_of(1), {"rng": torch.zeros(1)}, layout={})
    assert save(saver, 1).committed


def test_nothing_at_all_can_be_saved(tmp_path):
    """A run without tensors has a checkpoint too: its state."""
    assert save(saver_for(tmp_path), 1, {}).committed
    assert loaded(tmp_path) == (1, {})
