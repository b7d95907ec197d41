"""The feed gives exactly this replica's positions, in order, ahead of need, and says what went wrong."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from shoal.data.batches import SlowReads, SourceReader
from shoal.data.cursor import Cursor, Interval
from shoal.data.feed import Feed, StepShare, evaluation_batches
from shoal.data.order import Order
from shoal.data.sample import Batch
from shoal.errors import ConfigError, DataError, UserCodeError
from tests.waiting import HANG_S, wait_until


class Numbers:
    """Sample i is (i, i), after a pause; fails at `faulty`."""

    def __init__(self, samples: int, pause_s: float = 0.0, faulty: int = -1) -> None:
        self.samples, self.pause_s, self.faulty = samples, pause_s, faulty

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(self.pause_s)
        if index == self.faulty:
            raise ZeroDivisionError("user's own")
        return index, index


def feed(source: Numbers, **options) -> Feed:
    order = Order(len(source), seed=7)
    names = ("global_samples", "replica", "replicas", "micro_samples", "group", "epoch")
    own = StepShare(**({"global_samples": 4} | {name: options.pop(name) for name in names if name in options}))
    return Feed(source, order, own, **options)


def ids_of(batches: list[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.inputs]  # type: ignore[union-attr]


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 30),
    replicas=st.integers(1, 5),
    global_samples=st.integers(1, 12),
    micro=st.one_of(st.none(), st.integers(1, 5)),
    start=st.integers(0, 50),
    readers=st.integers(1, 3),
)
def test_replicas_together_read_the_order(samples, replicas, global_samples, micro, start, readers):
    """Whatever the replicas, microbatches and readers, a step's ids are the order's at its positions."""
    source, order = Numbers(samples), Order(samples, seed=7)
    feeds = [
        feed(
            source,
            replicas=replicas,
            replica=replica,
            global_samples=global_samples,
            micro_samples=micro,
            start=start,
            readers=readers,
        )
        for replica in range(replicas)
    ]
    for step in range(3):
        parts = [each.next() for each in feeds]
        expected = Interval(start + step * global_samples, start + (step + 1) * global_samples)
        assert {part.interval for part in parts} == {expected}
        batches = [batch for part in parts for batch in part.microbatches]
        assert ids_of(batches) == order.ids(expected.positions()).tolist()
        assert torch.cat([batch.positions for batch in batches]).tolist() == expected.positions().tolist()
        assert all(len(batch) <= (micro or global_samples) for batch in batches)
    for each in feeds:
        each.close()


def test_an_epoch_survives_restarts_with_other_world_sizes():
    """Over an epoch and a half with two kills and 2, 3, then 1 replicas, committed ids are those of one replica's run,
    and the first epoch's are all there once."""
    source, cursor, used = Numbers(60), Cursor(), []
    for replicas, steps in ((2, 4), (3, 5), (1, 3)):
        feeds = [
            feed(source, replicas=replicas, replica=i, global_samples=8, start=cursor, readers=2)
            for i in range(replicas)
        ]
        for step in range(steps):
            parts = [each.next() for each in feeds]
            behind, taken = cursor.take(8)
            assert all(part.interval == taken for part in parts)
            if step < steps - 1:  # the last step is killed before its commit
                cursor = behind
                used += [i for part in parts for i in ids_of(part.microbatches)]
        for each in feeds:
            each.close()
        cursor = Cursor.from_state(cursor.to_state())
    assert sorted(used[:60]) == list(range(60))
    assert used == Order(60, seed=7).ids(np.arange(len(used))).tolist()
    assert len(used) == 72


