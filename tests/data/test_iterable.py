"""Iterables as data: items by position, in the order as they come, begun anew for what was left behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import iterable
from shoal.data.build import from_objects
from shoal.data.cursor import Cursor
from shoal.data.dataset import Dataset
from shoal.data.feed import Feed, StepShare
from shoal.data.iterable import IterableSource, as_source
from shoal.errors import DataError, UserCodeError

ITEMS = 10


def item(i: int) -> tuple[torch.Tensor, int]:
    return torch.tensor([float(i)]), i % 3


def generator() -> Iterator[Any]:
    yield from map(item, range(ITEMS))


def from_start(start: int) -> Iterator[Any]:
    """The items of a run that goes through the data again and again."""
    asked.append(start)
    while True:
        yield item(start % ITEMS)
        start += 1


asked: list[int] = []


class Items:
    """An iterable with a length and no d[i]."""

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[Any]:
        return generator()


class TorchItems(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return generator()


EVERY_KIND = {
    "generator function": generator,
    "function that returns an iterator": lambda: map(item, range(ITEMS)),
    "function that returns an iterable": lambda: Items(),
    "function with start": from_start,
    "iterable": Items(),
    "torch": TorchItems(),
    "set": dict.fromkeys(map(item, range(ITEMS))).keys(),
}


def numbers(source: Any, positions: range) -> list[int]:
    return [int(source[p][0]) for p in positions]


def fed(dataset: Dataset, cursor: Cursor, *, ranks: int, steps: int) -> tuple[Cursor, list[int]]:
    """`steps` committed steps of 4 samples on `ranks` ranks, which go through the same iterable each by itself, and
    then a kill: what the feeds have read ahead is lost."""
    used: list[int] = []
    for rank in range(ranks):
        with Feed(dataset.train, dataset.order(0, shuffle=True), StepShare(4, rank, ranks), start=cursor) as feed:
            found = [feed.next() for _ in range(steps)]
        used += [p for step in found for batch in step.microbatches for p in batch.positions.tolist()]
        for step in found:
            for batch in step.microbatches:
                assert batch.inputs[:, 0].tolist() == [p % ITEMS for p in batch.positions.tolist()]  # type: ignore[index]
    for _ in range(steps):
        cursor, _ = cursor.take(4)
    return Cursor.from_state(cursor.to_state()), used


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_item_once_in_each_pass(kind: str):
    """Over passes of 10 items in steps of 4, stops in mid-pass, and other numbers of ranks, position p has item p % 10,
    and every position is taken once."""
    cursor, taken = Cursor(), []
    for ranks, steps in ((2, 3), (3, 4), (1, 2)):
        cursor, used = fed(from_objects(EVERY_KIND[kind]), cursor, ranks=ranks, steps=steps)
        taken += used
    assert sorted(taken) == list(range(36))


def test_a_function_with_start_is_not_gone_through():
    """A resumed run begins where it stands, and then goes through the others' items as every iterable does."""
    asked.clear()
    source = as_source(from_start)
    assert numbers(source, range(7)[5:]) == [5, 6]
    assert source[9][1] == 9 % 3
    assert asked == [5]


def test_the_first_items_are_kept():
    """What is compared at the start is not lost to an iterator, which cannot begin again."""
    source = as_source(generator())
    assert isinstance(source, IterableSource)
    assert [int(x) for x, _ in source.first(4)] == [0, 1, 2, 3]
    assert numbers(source, range(ITEMS)) == list(range(ITEMS))
    asked.clear()
    source = as_source(from_start)
    assert isinstance(source, IterableSource)
    source.first(4)
    assert numbers(source, range(2, 4)) == [2, 3]
    assert numbers(source, range(23, 25)) == [3, 4]
    assert asked == [0, 23]


def test_what_is_left_behind_is_begun_anew():
    """A feed behind another one sees the same items; an iterator cannot give them."""
    source = as_source(generator)
    assert numbers(source, range(25)) == [p % ITEMS for p in range(25)]
    assert numbers(source, range(3, 14)) == [p % ITEMS for p in range(3, 14)]
    once = as_source(generator())
    once[5]
    with pytest.raises(DataError, match="item 2 is needed again, and the data, a generator, is an iterator that has"):
        once[2]


def finite(start: int = 0) -> Iterator[Any]:
    return map(item, range(start, ITEMS))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (generator(), r"the data, a generator, ended before item 10, .* an iterator cannot begin again"),
        (finite, r"the data of finite\(\) ended before item 11, .* a function with `start` counts"),
        (lambda: iter(()), "gives no item"),
    ],
)
def test_an_end_that_comes_too_early(given: Any, sentence: str):
    """It is said when the run needs an item behind it, also where it was read ahead."""
    source = as_source(given)
    for _ in range(2):
        with pytest.raises(DataError, match=sentence):
            source[ITEMS + 1]


def test_items_that_are_no_samples():
    """Named by their position: an item of a wrong form, and an exception of the iterable's."""

    def torn() -> Iterator[Any]:
        yield item(0)
        yield "text"
        raise ZeroDivisionError("user's own")

    dataset = from_objects(torn)
    for position, sentence in ((1, "returned a str, 'text'"), (2, "raised ZeroDivisionError: user's own")):
        with (
            Feed(dataset.train, dataset.order(0, shuffle=True), StepShare(1), start=position) as feed,
            pytest.raises(UserCodeError, match=f"Sample {position} at position {position}: .*{sentence}"),
        ):
            feed.next()


def test_what_is_no_iterable():
    """Batches of a DataLoader are no samples."""
    with pytest.raises(UserCodeError, match="the data is a DataLoader, whose items are batches"):
        from_objects(DataLoader([item(0)]))  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match="the data is a DataLoader, whose items are batches"):
        from_objects(Items(), held_out=DataLoader([item(0)]))  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match="the data is a DataLoader, whose items are batches"):
        from_objects(lambda: DataLoader([item(0)]))  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=r"The held-out data is an int: .* an iterable or a generator function"):
        from_objects(Items(), held_out=3)
    assert as_source(ranged := [item(0)]) is ranged


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if kind != "function with start"])  # that has no end
def test_held_out_data_is_one_pass(kind: str):
    """Of every kind of iterable, beside training data of both kinds: the items in order, to be read again and again."""
    for train in ([item(0)], Items()):
        held_out = from_objects(train, held_out=EVERY_KIND[kind]).held_out
        assert held_out is not None
        assert len(held_out) == ITEMS
        for _ in range(2):
            assert [held_out[i] for i in range(ITEMS)] == [item(i) for i in range(ITEMS)]


def test_held_out_data_that_does_not_end(monkeypatch: pytest.MonkeyPatch):
    """Is refused before it fills the memory; so is data without an item."""
    monkeypatch.setattr(iterable, "MOST_HELD_OUT", ITEMS)
    assert from_objects([item(0)], held_out=generator).held_out is not None
    with pytest.raises(DataError, match=f"gives more than {ITEMS} items to evaluate on, and may have no end"):
        from_objects([item(0)], held_out=lambda: map(item, itertools.count()))
    with pytest.raises(DataError, match=r"The held-out data has no samples \(the list has length 0\)"):
        from_objects([item(0)], held_out=iter(()))


def ranged(start: int = 3) -> list[Any]:
    return [item(i) for i in range(start, ITEMS)]


def test_a_function_that_makes_a_data_set_keeps_its_own_start():
    """`start` counts items of iterables alone."""
    assert len(as_source(ranged)) == ITEMS - 3
