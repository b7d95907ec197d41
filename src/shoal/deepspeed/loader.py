"""The batches of an engine's loop: this rank's microbatches of the run, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.deepspeed.engine import Engine


class Loader:
    """What `initialize` returns for its `training_data`: each pass over it is an epoch. A run that is resumed passes
    over the epochs that are done, without a batch, and begins with the rest of the open one.

    `samples` are those of an epoch, `step` those of an update over all ranks, which takes `accumulation` microbatches.
    """

    def __init__(self, engine: Engine, *, samples: int | None, step: int, accumulation: int) -> None:
        self._engine, self._samples, self._step, self._accumulation = engine, samples, step, accumulation
        self._epochs: Iterator[tuple[int, Iterator[Any]]] | None = None
        self._asked = 0  # epochs that the loop has asked for

    def __len__(self) -> int:
        """Microbatches of an epoch on this rank; those of the last step may be fewer."""
        if self._samples is None:
            raise TypeError("the data is an iterable, whose length nobody knows")
        return ceil(self._samples / self._step) * self._accumulation

    def __iter__(self) -> Iterator[Any]:
        run = self._engine.run
        if self._samples is None:
            return run.batches()
        asked, self._asked = self._asked, self._asked + 1
        if self._engine.is_over or asked < int(run.epoch):
            return iter(())
        self._epochs = self._epochs or run.epochs()
        return next((batches for _number, batches in self._epochs), iter(()))


class RepeatingLoader:
    """The batches of `loader` over and over, for loops that count updates."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises `StopIteration` for a loader that has none."""
        for again in (False, True):
            if again:
                self._batches = iter(self.loader)
            for batch in self._batches:
                return batch
        raise StopIteration

    def __len__(self) -> int:
        return len(self.loader)