class Noted(Numbers):
    """Which samples were read so far."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("together", [1, 2, 8])
def test_steps_ahead_are_read_in_a_backward_in_the_same_order(together: int):
    """Two steps ahead at least, small ones some at a time; and nothing between two backwards."""
    source, order, planned = Noted(400), Order(400, seed=7), 2
    with feed(source) as fed:
        backward = fed.in_backwards(small_at_once=together)
        for step in range(30):
            taken = fed.next()
            assert ids_of(taken.microbatches) == order.ids(np.arange(4 * step, 4 * step + 4)).tolist()
            wait_until(lambda steps=planned: len(source.read) >= 4 * steps)
            time.sleep(0.002)
            assert len(source.read) == 4 * planned
            planned += together if planned - step - 1 < 2 else 0
            backward()
            wait_until(lambda steps=planned: len(source.read) == 4 * steps)


def test_a_step_that_no_backward_announces_is_read_when_it_is_asked_for():
    with feed(Noted(80), prefetch_steps=1) as fed:
        fed.in_backwards(small_at_once=1)
        assert [fed.next().interval.start for _ in range(5)] == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("quick", [False, True], ids=["threads", "loop"])
@pytest.mark.parametrize("samples", [4, 16, 40])
def test_an_epoch_is_read_when_its_first_step_is_asked_for(samples: int, quick: bool) -> None:
    """A loop may fill its buffer between two epochs, however short they are."""
    buffer = torch.zeros(samples)
    order = Order(samples, seed=7)
    with Feed(TensorDataset(buffer, buffer), order, StepShare(4, epochs_apart=True), prefetch_steps=3) as fed:
        backward = fed.in_backwards(small_at_once=8, quick_by_loop=quick)
        for epoch in range(12):
            buffer.copy_(epoch * 100 + torch.arange(samples))
            found: list[int] = []
            for _ in range(samples // 4):
                found += ids_of(fed.next().microbatches)
                backward()
            positions = np.arange(epoch * samples, (epoch + 1) * samples)
            assert found == (epoch * 100 + order.ids(positions)).tolist()


def test_large_steps_are_read_no_further():
    """Eight more of them would be memory that nobody has asked for."""

    class Large(Noted):
        def __getitem__(self, index: int):
            return np.zeros(1 << 16, dtype=np.float32), super().__getitem__(index)[1]

    source = Large(80)
    with feed(source) as fed:
        fed.in_backwards(small_at_once=8)
        for _ in range(5):
            fed.next()
        wait_until(lambda: len(source.read) >= 24)
        assert len(source.read) == 24


def test_weights_that_require_a_gradient_are_counted():
    """As a data set gives them that computes weights by a model."""
    weights = torch.ones(3, requires_grad=True)
    batch = Batch(torch.zeros(3), torch.zeros(3), weights=weights, positions=torch.arange(3))
    assert batch.weighs_ones
    assert batch.count().weight == 3.0


def test_groups_are_never_cut():
    """With statistics groups, every microbatch is whole groups; sizes that would cut one are refused."""
    source = Numbers(64)
    for replica in range(3):
        with feed(source, replicas=3, replica=replica, global_samples=16, micro_samples=4, group=4) as fed:
            assert all(len(batch) == 4 for batch in fed.next().microbatches)
    with pytest.raises(ConfigError, match="cut statistics groups"):
        feed(source, global_samples=16, micro_samples=6, group=4)
    with pytest.raises(ConfigError, match="multiple of 4"):
        feed(source, global_samples=10, group=4)


def test_a_replica_without_samples_gets_none():
    """More replicas than samples is legal: the last ones have steps without microbatches."""
    with feed(Numbers(9), replicas=3, replica=0, global_samples=2) as fed:
        assert fed.next().microbatches == []


def test_order_is_kept_when_readers_race():
    """With readers of random speed, steps come in order."""

    class Erratic(Numbers):
        def __getitem__(self, index: int) -> tuple[int, int]:
            time.sleep(0.004 * (index % 3))
            return index, index

    with feed(Erratic(100), global_samples=2, readers=4, prefetch_steps=8) as fed:
        got = [fed.next() for _ in range(30)]
    assert [step.interval.start for step in got] == list(range(0, 60, 2))
    assert ids_of([b for step in got for b in step.microbatches]) == Order(100, 7).ids(np.arange(60)).tolist()


class Gated(Numbers):
    """Gives a sample for each that it is `allowed`."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.allowed, self.asked = threading.Semaphore(0), 0

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.asked += 1
        self.allowed.acquire()
        return index, index

    def allow(self, samples: int) -> None:
        self.allowed.release(samples)


def test_reading_hides_behind_the_step():
    """While the caller takes a step, the next ones are read: it gets them though nothing can be read any more. Then it
    waits, and says for how long."""
    source, steps, last = Gated(1000), [], threading.Event()
    slow = SlowReads(lambda _: source.allow(4) if last.is_set() else None, tell_after_s=0.1)
    with feed(source, prefetch_steps=2, slow=slow) as fed:
        source.allow(4)
        fed.next()
        source.allow(2 * 4)  # nobody asks for them yet
        wait_until(lambda: source.asked == 4 + 2 * 4)
        steps += [fed.next(), fed.next()]
        last.set()
        steps.append(fed.next())
        source.allow(1000)  # for the threads that are still in the source
    assert [step.interval.start for step in steps] == [4, 8, 12]
    assert steps[-1].wait_s >= 0.1


def test_a_failing_sample_stops_at_its_own_step():
    """Steps before it are given; then its id and position are named, again and again, and nothing is skipped."""
    order = Order(40, seed=7)
    position = 9
    faulty = int(order.ids(np.array([position]))[0])
    with feed(Numbers(40, faulty=faulty), readers=2, prefetch_steps=4) as fed:
        assert [fed.next().interval.start for _ in range(2)] == [0, 4]
        for _ in range(2):
            with pytest.raises(UserCodeError, match=f"Sample {faulty} at position {position}.*user's own") as caught:
                fed.next()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_closing_ends_the_readers():
    """After `close` no thread of the feed runs, even in mid-step, and `next` says so."""
    before = set(threading.enumerate())
    fed = feed(Numbers(1000, pause_s=0.005), global_samples=1000, micro_samples=2, readers=3)  # 5 s a step
    readers = set(threading.enumerate()) - before
    assert len(readers) == 3
    fed.close()
    fed.close()
    assert not any(reader.is_alive() for reader in readers)
    with pytest.raises(ValueError, match="closed"):
        fed.next()


