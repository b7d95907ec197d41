"""What a run trains and evaluates on, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shoal.data.drawn import Drawn, DrawnOrder, SampleSubset
from shoal.data.iterable import IterableSource
from shoal.data.lengths import LengthOrder
from shoal.data.mixture import MixtureOrder
from shoal.data.order import Order
from shoal.data.sample import Source
from shoal.data.strata import StratifiedOrder
from shoal.errors import UserCodeError

Facts = dict[str, str | int | float]
TARGETS = "targets"
"""The fact that says what the targets are, where they are the labels of the samples (`labelled`)."""
AnyOrder = Order | MixtureOrder | StratifiedOrder | DrawnOrder | LengthOrder


@dataclass(frozen=True, eq=False)
class Dataset:
    """What a run trains and evaluates on, and what is worth recording about it (hashes, sizes, baselines).

    `parts` are the sizes of a mixture's sources, which stand one after the other in `train`, and `quotas` how many
    samples of each stand in every window; both are empty for data of one source. `endless` data is a stream: its length
    is a bound, not a number of samples, and it is taken in its own order. `iterable` is what `train` reads its samples
    from where they are the items of an iterable; such data is endless, too. `strata` are the classes of the training
    samples, int64 [samples], where the order is stratified; `lengths` theirs, where those of like length stand
    together.
    """

    train: Source
    held_out: Source | None = None
    facts: Facts = field(default_factory=dict)
    parts: Sequence[int] = ()
    quotas: Sequence[int] = ()
    endless: bool = False
    iterable: IterableSource | None = None
    strata: np.ndarray | None = None
    lengths: np.ndarray | None = None

    @property
    def said_of_targets(self) -> str:
        """What a user should know of them; "" where there is nothing."""
        return str(self.facts.get(TARGETS, ""))

    @property
    def drawn(self) -> Drawn | None:
        """What the training samples are drawn from, where `data.weights` or a sampler of the script draws them."""
        found = (each for each in (self.train, getattr(self.train, "source", None)) if isinstance(each, Drawn))
        return next(found, None)

    @property
    def subset(self) -> SampleSubset | None:
        """The samples that `data.subset` leaves."""
        source: object = self.train
        while source is not None and not isinstance(source, SampleSubset):
            source = getattr(source, "source", None)
        return source

    def order(
        self, seed: int, *, shuffle: bool, step: int = 1, straddle: bool = False, window: int | None = None
    ) -> AnyOrder:
        """Which sample of `train` stands at which position, in steps of `step`, which may `straddle`
        the ends of epochs. Raises DataError: see `Order`."""
        if self.parts:
            orders = [Order(size, seed + 1 + i, shuffle=shuffle, window=window) for i, size in enumerate(self.parts)]
            return MixtureOrder(orders, self.quotas, seed)
        if self.drawn is not None:
            if self.strata is not None or self.lengths is not None or window is not None:
                raise UserCodeError(
                    "the DataLoader's sampler draws the samples, and data.stratify, data.group_by_length or "
                    "data.shuffle_window would order them otherwise: leave the key out, or the sampler"
                )
            return DrawnOrder(self.drawn, seed)
        if self.lengths is not None:
            return LengthOrder(self.lengths, seed, step=step, straddle=straddle)
        if self.strata is not None:
            return StratifiedOrder(self.strata, seed)
        return Order(len(self.train), seed, shuffle=shuffle and not self.endless, window=window)


@dataclass(frozen=True)
class Surroundings:
    """What data is built for: tokens in a sample, the model's token ids (None: unknown), the cache's folder."""

    sequence: int
    vocabulary: int | None
    cache: Path


def with_sizes(train: Source, held_out: Source | None, facts: Facts | None = None) -> Dataset:
    """A data set whose facts begin with its sizes."""
    sizes: Facts = {"train/samples": len(train)}
    if held_out is not None:
        sizes["held_out/samples"] = len(held_out)
    return Dataset(train, held_out, facts=sizes | (facts or {}))
