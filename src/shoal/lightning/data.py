"""What Lightning's loops go over: the run's batches, and each rank's part of an evaluation.

A batch has `batch_size` x `processes` samples over all ranks, where `processes` are those that the script is written
for; so Lightning counts the same batches on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, TypeGuard

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training


class Batches:
    """A DataLoader in Lightning's hands: its attributes are those of `loader`. A batch has `size` samples over all
    ranks.
    """

    def __init__(self, loader: DataLoader, size: int, run: Callable[[], Training]) -> None:
        self.loader, self.size, self._run = loader, size, run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        samples = len(self.loader.sampler)  # pyright: ignore[reportArgumentType]
        return samples // self.size if self.loader.drop_last else ceil(samples / self.size)


class TrainingBatches(Batches):
    """The batches of the training. `batches`: how many an iterable has, whose epoch is the whole run. `joined`: how
    many the run gives at once, as the one process of a comparison does with those of a step.
    """

    def __init__(
        self,
        loader: DataLoader,
        size: int,
        run: Callable[[], Training],
        *,
        batches: int | None = None,
        joined: int = 1,
    ) -> None:
        super().__init__(loader, size, run)
        self.joined, self._batches = joined, batches
        self._epochs: Iterator[tuple[int, Iterator[Any]]] | None = None

    def __len__(self) -> int:
        return ceil((super().__len__() if self._batches is None else self._batches) / self.joined)

    def __iter__(self) -> Iterator[Any]:
        """Those of the next epoch, or what a resumed run has left of it."""
        run = self._run()
        if self._batches is not None:
            yield from run.batches()
            return
        self._epochs = self._epochs or run.epochs()
        for _number, batches in self._epochs:
            yield from batches
            return

    def limited(self, batches: int) -> DataLoader:
        """The DataLoader of the first so many batches of its data set. Raises `UsageError` for one with a sampler."""
        loader = self.loader
        batches *= self.joined
        if batches * self.size >= len(loader.sampler):  # pyright: ignore[reportArgumentType]
            return loader
        if type(loader.sampler) not in (RandomSampler, SequentialSampler):
            raise UsageError(
                "limit_train_batches and overfit_batches with a sampler: give a torch.utils.data.Subset of the data set"
            )
        return DataLoader(
            Subset(loader.dataset, range(batches * self.size)),
            loader.batch_size,
            shuffle=isinstance(loader.sampler, RandomSampler),
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
        )


class EvaluationBatches(Batches):
    """This rank's part of each batch of an evaluation. `counts` is called with the samples of each: 0 for a copy of the
    batch's first one, which a rank gets that has none of it, so that all ranks take as many.
    """

    def __init__(
        self, loader: DataLoader, size: int, run: Callable[[], Training], counts: Callable[[int], None]
    ) -> None:
        super().__init__(loader, size, run)
        self._counts = counts

    def __iter__(self) -> Iterator[Any]:
        run, loader = self._run(), self.loader
        order = list(loader.sampler)
        samples = len(order) // self.size * self.size if loader.drop_last else len(order)
        rows = shares(samples, self.size, rank=run.rank, ranks=run.world_size)
        given = [[order[each] for each in own] or [order[n * self.size]] for n, own in enumerate(rows)]
        read = DataLoader(
            loader.dataset,
            batch_sampler=given,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
        )
        for own, batch in zip(rows, read, strict=True):
            self._counts(len(own))
            yield batch


def shares(samples: int, size: int, *, rank: int, ranks: int) -> list[range]:
    """What a rank takes of each batch of `size`: its part of the batch. Where batches have too few samples for all
    ranks, these take turns. Where only the last one has, its samples and those of the one before are divided together,
    so that each rank has a sample of both.
    """
    bounds = [(first, min(first + size, samples)) for first in range(0, samples, size)]
    own = [_part(*each, rank=rank, ranks=ranks) for each in bounds]
    if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] < ranks <= size // 2:
        mine = _part(bounds[-2][0], bounds[-1][1], rank=rank, ranks=ranks)
        own[-2:] = [mine[: ceil(len(mine) / 2)], mine[ceil(len(mine) / 2) :]]
    return own


def _part(first: int, behind: int, *, rank: int, ranks: int) -> range:
    count, more = divmod(behind - first, ranks)
    rank = (rank - first) % ranks
    start = first + rank * count + min(rank, more)
    return range(start, start + count + (rank < more))


def is_divisible(loader: object) -> TypeGuard[DataLoader]:
    """Whether its samples have numbers, and batches a size."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_size is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def require_loader(loader: Any, what: str) -> DataLoader:
    """Raises `UsageError` for what a run cannot divide among its ranks."""
    if isinstance(loader, Batches):
        return loader.loader
    if not isinstance(loader, DataLoader):
        raise UsageError(f"the {what} is a {type(loader).__name__}: give a torch.utils.data.DataLoader")
    if loader.batch_size is None:
        raise UsageError(f"the {what} has a batch_sampler of its own: give it a batch_size and a sampler")
    return loader


def require_one(loaders: Sequence[Any]) -> Any:
    """Raises `UsageError` for several DataLoaders of the training."""
    if len(loaders) != 1:
        raise UsageError(
            f"{len(loaders)} train_dataloaders: a run has the order of one. Give one data set, whose samples have what "
            "all had"
        )
    return loaders[0]