@pytest.mark.slow
def test_a_hanging_source_does_not_hold_the_interpreter():
    """A process whose data source never returns can still leave."""
    code = """
import threading
from shoal.data.feed import Feed, StepShare, evaluation_batches
from shoal.data.order import Order
class Hangs:
    def __len__(self): return 4
    def __getitem__(self, index): threading.Event().wait()
Feed(Hangs(), Order(4, 0), StepShare(2))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=180, check=False).returncode == 0


class Blocks(Numbers):
    """Reading sample 0 sets `blocked`, and blocks until `go` is set."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.go, self.blocked = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 0:
            self.blocked.set()
            self.go.wait()
        return index, index


def test_a_read_that_takes_long_is_named_while_it_is_waited_for():
    """By sample and position, among others in its batch; it ends the wait, or the step is taken when it is over."""
    source, order, told = Blocks(8), Order(8, seed=7), []
    position = int(np.flatnonzero(order.ids(np.arange(8)) == 0)[0])

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            source.go.set()

    with Feed(source, order, StepShare(8), slow=SlowReads(tell, tell_after_s=0.02)) as fed:
        assert source.blocked.wait(HANG_S)
        assert sorted(ids_of(fed.next().microbatches)) == list(range(8))
    assert len(told) >= 3
    reading = f"Sample 0 at position {position}: the data source has been reading for "
    assert all(text.startswith(reading) for text in told[:3])
    source.go.clear()
    source.blocked.clear()
    with Feed(source, order, StepShare(8), slow=SlowReads(tell_after_s=0.02, give_up_s=0.05)) as fed:
        assert source.blocked.wait(HANG_S)
        with pytest.raises(DataError, match=f"{reading}0.05 s and hangs"):
            fed.next()
        source.go.set()


def test_a_reader_that_opens_for_long_is_told_apart():
    """A process of its own imports a framework first, which a busy machine may take a minute for."""
    source, order, over = Blocks(8), Order(8, seed=7), threading.Event()
    source.go.set()

    def opened() -> SourceReader:
        over.wait()
        return SourceReader(source, order, denominator="auto")

    slow = SlowReads(tell_after_s=0.02, give_up_s=0.05)
    with Feed(source, order, StepShare(8), slow=slow, open_reader=opened) as fed:
        with pytest.raises(
            DataError, match=r"\(its reader has not opened the data yet\): the data source has been reading"
        ):
            fed.next()
        over.set()
        assert sorted(ids_of(fed.next().microbatches)) == list(range(8))


def test_an_order_of_another_size_is_refused():
    """Order and source must count the same samples."""
    with pytest.raises(DataError, match="5 samples, its order 6"):
        Feed(Numbers(5), Order(6, 0), StepShare(1))


@pytest.mark.parametrize("limit", [None, 7, 100])
@pytest.mark.parametrize("micro", [None, 3])
def test_evaluation_reads_each_sample_once(limit: int | None, micro: int | None):
    """Over the replicas, a pass takes the samples in natural order, each once; with a limit, evenly spaced ones."""
    batches = [
        batch
        for replica in range(3)
        for batch in evaluation_batches(Numbers(20), replicas=3, replica=replica, micro_samples=micro, limit=limit)
    ]
    wanted = {None: list(range(20)), 7: [0, 2, 5, 8, 11, 14, 17], 100: list(range(20))}
    assert ids_of(batches) == wanted[limit]
    assert torch.cat([batch.positions for batch in batches]).tolist() == list(range(len(wanted[limit])))
    assert all(len(batch) <= (micro or 20) for batch in batches)


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 30), replicas=st.integers(1, 5), global_samples=st.integers(1, 12))
def test_steps_that_end_with_the_epoch(samples, replicas, global_samples):
    """Two epochs, in steps of `global_samples` and a shorter last one, as a DataLoader cuts them. A replica without
    samples has one that weighs nothing."""
    order, a_step = Order(samples, seed=7), -(-samples // global_samples)
    feeds = [
        feed(Numbers(samples), global_samples=global_samples, replica=r, replicas=replicas, epoch=samples)
        for r in range(replicas)
    ]
    used = []
    for number in range(2 * a_step):
        steps = [each.next() for each in feeds]
        epoch, place = divmod(number, a_step)
        start = epoch * samples + place * global_samples
        stop = min(start + global_samples, (epoch + 1) * samples)
        assert {each.interval for each in steps} == {Interval(start, stop)}
        assert all(each.microbatches for each in steps)
        for batch in (batch for each in steps for batch in each.microbatches):
            if batch.real_samples:
                used += ids_of([batch])
            else:
                assert (len(batch), batch.weight) == (1, 0.0)
    for each in feeds:
        each.close()
    assert used == order.ids(np.arange(2 * samples)).tolist()
