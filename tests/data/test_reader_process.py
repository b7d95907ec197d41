"""Readers in processes give the same batches as threads, pass on refusals, and never outlive their rank."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.data.augment import Augmentation, flip
from shoal.data.batches import BatchReader, SourceReader
from shoal.data.cursor import Interval
from shoal.data.feed import Feed, StepShare
from shoal.data.reader_process import Opening, ReaderProcess
from shoal.data.sample import map_tree
from shoal.errors import DataError, EnvironmentFault, UserCodeError
from tests.data.sources import built, written
from tests.waiting import HANG_S

SEED = 3


class Nested:
    """Samples of every form: dicts, tuples, several types, an empty leaf, weights; prints while it reads."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple:
        print("reading", index)
        if index == 9:
            raise DataError("record nine is torn")
        if index == 10:
            raise ZeroDivisionError("user's own")
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = {"a": (torch.tensor(index, dtype=torch.bfloat16), torch.zeros(0, 3)), "b": torch.tensor([True, False])}
        return inputs, index, 0.5


def opened(kind: str, folder: str) -> BatchReader:
    """What the process calls."""
    if kind == "refused":
        raise DataError("there is no such data")
    if kind == "nested":
        from shoal.data.order import Order

        return SourceReader(Nested(), Order(12, 0, shuffle=False), denominator="auto")
    dataset = built(written("images", Path(folder) / "data"), Path(folder) / "cache")
    changes = Augmentation([flip], SEED)
    return SourceReader(dataset.train, dataset.order(SEED, shuffle=True), denominator="auto", augmentation=changes)


def opening(kind: str, folder: Path) -> Opening:
    return Opening("tests.data.test_reader_process:opened", {"kind": kind, "folder": str(folder)})


@pytest.mark.slow
def test_processes_read_what_threads_read(tmp_path: Path):
    """A feed with two processes gives the batches of a thread, bit for bit, augmentation included; closing it ends
    them."""
    reader = opened("images", str(tmp_path))
    made: list[ReaderProcess] = []

    def start() -> ReaderProcess:
        made.append(ReaderProcess(opening("images", tmp_path)))
        return made[-1]

    dataset = built(written("images", tmp_path / "data"), tmp_path / "cache")
    order = dataset.order(SEED, shuffle=True)
    with Feed(dataset.train, order, StepShare(8, 1, 2, micro_samples=2), readers=2, open_reader=start) as feed:
        steps = [feed.next() for _ in range(20)]
    for step in steps:
        for number, batch in enumerate(step.microbatches):
            start_at = step.interval.start + 4 + 2 * number
            wanted = reader.read(Interval(start_at, start_at + 2)).batch
            for got, expected in ((batch.inputs, wanted.inputs), (batch.targets, wanted.targets)):
                assert torch.equal(got, expected)  # type: ignore[arg-type]
            assert torch.equal(batch.positions, wanted.positions)
            assert torch.equal(batch.weights, wanted.weights)
    assert len(made) == 2
    assert all(process._process.poll() is not None for process in made)


@pytest.mark.slow
def test_any_batch_and_any_refusal_comes_across(tmp_path: Path):
    """Nested inputs of several types, prints of the user's, refusals with their kind; after one it goes on; a process
    that is killed says so."""
    process = ReaderProcess(opening("nested", tmp_path))
    wanted = opened("nested", "").read(Interval(2, 5)).batch
    got = process.read(Interval(2, 5)).batch
    pairs = []
    map_tree(lambda leaf: pairs.append([leaf]) or leaf, got.inputs)
    leaves = iter(pairs)
    map_tree(lambda leaf: next(leaves).append(leaf) or leaf, wanted.inputs)
    assert len(pairs) == 3
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    assert torch.equal(got.weights, wanted.weights)
    with pytest.raises(DataError, match="Sample 9 at position 9: record nine is torn"):
        process.read(Interval(8, 10))
    with pytest.raises(UserCodeError, match="Sample 10 at position 10: the data source raised ZeroDivisionError"):
        process.read(Interval(10, 11))
    assert process.read(Interval(0, 1)).batch.positions.tolist() == [0]
    with pytest.raises(EnvironmentFault, match=r"killed by signal 9 while it read the positions \[11, 12\)"):
        process.read(Interval(11, 12))
    process.close()
    with pytest.raises(DataError, match="there is no such data"):
        ReaderProcess(opening("refused", tmp_path))


HANGING = """
import sys, threading
from shoal.data.reader_process import Opening, ReaderProcess
from shoal.data.cursor import Interval
process = ReaderProcess(Opening("tests.data.test_reader_process:hanging", {}))
print(process._process.pid, flush=True)
threading.Thread(target=process.read, args=(Interval(0, 1),), daemon=True).start()
sys.stdin.read()
"""


def hanging() -> BatchReader:
    """A reader that never answers."""

    class Hangs:
        def read(self, part: Interval) -> None:
            import threading

            threading.Event().wait()

    return Hangs()  # type: ignore[return-value]


@pytest.mark.slow
def test_a_killed_rank_leaves_no_reader():
    """A rank that is killed while its reader hangs in the data source takes it along."""
    rank = subprocess.Popen(
        [sys.executable, "-c", HANGING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert rank.stdout is not None
    reader = int(rank.stdout.readline())
    ended = os.pidfd_open(reader)
    rank.kill()
    rank.wait()
    import select

    poll = select.poll()
    poll.register(ended, select.POLLIN)
    assert poll.poll(1000 * HANG_S), "the reader still runs"
