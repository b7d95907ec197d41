"""The batches of an engine's loop: this rank's microbatches of the run, epoch by epoch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from math import ceil
from typing import TYPE_CHECKING, Any

from shoal.errors import UserCodeError

if TYPE_CHECKING:
    from shoal.deepspeed.engine import Engine


class Loader:
    """What `initialize` returns for its `training_data`: each pass over it is an epoch. A run that is resumed passes
    over the epochs that are done, without a batch, and begins with the rest of the open one; behind `begin_here` it
    begins there at once.

    `samples` are those of an epoch, `step` those of an update over all ranks, which takes `accumulation` microbatches.
    """

    def __init__(self, engine: Engine, *, samples: int | None, step: int, accumulation: int) -> None:
        self._engine, self._samples, self._step, self._accumulation = engine, samples, step, accumulation
        self._epochs: Iterator[tuple[int, Iterator[Any]]] | None = None
        self._asked = 0  # epochs that the loop has asked for
        self._open: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Microbatches of an epoch on this rank; those of the last step may be fewer."""
        if self._samples is None:
            raise TypeError("the data is an iterable, whose length nobody knows")
        return ceil(self._samples / self._step) * self._accumulation

    def __iter__(self) -> Iterator[Any]:
        run = self._engine.run
        if self._samples is None:
            self._open = run.batches()
            return self._open
        asked, self._asked = self._asked, self._asked + 1
        if self._engine.is_over and asked > ceil(run.epoch):
            raise self.asked_too_often()
        if self._engine.is_over or asked < int(run.epoch):
            return iter(())
        self._epochs = self._epochs or run.epochs()
        self._open = next((batches for _number, batches in self._epochs), iter(()))
        return self._open

    def close(self) -> None:
        """The loop takes no more: it may have left its last pass open."""
        if isinstance(self._open, Generator):
            self._open.close()

    def begin_here(self) -> None:
        """The first pass is the rest of the open epoch: the loop counts updates, or knows which epoch it is in."""
        self._asked = max(self._asked, int(self._engine.run.epoch))

    def asked_too_often(self) -> UserCodeError:
        """The refusal of a loop that asks a run that is over for more, and might do so for ever."""
        return UserCodeError(
            f"the script came to its end behind step {self._engine.run.steps_done}, and its loop asks for more: "
            "--fresh trains anew; a loop that counts updates ends by engine.global_steps"
        )

    @property
    def is_over(self) -> bool:
        """Whether the script had come to its end when the run was saved: there is no batch."""
        return self._engine.is_over


class RepeatingLoader:
    """The batches of `loader` over and over, for loops that count updates. A run that is resumed begins with the rest
    of the open epoch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self._batches, self._in_for = loader, iter(()), False
        if isinstance(loader, Loader):
            loader.begin_here()

    def __iter__(self) -> RepeatingLoader:
        self._in_for = True
        return self

    def __next__(self) -> Any:
        """The next batch. Raises `StopIteration` for a loader that has none, and `UserCodeError` where a loop without
        `for` asks a run that is over.
        """
        if not self._in_for and isinstance(self.loader, Loader) and self.loader.is_over:
            raise self.loader.asked_too_often()
        for again in (False, True):
            if again:
                self._batches = iter(self.loader)
            for batch in self._batches:
                return batch
        raise StopIteration

    def __len__(self) -> int:
        return len(self.loader)
