"""From positions to a batch: the samples that stand there, read one by one or at once, augmented, side by side.

Errors of the data source name the sample and its position. A sample that raises DataError may be left out, if its
source says so: its place in the batch is filled with a copy of a readable one, of weight 0, which counts for nothing in
the loss.
"""

from __future__ import annotations

import math
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any, Protocol, cast

import numpy as np

from shoal.data.augment import Augmentation
from shoal.data.collate import collate, collate_stacked
from shoal.data.config import Denominator
from shoal.data.cursor import Interval
from shoal.data.inputs import AsInputs, rows_of, side_by_side
from shoal.data.sample import Batch, BatchSource, Collates, Sample, SkipsSamples, Source, parse_sample
from shoal.errors import DataError, ShoalError, UserCodeError

MOST_STAND_INS = 64
"""Samples that are tried as a stand-in where no sample of a batch is readable."""

ASKED_AT_ONCE = 256
"""Positions that a reader of small batches asks an order for."""


Where = Callable[[], str]
"""Which samples are read, for messages: nobody asks as long as all goes well."""


def _unasked(where: Where) -> None:
    """Nobody watches."""


class OrderOfSamples(Protocol):
    """`Order` or `MixtureOrder`: which sample stands at a position, and in which epoch."""

    @property
    def samples(self) -> int: ...

    def ids(self, positions: np.ndarray) -> np.ndarray: ...

    def epochs(self, positions: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class BatchRead:
    """A batch, and a sentence for each sample that was left out of it."""

    batch: Batch
    skipped: tuple[str, ...] = ()


class BatchReader(Protocol):
    """Reads batches; used by one thread."""

    @property
    def where(self) -> str:
        """The sample that is read now, for messages; "" where it is not known."""
        ...

    def read(self, part: Interval) -> BatchRead:
        """The batch at the positions `part`.

        Raises:
            DataError, UserCodeError: the source raised or returned what no sample may be.
        """
        ...

    def close(self) -> None:
        """Ends the reading. May be called again."""
        ...


@dataclass(frozen=True)
class SlowReads:
    """What becomes of a step whose samples are not there yet: `tell` hears which read it waits for, first after
    `tell_after_s` and then after twice as long each time; after `give_up_s` the wait ends.
    """

    tell: Callable[[str], object] = str
    tell_after_s: float = 5.0
    give_up_s: float = math.inf

    def wait(self, read: Event, where: Callable[[], str]) -> None:
        """Blocks until `read` is set; `where` says what is being read. Raises `DataError` when it gives up."""
        begin_s, next_word_s = time.monotonic(), self.tell_after_s
        while not read.wait(min(next_word_s, self.give_up_s) + begin_s - time.monotonic()):
            if next_word_s >= self.give_up_s:
                raise DataError(
                    f"{where()}: the data source has been reading for {self.give_up_s:.3g} s and hangs; "
                    "mend the source, or raise wire.timeout_s if it is only slow"
                )
            self.tell(f"{where()}: the data source has been reading for {next_word_s:.3g} s")
            next_word_s *= 2


class SourceReader:
    """Reads from `source` in the thread that asks. See `BatchReader`."""

    def __init__(
        self,
        source: Source,
        order: OrderOfSamples,
        *,
        denominator: Denominator,
        augmentation: Augmentation | None = None,
    ) -> None:
        self._source, self._order = source, order
        self._denominator: Denominator = denominator
        self._augmentation = augmentation
        self._known, self._known_ids = Interval(0, 0), np.empty(0, dtype=np.int64)
        self._where: Where = str

    @property
    def where(self) -> str:
        """See `BatchReader`."""
        return self._where()

    def read(self, part: Interval) -> BatchRead:
        """See `BatchReader.read`."""
        positions, ids = part.positions(), self._ids_of(part)
        if self._augmentation is None:
            return read_batch(self._source, ids, positions, denominator=self._denominator, began=self._began)
        changed = (self._augmentation, self._order.epochs(positions))
        return read_batch(
            self._source, ids, positions, denominator=self._denominator, changed=changed, began=self._began
        )

    def close(self) -> None:
        """Nothing is held."""

    def _ids_of(self, part: Interval) -> np.ndarray:
        """The samples that stand at `part`. An order costs a call, however few of its positions are asked for."""
        if not self._known.start <= part.start <= part.stop <= self._known.stop:
            epoch_end = (part.start // self._order.samples + 1) * self._order.samples
            stop = min(part.start + ASKED_AT_ONCE, epoch_end)
            if part.stop > stop:
                return self._order.ids(part.positions())
            self._known = Interval(part.start, stop)
            self._known_ids = self._order.ids(self._known.positions())
        first = part.start - self._known.start
        return self._known_ids[first : first + len(part)]

    def _began(self, where: Where) -> None:
        self._where = where


class PinnedReader:
    """What `reader` reads, in pinned memory: for ranks that compute on a GPU. See `BatchReader`."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    @property
    def where(self) -> str:
        return self._reader.where

    def read(self, part: Interval) -> BatchRead:
        """See `BatchReader.read`."""
        read = self._reader.read(part)
        return replace(read, batch=read.batch.pinned())

    def close(self) -> None:
        """Ends the reading."""
        self._reader.close()


def read_batch(
    source: Source,
    ids: np.ndarray,
    positions: np.ndarray,
    *,
    denominator: Denominator,
    changed: tuple[Augmentation, np.ndarray] | None = None,
    began: Callable[[Where], object] = _unasked,
) -> BatchRead:
    """The samples `ids` at `positions` (both int64 [samples]) as a batch; `changed` is by what, in which epochs.
    `began` is told of each sample before it is read, or of all where they are read at once.

    Raises:
        DataError, UserCodeError: the source raised (its exception is the cause) or returned what no sample may be; the
            message names the sample id and the position.
    """
    whole = partial(where_of, ids, positions)
    at_once = cast(BatchSource, source).samples_at if hasattr(source, "samples_at") else rows_of(source)
    if at_once is not None and (changed is None or not changed[0].changes):
        began(whole)
        stacked = _guarded(at_once, ids, where=whole)
        beside = partial(collate_stacked, positions=positions, denominator=denominator)
        return BatchRead(_guarded(beside, stacked, where=whole))
    if hasattr(source, "collated"):
        return _read_collated(
            cast(Collates, source), ids, positions, denominator=denominator, changed=changed, began=began
        )
    if (changed is None or not changed[0].changes) and not isinstance(source, SkipsSamples):
        return BatchRead(_read_items(source, ids, positions, denominator=denominator, changed=changed, began=began))
    samples: list[Sample | None] = []
    skipped: list[str] = []
    for place, index in enumerate(ids.tolist()):
        where = partial(where_of, ids[place : place + 1], positions[place : place + 1])
        began(where)
        try:
            samples.append(_read_sample(source, index, where=where, augmented=_augmented(changed, place)))
        except DataError as error:
            if not (isinstance(source, SkipsSamples) and source.skips(index)):
                raise
            skipped.append(str(error))
            samples.append(None)
    filled = _filled(source, ids, samples) if skipped else samples
    batch = _guarded(partial(collate, positions=positions, denominator=denominator), filled, where=whole)
    return BatchRead(_without_weight(batch, samples) if skipped else batch, tuple(skipped))


def _read_items(
    source: Source,
    ids: np.ndarray,
    positions: np.ndarray,
    *,
    denominator: Denominator,
    changed: tuple[Augmentation, np.ndarray] | None,
    began: Callable[[Where], object],
) -> Batch:
    """Items as the source returns them, put side by side at once where they are alike, else sample by sample."""
    own = source if type(source) is AsInputs else None
    read = source.__getitem__ if own is None else own.source.__getitem__
    places = [partial(_where_at, ids, positions, place) for place in range(len(ids))]
    items = []
    for place, (index, where) in enumerate(zip(ids.tolist(), places, strict=True)):
        began(where)
        seeded = read if changed is None else partial(_read_item, read, _augmented(changed, place))
        items.append(_guarded(seeded, index, where=where))
    whole = partial(where_of, ids, positions)
    stacked = _guarded(_stacked if own is None else own.stacked, items, where=whole)
    if stacked is not None:
        return _guarded(partial(collate_stacked, positions=positions, denominator=denominator), stacked, where=whole)
    parse = parse_sample if own is None else own.sample_of
    samples = [_guarded(parse, item, where=where) for item, where in zip(items, places, strict=True)]
    return _guarded(partial(collate, positions=positions, denominator=denominator), samples, where=whole)


def _stacked(items: Sequence[Any]) -> Sample | None:
    """Pairs of inputs and targets; None where they are not alike, or something else."""
    if set(map(type, items)) != {tuple} or set(map(len, items)) != {2}:
        return None
    inputs, targets = (side_by_side(part, lists=False) for part in zip(*items, strict=True))
    return None if inputs is None or targets is None else Sample(inputs, targets, None)


def _read_collated(
    source: Collates,
    ids: np.ndarray,
    positions: np.ndarray,
    *,
    denominator: Denominator,
    changed: tuple[Augmentation, np.ndarray] | None,
    began: Callable[[Where], object],
) -> BatchRead:
    """Items are augmented as the data set returned them, and then put side by side in the source's own way."""
    items = []
    for place, index in enumerate(ids.tolist()):
        where = partial(where_of, ids[place : place + 1], positions[place : place + 1])
        began(where)
        items.append(_guarded(partial(_read_item, source.item_at, _augmented(changed, place)), index, where=where))
    where = partial(where_of, ids, positions)
    stacked = _guarded(source.collated, items, where=where)
    beside = partial(collate_stacked, positions=positions, denominator=denominator)
    return BatchRead(_guarded(beside, stacked, where=where))


def _augmented(changed: tuple[Augmentation, np.ndarray] | None, place: int) -> tuple[Augmentation, int] | None:
    """By what the sample at this place of the batch is changed, and in which epoch."""
    return None if changed is None else (changed[0], int(changed[1][place]))


def _read_item(read: Callable[[int], Any], augmented: tuple[Augmentation, int] | None, index: int) -> Any:
    """What `read` gives for the sample, changed."""
    if augmented is None:
        return read(index)
    augmentation, epoch = augmented
    augmentation.before(epoch=epoch, sample_id=index)
    return augmentation(read(index), epoch=epoch, sample_id=index)


def _filled(source: Source, ids: np.ndarray, samples: Sequence[Sample | None]) -> list[Sample]:
    """`samples` with a readable one in the place of each that is missing."""
    stand_in = next((sample for sample in samples if sample is not None), None)
    if stand_in is None:
        stand_in = _stand_in(source, int(ids[0]))
    return [stand_in if sample is None else sample for sample in samples]


def _stand_in(source: Source, index: int) -> Sample:
    for other in range(index + 1, index + 1 + MOST_STAND_INS):
        try:
            return _read_sample(source, other % len(source), where=partial("Sample {}".format, other % len(source)))
        except DataError:
            continue
    raise DataError(
        f"Sample {index} and the {MOST_STAND_INS} after it cannot be read: there is too much damage to skip, write the "
        "files anew."
    )


def _without_weight(batch: Batch, samples: Sequence[Sample | None]) -> Batch:
    weights = batch.weights.clone()
    weights[[sample is None for sample in samples]] = 0
    return replace(batch, weights=weights)


def _read_sample(
    source: Source, index: int, *, where: Where, augmented: tuple[Augmentation, int] | None = None
) -> Sample:
    return _guarded(lambda i: parse_sample(_read_item(source.__getitem__, augmented, i)), index, where=where)


def _guarded(function: Any, argument: Any, *, where: Where) -> Any:
    """`function(argument)`; what it raises is raised again with `where` in front, and itself as the cause."""
    try:
        return function(argument)
    except DataError as error:
        raise DataError(f"{where()}: {error}") from error
    except UserCodeError as error:
        raise UserCodeError(f"{where()}: {error}") from error
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(
            f"{where()}: the data source raised {type(error).__name__}: {error}. Mend the sample or the code "
            "that reads it."
        ) from error


def _where_at(ids: np.ndarray, positions: np.ndarray, place: int) -> str:
    """The sample at this place of a batch."""
    return where_of(ids[place : place + 1], positions[place : place + 1])


def where_of(ids: np.ndarray, positions: np.ndarray) -> str:
    """The samples `ids` at `positions` (both int64 [samples]), for messages."""
    if len(ids) == 1:
        return f"Sample {int(ids[0])} at position {int(positions[0])}"
    return (
        f"Samples {int(ids[0])} .. {int(ids[-1])} ({len(ids)} of them) at positions {int(positions[0])} .. "
        f"{int(positions[-1])}"
    )


def is_of_a_handler(error: BaseException) -> bool:
    """Whether a handler of signals raised it, or what that called."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
