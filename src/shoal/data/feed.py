"""The feed: one replica's microbatches, read ahead by threads while the step before them trains.

The feed leases the steps' intervals from a cursor of its own, so they are those that the engine's cursor will lease.
One reader reads this replica's share of a step; steps are handed over in their order, whichever reader is ready first.
Threads suffice where reading waits for disks, and where numpy and torch release the interpreter while they copy; where
Python itself decodes, each thread waits for a process of its own (`reader_process`). The threads are daemons, so that a
data source that hangs cannot keep the interpreter from leaving.

Threads share one interpreter and the caches of processors: a thread that is woken in every small step to read a sample
takes five times as long as one that reads several in a row, and changes turns with the loop at every operator. So a
loop may say when its backward begins, in which no Python runs: steps ahead are read then (`in_backwards`), and small
ones (`SMALL_BYTES`) several at a time. A data set of the user's own may be changed while it is read, as a curriculum
does: what is read ahead of it does not show the change, so no more than a step is read beside those that have to be,
and none of an epoch before the loop asks for its first step (`StepShare.epochs_apart`): buffers are filled between two.

Best of all is no thread: small steps that are read in `QUICK_S` are read by the loop itself, when it asks for one of
them, as in a plain loop; several in a row, as a function that is called once in a step is called with cold caches.
Threads read the first steps, and show whether the others are such. How long a read takes must not decide what it gives:
the loop reads only what gives everyone the same (`calls_user_code`), and not inside of a mode of PyTorch's, such as
autocast, which holds for one thread. A loop that is inside of a hanging data source can say nothing: the thread that
has nothing to read says it. It cannot give the read up, though, so where other ranks wait for this one threads read
every step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Self

import numpy as np

from shoal.data.batches import (
    BatchRead,
    BatchReader,
    OrderOfSamples,
    SlowReads,
    SourceReader,
    is_of_a_handler,
    read_batch,
    where_of,
)
from shoal.data.config import BatchPhase, Denominator
from shoal.data.cursor import Cursor, Interval
from shoal.data.dataset import in_a_mode
from shoal.data.order import microbatches, share
from shoal.data.records import Foresees, ReadAhead
from shoal.data.sample import Batch, Source, leaves, padding_like
from shoal.errors import ConfigError, DataError, UserCodeError

SMALL_BYTES = 1 << 18
"""A step of which one replica reads at most so many bytes is small."""
SMALL_AT_ONCE, CHANGEABLE_AT_ONCE = 8, 2
"""So many small steps are read at once: from what no one changes, and from a data set of the user's own."""
QUICK_S, SLOW_IN_A_ROW = 3e-4, 8
"""Small steps that take so long are read by the loop itself, until they have taken longer so many times in a row."""
IN_THREAD, STALLS = 10, 3
"""A read of so many times that, as in a thread that takes turns with the loop, is slow; after so many slow ones by the
loop threads read them all."""
CLOSING_S = 1.0  # how long `close` waits for readers that are inside the data source


