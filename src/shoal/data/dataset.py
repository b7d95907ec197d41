"""What a run trains and evaluates on, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.utils.data import Subset, TensorDataset

from shoal.data.iterable import IterableSource
from shoal.data.order import Order, permuted
from shoal.data.records import Foresees, Needed
from shoal.data.sample import SkipsSamples, Source
from shoal.data.sampling import Drawn, DrawnOrder, LengthOrder, SampleSubset, StratifiedOrder
from shoal.errors import DataError, UserCodeError

# Several sources in fixed proportions: which source, and which of its samples, stands at a position.
#
# The positions are cut into windows of B = sum of the quotas. Window b is a random permutation of B slots, drawn from
# (seed, b), of which `quotas[s]` belong to source s. So every window holds exactly the quotas, and the k-th slot of
# source s in window b is place b * quotas[s] + k of that source's own order. That numbers the places 0, 1, 2, ... of
# each source without a gap: each source passes through all of its samples once in every epoch of its own. Like `Order`,
# this is a pure function; nothing is stored, and a run resumes anywhere.


class MixtureOrder:
    """Positions to ids of the joined sources: source s has the ids from the sum of the sizes before it.

    Args:
        orders: the order of each source by itself.
        quotas: samples of each source in every window of `sum(quotas)` positions, each at least 1.
        seed: what the windows are drawn from.
    """

    def __init__(self, orders: Sequence[Order], quotas: Sequence[int], seed: int) -> None:
        self.orders, self.seed = tuple(orders), seed
        self.quotas = np.asarray(quotas, dtype=np.int64)
        self.window = int(self.quotas.sum())
        self.samples = sum(order.samples for order in orders)
        self._slots_before = np.concatenate([[0], np.cumsum(self.quotas)])
        self._ids_before = np.concatenate([[0], np.cumsum([order.samples for order in orders])])

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at global positions, int64 of the shape of `positions` (int64, none negative)."""
        sources, places = self.places(positions)
        ids = np.empty_like(places)
        for number, order in enumerate(self.orders):
            here = sources == number
            ids[here] = self._ids_before[number] + order.ids(places[here])
        return ids

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epoch of its own source in which each position falls, int64."""
        sources, places = self.places(positions)
        return places // np.array([order.samples for order in self.orders])[sources]

    def places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, place in that source's own order) of each position, int64."""
        positions = np.asarray(positions, dtype=np.int64)
        windows, indices = np.divmod(positions, self.window)
        slots = np.empty_like(indices)
        for window in np.unique(windows):
            here = windows == window
            slots[here] = permuted(indices[here], self.window, key=f"{self.seed}/window {window}")
        sources = np.searchsorted(self._slots_before, slots, side="right") - 1
        return sources, windows * self.quotas[sources] + slots - self._slots_before[sources]


def quotas_of(weights: Sequence[float], window: int) -> list[int]:
    """Samples of each source in a window, in proportion to positive `weights`: rounded down, the rest to the largest
    remainders.

    Raises:
        DataError: a source would have none.
    """
    shares = [weight * window / sum(weights) for weight in weights]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda s: (quotas[s] - shares[s], s))
    for source in by_remainder[: window - sum(quotas)]:
        quotas[source] += 1
    if 0 in quotas:
        raise DataError(
            f"data.window = {window} leaves source {quotas.index(0)} of the mixture no sample, its share being "
            f"{shares[quotas.index(0)]:.3g} of one: raise data.window."
        )
    return quotas


class Joined:
    """Sources one after the other: the ids of each follow on those of the one before."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self._before = np.concatenate([[0], np.cumsum([len(source) for source in sources])])

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, index: int) -> Any:
        source, own = self._found(index)
        return source[own]

    def skips(self, index: int) -> bool:
        """Whether the source of sample `index` leaves it out where it is damaged."""
        source, own = self._found(index)
        return isinstance(source, SkipsSamples) and source.skips(own)

    @property
    def ahead_bytes(self) -> int:
        """See `records.Foresees`: the least of the sources that say some."""
        said = [source.ahead_bytes for source in self.sources if isinstance(source, Foresees)]
        return min((number for number in said if number), default=0)

    def needed(self, ids: np.ndarray) -> list[Needed]:
        """See `records.Foresees`."""
        numbers = np.searchsorted(self._before, ids, side="right") - 1
        needed: list[Needed] = []
        for number, source in enumerate(self.sources):
            own = ids[numbers == number] - self._before[number]
            if isinstance(source, Foresees) and source.ahead_bytes and len(own):
                needed += source.needed(own)
        return needed

    def _found(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._before, index, side="right")) - 1
        return self.sources[number], index - int(self._before[number])


Facts = dict[str, str | int | float]
TARGETS = "targets"
"""The fact that says what the targets are, where they are the labels of the samples (`labelled`)."""
_PLAIN = (Tensor, np.ndarray, np.memmap, list, tuple)


def calls_user_code(source: object) -> bool:
    """Whether a read of `source` runs code that is neither Shoal's nor PyTorch's, so that what it gives may depend on
    the thread that asks.
    """
    if hasattr(source, "collated"):
        return True
    if type(source) is TensorDataset:
        return any(type(tensor) is not Tensor for tensor in source.tensors)
    if type(source) is Subset:
        return calls_user_code(source.dataset)
    if type(source).__module__.partition(".")[0] != "shoal":
        return type(source) not in _PLAIN
    within = (*getattr(source, "sources", ()), getattr(source, "source", None))
    return any(calls_user_code(each) for each in within if each is not None)


def in_a_mode() -> bool:
    """Whether this thread computes in another way than one that has just begun."""
    usual = torch.is_grad_enabled() and not (torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled())
    return not usual or _len_torch_function_stack() > 0 or _len_torch_dispatch_stack() > 0


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
