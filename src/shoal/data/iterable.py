"""An iterable as data: item p of the run is sample p, in the order in which the items come.

Nothing else is known of an iterable: no length, and no way to an item but through those before it. So every rank goes
through all items, and keeps those at its own positions. The run's cursor, which counts positions, is the number of
items that were taken; a run that resumes begins the iterable anew and leaves out so many. If the iterable gives the
same items each time it is begun, each is used in exactly one committed step. Otherwise each *position* is.

    an iterable, or a function    begun again where it ends; item p is the p-th of all its passes together
    an iterator                   cannot be begun again: its end is the end of the data
    a function with `start`       begun with the number of items of the run to leave out; its end is the end of the data

Held-out data is the items of one pass, which are taken when the run starts and stay in memory (`held_out_items`): every
evaluation is then over the same samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from shoal.data.order import MOST_SAMPLES
from shoal.data.sample import Sample, Source, describe, map_tree, parse_sample
from shoal.errors import DataError, UserCodeError

MOST_HELD_OUT = 100_000
"""Items: an iterable that gives more to evaluate on is taken for one without an end."""


@dataclass(frozen=True)
class Iteration:
    """How an iterable is begun; `name` is what messages call it.

    Args:
        begin: gives an iterator that leaves out so many items: 0, if not `takes_start`.
        takes_start: `begin` counts the items of the whole run, whose data ends with the iterator.
        once: `begin` may be called once.
    """

    begin: Callable[[int], Iterator[Any]]
    name: str
    takes_start: bool = False
    once: bool = False


class IterableSource:
    """The items of an iterable as samples 0, 1, ...; its length bounds their numbers.

    Reading a sample takes all items up to it. Reading one that was left behind begins the iterable anew. Several
    threads may read, one at a time.
    """

    def __init__(self, iteration: Iteration) -> None:
        self.agree: Callable[[int, int], object] = _alone
        self._iteration, self._lock = iteration, Lock()
        self._iterator: Iterator[Any] | None = None
        self._next, self._pass, self._pass_start = 0, 0, 0
        self._head: list[Any] = []
        self._at_head = True
        self._fault: BaseException | None = None

    @property
    def name(self) -> str:
        """What messages call the iterable."""
        return self._iteration.name

    def __len__(self) -> int:
        return MOST_SAMPLES

    def __getitem__(self, position: int) -> Any:
        """Item `position` of the run.

        Raises:
            DataError: the data ends before it, holds no item, or is an iterator that has gone beyond it.
            Exception: the iterable's own, here and from then on.
        """
        with self._lock:
            if position < len(self._head):
                return self._head[position]
            ahead = self._at_head and self._iteration.takes_start and position > self._next
            if self._iterator is None or position < self._next or ahead:
                self._open(position)
            self._at_head = False
            while self._next < position:
                self._take()
            return self._take()

    def first(self, count: int) -> list[Any]:
        """Its first items, up to `count` of them, which are kept: reading goes on behind them.

        Called before anything is read. Items that cannot be taken are left out; reading them says why.
        """
        with self._lock:
            try:
                if self._iterator is None:
                    self._open(0)
                while len(self._head) < count:
                    self._head.append(self._take())
            except (Exception, SystemExit) as error:
                self._fault = error
            return list(self._head)

    def one_pass(self, most: int) -> list[Any]:
        """Its items from its beginning to its end. Raises `DataError` where there are more than `most`."""
        items = list(islice(self._iteration.begin(0), most + 1))
        if len(items) > most:
            raise DataError(
                f"{self.name} gives more than {most:,} items to evaluate on, and may have no end: pass a list, or "
                "itertools.islice of it"
            )
        return items

    def _open(self, position: int) -> None:
        if self._iteration.once and self._iterator is not None:
            raise DataError(
                f"item {position} is needed again, and {self.name} is an iterator that has given {self._next} items: "
                "pass the function that makes it, or an iterable"
            )
        start = position if self._iteration.takes_start else 0
        self._iterator, self._fault = self._iteration.begin(start), None
        self._next = self._pass_start = start
        self._pass = 0

    def _take(self) -> Any:
        """The next item."""
        if self._fault is not None:
            raise self._fault
        assert self._iterator is not None
        try:
            while True:
                for item in self._iterator:
                    self._next += 1
                    return item
                self._begin_again()
        except BaseException as error:
            self._fault = error
            raise

    def _begin_again(self) -> None:
        """The iterable has ended. Raises `DataError` where it cannot be begun again, or would give nothing."""
        ended = f"{self.name} ended before item {self._next}, counted from 0, which the run needs"
        if self._iteration.takes_start:
            raise DataError(
                f"{ended}: a function with `start` counts the items of the whole run, and goes through its data again "
                "by itself; let it do so, or lower run.steps"
            )
        if self._iteration.once:
            raise DataError(
                f"{ended}: an iterator cannot begin again; pass the function that makes it, or an iterable, or lower "
                "run.steps"
            )
        count = self._next - self._pass_start
        if count == 0:
            raise DataError(f"{self.name} gives no item: it must give at least one each time it is begun")
        self.agree(self._pass, count)
        self._pass, self._pass_start = self._pass + 1, self._next
        self._iterator = self._iteration.begin(0)


def _alone(number: int, items: int) -> None:
    """No other rank goes through the iterable."""


def as_source(given: Any) -> Any:
    """`given` if it has `len(d)` and `d[i]`, else its items; what a function returns, in place of the function.

    What is no data is returned as it is. Raises `UserCodeError` for a DataLoader, whose items are batches.
    """
    if isinstance(given, DataLoader):
        raise UserCodeError(
            "the data is a DataLoader, whose items are batches: pass its data set, loader.dataset (shoal.start takes "
            "the loader too)"
        )
    if _is_map_style(given) or isinstance(given, str | bytes | dict) or given is None:
        return given
    if hasattr(given, "__next__"):
        return IterableSource(Iteration(lambda start: given, f"the data, {describe(given)},", once=True))
    if hasattr(given, "__iter__"):
        return IterableSource(Iteration(lambda start: iter(given), f"the data, {describe(given)},"))
    return made_by(given, given, takes_start=takes_start(given)) if callable(given) else given


def held_out_items(given: Any) -> Any:
    """As `as_source`, for data to evaluate on: items of an iterable as a list. Raises `DataError` without an end."""
    source = as_source(given)
    return source.one_pass(MOST_HELD_OUT) if isinstance(source, IterableSource) else source


def made_by(function: Callable[..., Any], call: Callable[..., Any], *, takes_start: bool) -> Any:
    """What `call` returns, or the items of what it returns; each call is one of `function`, with arguments of its own.

    `takes_start`: the keyword `start` is the number of items to leave out, if iterators or iterables are returned.
    Raises `UserCodeError` for a DataLoader.
    """
    name = f"the data of {getattr(function, '__name__', type(function).__name__)}()"
    made = call(start=0) if takes_start and _needs_start(function) else call()
    if isinstance(made, DataLoader):
        return as_source(made)
    if _is_map_style(made) or not hasattr(made, "__iter__") or isinstance(made, str | bytes | dict | tuple):
        return made
    if takes_start:
        return IterableSource(Iteration(lambda start: iter(call(start=start)), name, takes_start=True))
    if not hasattr(made, "__next__"):
        return IterableSource(Iteration(lambda start: iter(made), name))
    unused = [made]

    def begin(start: int) -> Iterator[Any]:
        return unused.pop() if unused else iter(call())

    return IterableSource(Iteration(begin, name))


def takes_start(function: Callable[..., Any]) -> bool:
    """Whether `function` has a parameter `start` that can be passed by name."""
    return _start_of(function) is not None


def _needs_start(function: Callable[..., Any]) -> bool:
    parameter = _start_of(function)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _start_of(function: Callable[..., Any]) -> inspect.Parameter | None:
    try:
        parameter = inspect.signature(function).parameters.get("start")
    except (TypeError, ValueError):  # some functions in C have no signature
        return None
    return None if parameter is None or parameter.kind is inspect.Parameter.POSITIONAL_ONLY else parameter


def _is_map_style(given: Any) -> bool:
    sized = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    return sized and not isinstance(given, IterableDataset)  # which inherits a d[i] that only raises


# PyTorch's DataLoaders as data: their data sets, and their way to put samples side by side.
#
# Which samples make a batch, and in which order, a run says itself: a loader's batch size and order become keys of the
# run file (`shoal.api`, `shoal.own_loop.start`), and what its `collate_fn` makes of a microbatch is taken as it comes.


class CollatedSamples:
    """`source`, whose samples `collate` puts side by side: it returns what a sample is, each tensor with a leading dim
    of samples. `read` makes a `Sample` of that.
    """

    def __init__(
        self, source: Source, collate: Callable[[list[Any]], Any], read: Callable[[Any], Sample] = parse_sample
    ) -> None:
        self.source, self.collate, self._read = source, collate, read

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        """A batch of this sample alone, without its leading dim."""
        alone = self.collated([self.source[index]])
        first = lambda leaf: leaf[0]  # noqa: E731
        weights = None if alone.weights is None else alone.weights[0]
        return Sample(map_tree(first, alone.inputs), map_tree(first, alone.targets), weights)

    def item_at(self, index: int) -> Any:
        """The sample as the data set returns it, which only `collate` has to understand."""
        return self.source[index]

    def collated(self, items: Sequence[Any]) -> Sample:
        """What `collate` makes of `items`. Raises `UserCodeError` where that is of none of a sample's forms."""
        made = self.collate(list(items))
        return self._read(tuple(made) if isinstance(made, list) else made)


def without_loaders(data: Any) -> Any:
    """`data` with the samples of a DataLoader in its place; of a pair (training, held out) of each of them."""
    if isinstance(data, tuple):
        return tuple(without_loaders(part) for part in data) if any(isinstance(p, DataLoader) for p in data) else data
    if not isinstance(data, DataLoader):
        return data
    if data.collate_fn is default_collate or data.batch_size is None:
        return data.dataset
    return CollatedSamples(as_source(data.dataset), data.collate_fn)


def training_loader(data: Any) -> DataLoader | None:
    """The DataLoader of the training data, alone or of a pair (training, held out); None where it is something else."""
    first = data[0] if isinstance(data, tuple) and data else data
    return first if isinstance(first, DataLoader) else None