@dataclass(frozen=True)
class FedStep:
    """One step's data: the whole step's `interval`, this replica's microbatches, and how long the caller waited.

    `skipped` has a sentence for each damaged sample of this replica's that was left out.
    """

    interval: Interval
    microbatches: list[Batch]
    wait_s: float
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepShare:
    """Which of a step's `global_samples` one replica reads, and in which microbatches.

    Args:
        global_samples: samples of one step, of all replicas together.
        replica: the number of this one of `replicas`; None: it reads nothing.
        micro_samples: samples of one microbatch; None: this replica's whole share.
        group: samples that batch statistics are taken over; no share or microbatch cuts one.
        speeds: of all replicas, if shares are in proportion to them; None: they are even. A step of fewer groups than
            replicas is divided evenly.
        epoch: no step goes on behind a multiple of so many positions, so that the last one before it may be shorter;
            None: all steps are of one size.
        schedule: phases of smaller steps at the start (`BatchConfig.schedule`).
        epochs_apart: nothing of an epoch is read before its first step is asked for.

    Raises:
        ConfigError: the samples of a step or of a microbatch are not whole groups.
        ValueError: `speeds` divide nothing, as `share` says.
    """

    global_samples: int
    replica: int | None = 0
    replicas: int = 1
    micro_samples: int | None = None
    group: int = 1
    speeds: tuple[float, ...] | None = None
    epoch: int | None = None
    schedule: tuple[BatchPhase, ...] = ()
    epochs_apart: bool = False

    def __post_init__(self) -> None:
        if self.micro_samples is not None and self.micro_samples % self.group:
            raise ConfigError(
                f"batch.micro_samples = {self.micro_samples} would cut statistics groups of {self.group}: "
                "make it a multiple."
            )
        for samples in {self.global_samples, *(phase.samples for phase in self.schedule)}:
            self._own(Interval(0, samples))

    def samples_at(self, position: int) -> int:
        """Samples of the step that begins at `position`."""
        samples = next((phase.samples for phase in self.schedule if position < phase.until), self.global_samples)
        return samples if self.epoch is None else min(samples, self.epoch - position % self.epoch)

    def stand_in(self, step: Interval) -> Interval | None:
        """Whose copies, with weight 0, this replica computes where a short `step` has no samples for it."""
        if self.replica is None or self.epoch is None or len(self._own(step)):
            return None
        return Interval(step.start, step.start + self.group)

    def microbatches(self, step: Interval) -> Iterator[Interval]:
        """This replica's part of the positions of a `step`, cut into microbatches."""
        if self.replica is None:
            return
        own = step if self._takes_all else self._own(step)
        if self.micro_samples is None and len(own):
            yield own
        else:
            yield from microbatches(own, self.micro_samples or 1)

    @property
    def _takes_all(self) -> bool:
        return self.replicas == self.group == 1

    def _own(self, step: Interval) -> Interval:
        speeds = self.speeds if len(step) >= self.group * self.replicas else None
        return share(step, replicas=self.replicas, replica=self.replica or 0, group=self.group, speeds=speeds)


@dataclass
class _Slot:
    """The place of one step's result, filled by whichever reader takes it; `filled` is set where that is a thread."""

    interval: Interval
    own: StepShare
    filled: Event | None = None
    batches: list[Batch] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    error: BaseException | None = None
    reader: BatchReader | None = None
    part: Interval | None = None
    took_s: float = 0.0
    small: bool = False


