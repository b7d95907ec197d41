"""Reading ahead: what the coming steps need is fetched before them, once, within the bytes that there are."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from shoal.data.dataset import Joined
from shoal.data.feed import Feed, StepShare
from shoal.data.order import Order
from shoal.data.records import ReadAhead
from shoal.remote_files import at_once
from tests.waiting import HANG_S, wait_until

FILE_SAMPLES, FILE_BYTES = 4, 10


@dataclass(frozen=True)
class File:
    """File `number`, which writes down that it is fetched; that of `fails` cannot be."""

    number: int
    fetched: list[int] = field(compare=False)
    fails: frozenset[int] = field(default=frozenset(), compare=False)
    nbytes: int = FILE_BYTES

    def fetch(self) -> None:
        self.fetched.append(self.number)
        if self.number in self.fails:
            raise OSError("no answer")


class Files:
    """Samples in files of four, of which so many bytes are worth having ahead."""

    def __init__(self, samples: int, *, ahead_bytes: int, fails: frozenset[int] = frozenset()) -> None:
        self.samples, self.ahead_bytes, self.fails = samples, ahead_bytes, fails
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(2, index), 0

    def needed(self, ids: np.ndarray) -> Sequence[File]:
        return [File(number, self.fetched, self.fails) for number in dict.fromkeys((ids // FILE_SAMPLES).tolist())]


def steps(samples: int) -> Iterator[np.ndarray]:
    """Steps of `samples` in their natural order, without end."""
    return (np.arange(step * samples, (step + 1) * samples) for step in itertools.count())


def test_files_come_ahead_up_to_the_limit():
    """Three files are worth having: those of the steps ahead, no more, and the next one when a step has left one."""
    source = Files(1000, ahead_bytes=3 * FILE_BYTES)
    ahead = ReadAhead(source, steps(2))
    try:
        wait_until(lambda: sorted(source.fetched) == [0, 1, 2])
        ahead.step_taken()  # the other half of file 0 is still ahead
        ahead.step_taken()
        wait_until(lambda: sorted(source.fetched) == [0, 1, 2, 3])
    finally:
        ahead.close()


def test_a_step_larger_than_the_limit_is_fetched():
    """Without a step in hand there is nothing to wait for."""
    source = Files(1000, ahead_bytes=FILE_BYTES)
    ahead = ReadAhead(source, steps(3 * FILE_SAMPLES))
    try:
        wait_until(lambda: sorted(source.fetched) == [0, 1, 2])
        ahead.step_taken()
        wait_until(lambda: sorted(source.fetched) == [0, 1, 2, 3, 4, 5])
    finally:
        ahead.close()


def test_a_file_that_fails_holds_nothing_up():
    """It is for the reader to say; the others come all the same, more of them than there are threads."""
    source = Files(1000, ahead_bytes=100 * FILE_BYTES, fails=frozenset(range(20)))
    ahead = ReadAhead(source, steps(4))
    try:
        wait_until(lambda: len(source.fetched) == 100)
    finally:
        ahead.close()


def test_a_feed_fetches_for_its_own_share():
    """Each of two replicas fetches what it will read, and all of it, before it is read."""
    for replica in range(2):
        source = Files(64, ahead_bytes=16 * FILE_BYTES)
        with Feed(source, Order(64, seed=0, shuffle=False), StepShare(16, replica, 2)) as feed:
            wanted = [16 * step // FILE_SAMPLES + 2 * replica + half for step in range(4) for half in range(2)]
            wait_until(lambda source=source, wanted=wanted: sorted(source.fetched) == wanted)
            first = feed.next().microbatches[0].positions.tolist()
            assert first == list(range(8 * replica, 8 * replica + 8))


def test_a_mixture_needs_what_its_sources_need():
    """Ids of the joined sources are theirs; a source that foresees nothing has no part in it."""
    first, second = Files(8, ahead_bytes=70), Files(8, ahead_bytes=50)
    joined = Joined([first, [(1.0, 0)] * 5, Files(4, ahead_bytes=0), second])
    assert joined.ahead_bytes == 50
    assert joined.needed(np.array([19, 5, 9, 13, 24])) == [File(1, []), File(0, []), File(1, [])]
    assert Joined([[(1.0, 0)]]).ahead_bytes == 0


def test_requests_at_once_keep_their_order_and_end_with_the_first_failure():
    """Results are in the order of the requests; after a failure, those that have not begun are not made."""
    assert at_once([lambda i=i: i for i in range(50)], threads=4) == list(range(50))
    assert at_once([], threads=4) == []
    made, go = [], threading.Event()

    def request(number: int) -> None:
        made.append(number)
        if number == 1:
            raise OSError("no answer")
        assert go.wait(HANG_S)

    try:
        with pytest.raises(OSError, match="no answer"):
            at_once([lambda i=i: request(i) for i in range(50)], threads=2)
        assert sorted(made) == [0, 1]
    finally:
        go.set()
