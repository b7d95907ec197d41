"""The loop reads quick small steps itself: the same as threads, no further ahead, and only where it loses nothing."""

import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from shoal.assembly.metering import read_beside_steps
from shoal.assembly.run import Run
from shoal.data.batches import SlowReads
from shoal.data.dataset import Joined, calls_user_code
from shoal.data.feed import Feed
from shoal.data.inputs import AsInputs, Collated
from shoal.data.labelled import Labelled
from shoal.data.order import Order
from shoal.data.tokens import Windows
from shoal.errors import UserCodeError
from tests.data.test_feed import Numbers, feed, ids_of


class WhoReads(Numbers):
    """Which threads have read which samples."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.readers: list[threading.Thread] = []

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.readers.append(threading.current_thread())
        return super().__getitem__(index)


QUICK_S = "shoal.data.feed.QUICK_S"


def read_by_loop(fed: Feed, source: WhoReads) -> int:
    """Takes steps until the loop reads them, as it does once threads have read some quickly. How many it took."""
    for step in range(10):
        fed.next()
        if source.readers[-1] is threading.main_thread():
            return step + 1
    raise AssertionError("ten steps that counted as quick, and threads read them all")


def nothing_is_lost(kind: Callable[[int], Any], error: type[BaseException]) -> str:
    """What `kind` raises while the loop reads the sample `at` comes out of `next`, and all samples come behind it."""
    source, order = kind(400), Order(400, seed=7)
    with feed(source) as fed:
        fed.in_backwards(small_at_once=2, quick_by_loop=True)
        position = 4 * (read_by_loop(fed, source) + 2)
        fed.next()
        fed.next()
        source.at = int(order.ids(np.array([position + 9]))[0])
        with pytest.raises(error) as raised:
            fed.next()
        taken = [i for _ in range(5) for i in ids_of(fed.next().microbatches)]
    assert taken == order.ids(np.arange(position, position + 20)).tolist()
    return str(raised.value)


def test_quick_small_steps_are_read_by_the_loop_when_it_asks_for_them(monkeypatch: pytest.MonkeyPatch):
    """No more of them in a row than threads would read ahead, in the same order."""
    monkeypatch.setattr(QUICK_S, 1000.0)
    source, order = WhoReads(400), Order(400, seed=7)
    with feed(source) as fed:
        backward = fed.in_backwards(small_at_once=2, quick_by_loop=True)
        step = read_by_loop(fed, source)
        for ahead in (2, 1, 0):
            backward()
            assert len(source.readers) == 4 * (step + ahead)
            taken = fed.next()
            assert ids_of(taken.microbatches) == order.ids(np.arange(4 * step, 4 * step + 4)).tolist()
            step += 1
        assert set(source.readers[-12:]) == {threading.main_thread()}


def test_threads_read_again_what_has_become_slow(monkeypatch: pytest.MonkeyPatch):
    """The loop gets the same steps as before, and waits for none that threads can read ahead."""
    monkeypatch.setattr(QUICK_S, 1000.0)
    source, order = WhoReads(400), Order(400, seed=7)
    with feed(source) as fed:
        fed.in_backwards(small_at_once=2, quick_by_loop=True)
        step = read_by_loop(fed, source)
        monkeypatch.setattr(QUICK_S, 0.0)
        del source.readers[:]
        for number in range(step, step + 12):
            assert ids_of(fed.next().microbatches) == order.ids(np.arange(4 * number, 4 * number + 4)).tolist()
    assert threading.main_thread() not in source.readers


@pytest.mark.parametrize("options", [{"readers": 2}, {"slow": SlowReads(give_up_s=60.0)}], ids=str)
def test_a_read_that_may_be_given_up_is_that_of_a_thread(options: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    """Nor does a loop read where several threads were asked for."""
    monkeypatch.setattr(QUICK_S, 1000.0)
    source = WhoReads(400)
    with feed(source, **options) as fed:
        fed.in_backwards(small_at_once=2, quick_by_loop=True)
        for _ in range(50):
            fed.next()
    assert threading.main_thread() not in source.readers


def test_a_loop_that_hangs_in_its_data_is_told_of(monkeypatch: pytest.MonkeyPatch):
    """By the thread that reads when the loop does not."""
    monkeypatch.setattr(QUICK_S, 1000.0)

    class Hangs(WhoReads):
        def __getitem__(self, index: int) -> tuple[int, int]:
            self.go.wait()
            return super().__getitem__(index)

        def __init__(self, samples: int) -> None:
            super().__init__(samples)
            self.go = threading.Event()
            self.go.set()

    source, told, awaited = Hangs(400), [], "no sample yet"

    def tell(text: str) -> None:
        if awaited in text:
            told.append(text)
            source.go.set()

    with feed(source, slow=SlowReads(tell, tell_after_s=0.02)) as fed:
        fed.in_backwards(small_at_once=2, quick_by_loop=True)
        step = read_by_loop(fed, source)
        fed.next()
        fed.next()
        position = 4 * (step + 2)
        source.go.clear()
        awaited = f"Sample {int(Order(400, seed=7).ids(np.array([position]))[0])} at position {position}:"
        fed.next()
    assert "the data source has been reading for" in told[0]


def test_a_sample_that_fails_the_loop_stops_it_at_its_own_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(QUICK_S, 1000.0)
    source = WhoReads(400)
    with feed(source) as fed:
        fed.in_backwards(small_at_once=2, quick_by_loop=True)
        position = 4 * (read_by_loop(fed, source) + 2) + 1
        source.faulty = int(Order(400, seed=7).ids(np.array([position]))[0])
        fed.next()
        fed.next()
        for _ in range(2):
            with pytest.raises(UserCodeError, match=f"Sample {source.faulty} at position {position}.*user's own"):
                fed.next()


def test_what_ends_the_loop_in_a_read_is_raised_there_and_no_step_is_lost(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C belongs to the loop, and not to the step two further on that was being read."""
    monkeypatch.setattr(QUICK_S, 1000.0)

    class Interrupted(WhoReads):
        at = -1

        def __getitem__(self, index: int) -> tuple[int, int]:
            if index == self.at:
                self.at = -1
                raise KeyboardInterrupt
            return super().__getitem__(index)

    nothing_is_lost(Interrupted, KeyboardInterrupt)