class Feed:
    """The steps from `start` on, without end, of which one replica reads its share.

    Args:
        source: samples 0 .. len - 1; read by several threads where `readers` > 1.
        order: which sample stands at which position; of as many samples as `source`.
        own: what this replica reads of each step.
        start: the run's cursor, or the position at which it stands.
        slow: what becomes of a step that has to wait for long.
        open_reader: what each of the `readers` threads reads with; default: from `source`, as it is.

    Raises:
        DataError: `order` is of another number of samples.
    """

    def __init__(
        self,
        source: Source,
        order: OrderOfSamples,
        own: StepShare,
        *,
        denominator: Denominator = "auto",
        start: Cursor | int = 0,
        prefetch_steps: int = 2,
        readers: int = 1,
        slow: SlowReads = SlowReads(),
        open_reader: Callable[[], BatchReader] | None = None,
    ) -> None:
        if len(source) != order.samples:
            raise DataError(f"The source has {len(source)} samples, its order {order.samples}: they must be equal.")
        self._open_reader = open_reader or (lambda: SourceReader(source, order, denominator=denominator))
        self._own, self._order, self._slow = own, order, slow
        self._cursor = Cursor(start) if isinstance(start, int) else start
        self._slots: deque[_Slot] = deque()
        self._work: SimpleQueue[_Slot | None] = SimpleQueue()
        self._closed = Event()
        self._deferred: deque[_Slot] = deque()
        self._defers = False
        self._ahead: ReadAhead | None = None
        if isinstance(source, Foresees) and source.ahead_bytes:
            self._ahead = ReadAhead(source, self._ids_ahead(self._cursor))
        self._least_ahead, self._small_at_once = max(1, prefetch_steps), 1
        self._reads_quick, self._slow_in_a_row, self._stalls = False, 0, 0
        self._own_reader: BatchReader | None = None
        self._read_here: _Slot | None = None
        self._read_over = Event()
        self._plan_steps(self._least_ahead)
        self._threads = [Thread(target=self._read, name=f"shoal-reader-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def next(self) -> FedStep:
        """The next step, waiting for it where it is not ready yet.

        Raises:
            DataError: a read took too long (`SlowReads`); the message names what was read.
            DataError, UserCodeError: the source failed; the message names the sample id and the position, and the
                source's own exception is the cause. The step stays the next one.
            ValueError: the feed is closed.
        """
        if self._closed.is_set():
            raise ValueError("the feed is closed: make a new one at the cursor")
        started_s = time.perf_counter()
        if not self._slots:
            self._read_by_loop()
        slot = self._slots[0]
        self._read_on()
        if slot.filled is not None:
            self._slow.wait(slot.filled, partial(self._being_read, slot))
        wait_s = time.perf_counter() - started_s
        if slot.error is not None:
            raise slot.error
        self._slots.popleft()
        self._plan_after(slot)
        if self._ahead is not None:
            self._ahead.step_taken()
        return FedStep(slot.interval, slot.batches, wait_s=wait_s, skipped=tuple(slot.skipped))

    def in_backwards(self, *, small_at_once: int, quick_by_loop: bool = False) -> Callable[[], None]:
        """From now on the steps ahead are read when what it returns is called, which is cheap; at the latest when the
        next step is asked for.

        `small_at_once`: so many small steps in a row, whenever fewer than `prefetch_steps` are ahead. 1 where replicas
        `divide` what is not read yet, or where what is read follows what the run does. `quick_by_loop`: the loop reads
        small steps itself, if they are quick, and if one thread reads and no read is ever given up.
        """
        self._defers, self._small_at_once = True, small_at_once
        alone = len(self._threads) == 1 and self._ahead is None and math.isinf(self._slow.give_up_s)
        self._reads_quick = quick_by_loop and alone
        return self._read_on

    def divide(self, speeds: Sequence[float] | None) -> None:
        """Steps that are not being read yet are divided among replicas in proportion to `speeds`; None: evenly.

        Every replica calls it after the same step, with the same speeds. Raises `ValueError` as `share` does.
        """
        self._own = replace(self._own, speeds=None if speeds is None else tuple(speeds))

    def close(self) -> None:
        """Ends the readers; one that is inside the data source ends when it comes out. May be called again."""
        self._closed.set()
        if self._ahead is not None:
            self._ahead.close()
        for _ in self._threads:
            self._work.put(None)
        deadline_s = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._own_reader is not None:
            self._own_reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample_ids(self, positions: np.ndarray) -> np.ndarray:
        """The ids of the samples at `positions`; both int64 [samples]."""
        return self._order.ids(positions)

    def _being_read(self, slot: _Slot) -> str:
        if slot.reader is not None and slot.reader.where:
            return slot.reader.where
        positions = (slot.part or slot.interval).positions()
        where = where_of(self._order.ids(positions), positions)
        return where if slot.reader is not None else f"{where} (its reader has not opened the data yet)"

    def _ids_ahead(self, cursor: Cursor) -> Iterator[np.ndarray]:
        """The ids that this replica will read in each step from `cursor` on, as steps are divided now."""
        while True:
            cursor, interval = cursor.take(self._own.samples_at(cursor.next_position))
            positions = [part.positions() for part in self._own.microbatches(interval)]
            yield self._order.ids(np.concatenate([np.empty(0, dtype=np.int64), *positions]))

    def _plan_after(self, slot: _Slot) -> None:
        """The steps that threads will read, now that `slot` is taken: none where the loop reads the next one."""
        slow = slot.took_s > IN_THREAD * QUICK_S
        self._stalls += slow and slot.filled is None
        self._reads_quick &= self._stalls < STALLS
        if self._reads_quick and slot.small and not slow:
            return
        missing = self._least_ahead - len(self._slots)
        if missing > 0:
            self._plan_steps(max(missing, self._small_at_once if slot.small else 1))

    def _following(self) -> tuple[Cursor, _Slot]:
        """The step at the cursor, and the cursor behind it."""
        behind, interval = self._cursor.take(self._own.samples_at(self._cursor.next_position))
        return behind, _Slot(interval, self._own)

    @property
    def _before_epoch(self) -> bool:
        return self._own.epochs_apart and self._cursor.next_position % self._order.samples == 0

    def _plan_steps(self, steps: int) -> None:
        """As far as the epoch goes."""
        for _ in range(steps):
            if not self._before_epoch:
                self._plan_step()

    def _plan_step(self) -> None:
        self._cursor, slot = self._following()
        slot.filled = Event()
        self._slots.append(slot)
        self._deferred.append(slot)
        if not self._defers:
            self._read_on()

    def _read_on(self) -> None:
        while self._deferred:
            self._work.put(self._deferred.popleft())

    def _read_by_loop(self) -> None:
        """The next step, read in the thread that asks for it with as many behind it as threads would read ahead."""
        took_s, self._read_over = [], Event()
        self._reads_quick &= not in_a_mode()
        most = self._least_ahead + self._small_at_once - 1
        try:
            while self._reads_quick and len(took_s) < most and not (took_s and self._before_epoch):
                behind, slot = self._following()
                self._read_here = slot
                self._own_reader = self._fill(slot, self._own_reader)
                if slot.error is not None:
                    self._raise_if_not_the_samples(slot.error)
                    self._reads_quick = False
                    break
                self._cursor = behind
                self._slots.append(slot)
                took_s.append(slot.took_s)
                if not slot.small:
                    break
        finally:
            self._read_here = None
            self._read_over.set()
        self._slow_in_a_row = self._slow_in_a_row + 1 if sum(took_s) > QUICK_S * len(took_s) else 0
        self._reads_quick &= self._slow_in_a_row < SLOW_IN_A_ROW
        if not self._slots:
            self._plan_step()
            self._plan_steps(self._least_ahead - 1)

    def _raise_if_not_the_samples(self, error: BaseException) -> None:
        """Raises what a signal brought into a read by the loop: what ends the process, or what a handler of the script
        raises. What the same read does not raise again is raised as a thread would have met it.
        """
        cause = error
        while isinstance(cause, UserCodeError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if not isinstance(cause, Exception) or is_of_a_handler(cause):
            raise cause
        _, again = self._following()
        self._own_reader = self._fill(again, self._own_reader)
        if again.error is None:
            raise error

    def _read(self) -> None:
        reader: BatchReader | None = None
        while (slot := self._take_work()) is not None and not self._closed.is_set():
            reader = self._fill(slot, reader)
        if reader is not None:
            reader.close()

    def _take_work(self) -> _Slot | None:
        """What this thread is to read next. Meanwhile it says which read the loop is inside of for long."""
        while True:
            try:
                return self._work.get(timeout=self._slow.tell_after_s)
            except Empty:
                if (slot := self._read_here) is not None:
                    self._slow.wait(self._read_over, lambda slot=slot: self._being_read(self._read_here or slot))

    def _fill(self, slot: _Slot, reader: BatchReader | None) -> BatchReader | None:
        """Reads a step by `reader`, which is opened where there is none yet."""
        began_s = time.perf_counter()
        try:
            slot.reader = reader = reader or self._open_reader()
            for read in self._batches(reader, slot):
                slot.batches.append(read.batch.count())
                slot.skipped += read.skipped
        except BaseException as error:  # whatever ends a reader must reach the caller, or it would wait for ever
            slot.error = error
        slot.took_s = time.perf_counter() - began_s
        slot.small = sum(leaf.nbytes for b in slot.batches for leaf in leaves(b.inputs, b.targets)) <= SMALL_BYTES
        if slot.filled is not None:
            slot.filled.set()
        return reader

    def _batches(self, reader: BatchReader, slot: _Slot) -> Iterator[BatchRead]:
        for part in slot.own.microbatches(slot.interval):
            if self._closed.is_set():
                return
            slot.part = part
            yield reader.read(part)
        stand_in = slot.own.stand_in(slot.interval)
        if stand_in is not None:
            slot.part = stand_in
            read = reader.read(stand_in)
            yield replace(read, batch=padding_like(read.batch, len(stand_in)), skipped=())


def evaluation_batches(
    source: Source,
    *,
    replicas: int,
    replica: int,
    micro_samples: int | None = None,
    denominator: Denominator = "auto",
    limit: int | None = None,
) -> Iterator[Batch]:
    """This replica's part of one pass over the samples, each once, in natural order.

    With a `limit`, over that many of them, evenly spaced: the first ones alone may come from a single file.

    Raises:
        DataError, UserCodeError: as `Feed.next`.
    """
    samples = len(source) if limit is None else min(limit, len(source))
    own = share(Interval(0, samples), replicas=replicas, replica=replica)
    for part in microbatches(own, micro_samples or max(1, len(own))):
        positions = part.positions()
        yield read_batch(source, positions * len(source) // samples, positions, denominator=denominator).batch
