"""Partitions leave in the order that was played beforehand, a credit at a time."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.collective import Alone
from shoal.comm.exchanges.credited import CreditQueue
from shoal.comm.exchanges.exchange import AllReduce
from shoal.comm.ledger import Ledger
from shoal.errors import CollectiveError
from shoal.gradients.priority import Partition, leaving_order
from tests.waiting import HANG_S


class Wire(Alone):
    """Notes which tensors leave; each arrives when `let` is called for it, or fails."""

    size = 2  # a rank alone sends nothing

    def __init__(self) -> None:
        self.left: list[int] = []
        self._arrived: dict[int, threading.Event] = {}
        self.fails: set[int] = set()
        self._turn = threading.Condition()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        with self._turn:
            self.left.append(int(tensor[0]))
            self._turn.notify_all()
        return Handle(self, int(tensor[0]))

    def event(self, number: int) -> threading.Event:
        with self._turn:
            return self._arrived.setdefault(number, threading.Event())

    def let(self, number: int) -> None:
        self.event(number).set()

    def when(self, left: list[int]) -> bool:
        """Waits until exactly these have left."""
        with self._turn:
            self._turn.wait_for(lambda: len(self.left) >= len(left), HANG_S)
            return self.left == left


class Handle:
    def __init__(self, wire: Wire, number: int) -> None:
        self._wire, self._number = wire, number

    def wait(self) -> None:
        assert self._wire.event(self._number).wait(HANG_S)
        if self._number in self._wire.fails:
            raise CollectiveError("rank 1 is gone")


def queue_of(wire: Wire, *, count: int, credit: int) -> CreditQueue:
    """Tensors of one float32 each, whose number is their value."""
    queue = CreditQueue(credit_bytes=4 * credit, ledger=Ledger())
    for number in range(count):
        queue.add(AllReduce(wire, torch.full((1,), float(number))))
    queue.begin()
    return queue


def test_no_more_than_the_credit_is_on_the_wire() -> None:
    """What is filled leaves in order, two at a time; the next when one has arrived."""
    wire = Wire()
    queue = queue_of(wire, count=4, credit=2)
    queue.follow([3, 0, 2, 1])
    queue.fill([0, 1])
    assert wire.left == []  # 3 comes first, and is not filled
    queue.fill([2, 3])
    assert wire.left == [3, 0]
    wire.let(3)
    queue.wait([3])
    assert wire.when([3, 0, 2])
    for number in (0, 2, 1):
        wire.let(number)
    queue.wait(range(4))
    assert wire.left == [3, 0, 2, 1]
    queue.close()


def test_a_tensor_beyond_the_credit_leaves_alone() -> None:
    """Otherwise it would never leave."""
    wire = Wire()
    queue = queue_of(wire, count=2, credit=0)
    queue.follow([0, 1])
    queue.fill([0, 1])
    assert wire.left == [0]
    wire.let(0)
    assert wire.when([0, 1])
    wire.let(1)
    queue.wait([0, 1])
    queue.close()


def test_who_waits_learns_what_went_wrong() -> None:
    """A rank that is gone ends the wait for any tensor, sent or not."""
    wire = Wire()
    wire.fails.add(0)
    queue = queue_of(wire, count=2, credit=1)
    queue.follow([0, 1])
    queue.fill([0])
    wire.let(0)
    with pytest.raises(CollectiveError, match="rank 1 is gone"):
        queue.wait([1])


def test_a_thread_that_waits_for_another_counts_as_hidden() -> None:
    """In the ledger, only what the caller stood still for is exposed."""
    ledger = Ledger()
    with ledger.behind():
        ledger.waited("all_reduce", exposed_s=3.0, hidden_s=1.0)
    ledger.waited("all_reduce", exposed_s=0.5, hidden_s=-0.5)
    assert (ledger.total().exposed_s, ledger.total().hidden_s) == (0.5, 3.5)


PARTITIONS = st.lists(
    st.builds(Partition, st.integers(1, 9), st.floats(0, 9), st.integers(0, 5).map(float)), max_size=12
)


@given(PARTITIONS, st.floats(0.1, 10), st.integers(1, 20))
def test_every_partition_leaves_once(partitions: list[Partition], bytes_s: float, credit_bytes: int) -> None:
    """Whatever the wire, the order is one of all of them."""
    order = leaving_order(partitions, bytes_s=bytes_s, credit_bytes=credit_bytes)
    assert sorted(order) == list(range(len(partitions)))


MOMENTS = st.permutations(range(8))


@given(MOMENTS, MOMENTS)
def test_a_fast_wire_sends_as_they_are_ready_and_a_slow_one_as_they_are_needed(ready: list[int], needed: list[int]):
    """The extremes: nothing ever waits; or everything waits for the one that was ready first."""
    partitions = [Partition(1, float(at_s), float(turn)) for at_s, turn in zip(ready, needed, strict=True)]
    fast = leaving_order(partitions, bytes_s=10.0, credit_bytes=1)
    assert [partitions[n].ready_s for n in fast] == sorted(float(at_s) for at_s in ready)
    first, *others = leaving_order(partitions, bytes_s=0.01, credit_bytes=1)
    assert partitions[first].ready_s == 0
    assert [partitions[n].needed for n in others] == sorted(partitions[n].needed for n in others)


def test_the_first_layers_overtake() -> None:
    """Four layers, the last ready first, each as long on the wire as the backward of two: the last goes, then the most
    urgent of those that are there.
    """
    layers = [Partition(2, ready_s=3.0 - layer, needed=float(layer)) for layer in range(4)]
    assert leaving_order(layers, bytes_s=1.0, credit_bytes=2) == [3, 1, 0, 2]