def test_what_a_handler_raises_in_a_read_is_raised_there_and_no_step_is_lost(monkeypatch: pytest.MonkeyPatch):
    """As a time-out of the script's: it is none of the sample's, which can be read again."""
    monkeypatch.setattr(QUICK_S, 1000.0)

    class Late(Exception):
        pass

    def late(*_: object) -> None:
        raise Late

    class Signalled(WhoReads):
        at = -1

        def __getitem__(self, index: int) -> tuple[int, int]:
            if index == self.at:
                self.at = -1
                signal.raise_signal(signal.SIGUSR1)
            return super().__getitem__(index)

    before = signal.signal(signal.SIGUSR1, late)
    try:
        nothing_is_lost(Signalled, Late)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_fails_once_is_told_with_its_sample_as_by_a_thread(monkeypatch: pytest.MonkeyPatch):
    """A time-out of a disk is no time-out of the script's."""
    monkeypatch.setattr(QUICK_S, 1000.0)

    class Flaky(WhoReads):
        at = -1

        def __getitem__(self, index: int) -> tuple[int, int]:
            if index == self.at:
                self.at = -1
                raise TimeoutError("the disk")
            return super().__getitem__(index)

    said = nothing_is_lost(Flaky, UserCodeError)
    assert re.fullmatch(r"Sample \d+ at position \d+: the data source raised TimeoutError: the disk\. Mend .*", said)


def test_after_a_few_slow_reads_by_the_loop_threads_read_all(monkeypatch: pytest.MonkeyPatch):
    """As of data that are quick but for a shard that is opened now and then."""
    now_s = [0.0]

    class Sharded(WhoReads):
        def __getitem__(self, index: int) -> tuple[int, int]:
            now_s[0] += index % 100 == 0
            return super().__getitem__(index)

    clock = SimpleNamespace(perf_counter=lambda: now_s[0], monotonic=time.monotonic)
    monkeypatch.setattr("shoal.data.feed.time", clock)
    source = Sharded(4000)
    with feed(source) as fed:
        fed.in_backwards(small_at_once=2, quick_by_loop=True)
        for _ in range(250):
            fed.next()
        assert threading.main_thread() in source.readers
        del source.readers[:]
        for _ in range(50):
            fed.next()
    assert threading.main_thread() not in source.readers


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        (TensorDataset(torch.zeros(4, 2), torch.zeros(4)), False),
        (AsInputs(Subset(TensorDataset(torch.zeros(4, 2)), [0, 2])), False),
        ([(0, 1), (2, 3)], False),
        (Windows(np.zeros(40, dtype=np.uint8), 4), False),
        (Joined([[(0, 1)], Numbers(4)]), True),
        (Numbers(4), True),
        (Subset(cast(Dataset, Numbers(4)), [0, 2]), True),
        (Labelled(AsInputs(Numbers(4)), next_token=False), True),
        (Collated(TensorDataset(torch.zeros(4, 2)), torch.stack), True),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_users_own_code_is_left_to_threads(source: object, calls: bool):
    """It may give something else in another thread, and how quick a read was would decide what it gives."""
    assert calls_user_code(source) == calls


@pytest.mark.parametrize(
    ("source", "augment", "quick"),
    [
        (TensorDataset(torch.zeros(4, 2)), ["flip"], True),
        (TensorDataset(torch.zeros(4, 2)), ["net:change"], False),
        (Numbers(4), [], False),
    ],
    ids=["tensors", "a change of the user's", "a data set of the user's"],
)
def test_a_run_has_the_loop_read_what_calls_no_user_code(source: object, augment: list[str], quick: bool):
    asked: list[bool] = []
    data = SimpleNamespace(augment=augment, reader_kind="threads")
    run = SimpleNamespace(
        run_file=SimpleNamespace(data=data, batch=SimpleNamespace(division="even")),
        workload=SimpleNamespace(data=SimpleNamespace(train=source, endless=False)),
        device=torch.device("cpu"),
        step=SimpleNamespace(compute=SimpleNamespace(on_backward=[])),
    )
    fed = SimpleNamespace(in_backwards=lambda *, small_at_once, quick_by_loop: asked.append(quick_by_loop))
    read_beside_steps(cast(Run, run), cast(Feed, fed))
    assert asked == [quick]


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
def test_samples_are_those_of_a_thread_inside_of_a_mode_of_the_loop(mode: str, monkeypatch: pytest.MonkeyPatch):
    """Else how quick a read is would decide what it gives."""
    monkeypatch.setattr(QUICK_S, 1000.0)

    class Computes(WhoReads):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
            weight = torch.full((2, 2), 1.001, requires_grad=True)
            return (weight @ weight).detach() + float((weight @ weight).requires_grad), super().__getitem__(index)[1]

    source = Computes(400)
    with feed(source) as fed, MODES[mode]():
        fed.in_backwards(small_at_once=2, quick_by_loop=True)
        read = [each.inputs for _ in range(20) for each in fed.next().microbatches]
    values = torch.cat(read)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert values.dtype == torch.float32
    assert values.unique().numel() == 1
    assert threading.main_thread() not in source.readers
