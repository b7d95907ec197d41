"""Which sample stands at which position of the run, and how the positions of a step are divided.

Position p belongs to epoch e = p // n at index i = p % n. Within an epoch the order is a balanced Feistel network on
the smallest even-bit domain 2^2h >= n, eight rounds of

    (left, right) <- (right, left xor (F(right, key_r) mod 2^h))

with F the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) and the round keys blake2b(seed, epoch). An image
outside [0, n) is sent through the network again until it falls inside ("cycle walking": Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002), which keeps it a permutation; the domain is below 4n, so that takes fewer
than four passes on average. Nothing is stored: an order of 10^12 samples costs no memory, and neither the world size
nor the batch size has a part in it.

With a `window` of w, the samples are cut into runs of w // 16 neighbours; the runs are permuted, and then the samples
within every 16 runs. A stretch of w positions then touches 16 runs of the files (32 where it is not aligned), which a
reader can hold in memory.

A step's positions are cut into contiguous parts, one for each replica that is present, and those into microbatches.
Parts may differ in size by one group of samples, because the loss is a sum over a global denominator. A *group* is
what batch statistics are taken over; no cut goes through one, so that statistics do not depend on the number of
replicas.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.data.cursor import Interval
from shoal.errors import ConfigError, DataError

ROUNDS = 8
RUNS = 16
MOST_SAMPLES = 2**62


@dataclass(frozen=True)
class Order:
    """The order of `samples` samples in every epoch, drawn from `seed`, or the natural one.

    Args:
        window: positions that share 16 runs of neighbouring samples; None: the order is drawn over all samples.

    Raises:
        DataError: there are no samples, or more than 2^62.
    """

    samples: int
    seed: int
    shuffle: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise DataError(
                f"The data source holds {self.samples} samples; an order needs from 1 to 2^62: check what it reads."
            )

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at global positions, int64 of the shape of `positions` (int64, none negative)."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and positions.min() < 0:
            raise ValueError(f"position {positions.min()} is negative: positions count from the start of the run")
        epochs, indices = np.divmod(positions, self.samples)
        if not self.shuffle:
            return indices
        ids = np.empty_like(indices)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            if self.window is None:
                ids[here] = permuted(indices[here], self.samples, key=f"{self.seed}/{epoch}")
            else:
                ids[here] = self._within_windows(indices[here], self.window, key=f"{self.seed}/{epoch}")
        return ids

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epoch in which each position falls, int64."""
        return np.asarray(positions, dtype=np.int64) // self.samples

    def _within_windows(self, indices: np.ndarray, window: int, *, key: str) -> np.ndarray:
        run = max(1, window // RUNS)
        whole_runs, window = self.samples // run, RUNS * run
        places = np.empty_like(indices)
        numbers = indices // window
        for number in np.unique(numbers):
            here, start = numbers == number, int(number) * window
            size = min(window, self.samples - start)
            places[here] = start + permuted(indices[here] - start, size, key=f"{key}/window {number}")
        inside = places < whole_runs * run  # what is left of a last, shorter run stays at the end
        runs = permuted(places[inside] // run, max(1, whole_runs), key=f"{key}/runs")
        places[inside] = runs * run + places[inside] % run
        return places


class EpochInMemory(ABC):
    """An order whose epochs are drawn whole, of which it keeps the newest: 8 bytes a sample."""

    _epoch: tuple[int, np.ndarray] | None = None

    @property
    @abstractmethod
    def samples(self) -> int:
        """Samples of an epoch."""

    @abstractmethod
    def _drawn(self, epoch: int) -> np.ndarray:
        """The ids of an epoch in order, int64 [samples]."""

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at global positions, int64 of the shape of `positions` (int64, none negative)."""
        epochs, indices = np.divmod(np.asarray(positions, dtype=np.int64), self.samples)
        ids = np.empty_like(indices)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = self._in_epoch(int(epoch))[indices[here]]
        return ids

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epoch in which each position falls, int64."""
        return np.asarray(positions, dtype=np.int64) // self.samples

    def _in_epoch(self, epoch: int) -> np.ndarray:
        """The ids of an epoch in order, int64 [samples]. Several threads may ask: the newest is kept."""
        kept = self._epoch
        if kept is None or kept[0] != epoch:
            kept = self._epoch = epoch, self._drawn(epoch)
        return kept[1]


class WithinEpochs(Protocol):
    """An order that has every sample once in an epoch."""

    @property
    def samples(self) -> int: ...

    def ids(self, positions: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class WholeSteps:
    """`order` without what is left at the end of each epoch behind the first `kept` samples: position p is place
    p % kept of epoch p // kept.

    Raises:
        ValueError: `kept` is not one of 1 .. `order.samples`.
    """

    order: WithinEpochs
    kept: int

    def __post_init__(self) -> None:
        if not 1 <= self.kept <= self.order.samples:
            raise ValueError(f"{self.kept} of {self.order.samples} samples are kept: it must be 1 or more of them")

    @property
    def samples(self) -> int:
        """Samples of the source."""
        return self.order.samples

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """See `Order.ids`."""
        epochs, indices = np.divmod(np.asarray(positions, dtype=np.int64), self.kept)
        return self.order.ids(epochs * self.order.samples + indices)

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """See `Order.epochs`."""
        return np.asarray(positions, dtype=np.int64) // self.kept


def permuted(indices: np.ndarray, samples: int, *, key: str) -> np.ndarray:
    """The images of `indices` (int64) under the permutation of [0, samples) that `key` picks."""
    return _permute(indices, samples, keys=_round_keys(key))


def _round_keys(key: str) -> np.ndarray:
    """Keys of the rounds, uint64 [ROUNDS]."""
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS, person=b"shoal-order").digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _permute(indices: np.ndarray, samples: int, *, keys: np.ndarray) -> np.ndarray:
    """The images of `indices` under the permutation of [0, samples) that `keys` pick: the network, walked."""
    half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    images = _feistel(indices.astype(np.uint64), half_bits, keys=keys)
    outside = np.flatnonzero(images >= samples)
    while outside.size:
        images[outside] = _feistel(images[outside], half_bits, keys=keys)
        outside = outside[images[outside] >= samples]
    return images.astype(np.int64)


def _feistel(numbers: np.ndarray, half_bits: int, *, keys: np.ndarray) -> np.ndarray:
    """A permutation of [0, 2^(2 half_bits)), uint64 in and out."""
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; products wrap modulo 2^64 as they should."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def share(
    interval: Interval, *, replicas: int, replica: int, group: int = 1, speeds: Sequence[float] | None = None
) -> Interval:
    """The part of `interval` that replica `replica` of `replicas` computes; empty where groups run out.

    Parts are even, or in proportion to `speeds` (see `divided_by_speed`). Either way they lie one behind the other, so
    that the samples of all replicas together are the same.

    Raises:
        ConfigError: `interval` is not a whole number of groups.
        ValueError: `replica` is not one of 0 .. replicas - 1, or there is not a speed for each.
    """
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} of {replicas}: it must be in 0 .. {replicas - 1}")
    groups, rest = divmod(len(interval), group)
    if rest:
        raise ConfigError(
            f"A step of {len(interval)} samples does not divide into statistics groups of {group}: make "
            f"batch.global_samples a multiple of {group}."
        )
    if speeds is None:
        before, after = (groups * edge // replicas for edge in (replica, replica + 1))
    else:
        if len(speeds) != replicas:
            raise ValueError(f"{len(speeds)} speeds for {replicas} replicas: there must be one for each")
        counts = divided_by_speed(groups, speeds)
        before, after = sum(counts[:replica]), sum(counts[: replica + 1])
    return Interval(interval.start + group * before, interval.start + group * after)


def divided_by_speed(total: int, speeds: Sequence[float]) -> list[int]:
    """`total` cut into whole parts in proportion to `speeds`, at least 1 each (the method of largest remainders).

    Raises:
        ValueError: a speed is not positive and finite, or there are more parts than `total`.
    """
    if any(not 0 < speed < math.inf for speed in speeds):
        raise ValueError(f"speeds {list(speeds)}: each must be positive and finite")
    if total < len(speeds):
        raise ValueError(f"{total} cannot be cut into {len(speeds)} parts of at least 1")
    rest = total - len(speeds)
    wanted = [max(0.0, total * speed / sum(speeds) - 1) for speed in speeds]
    scale = rest / sum(wanted) if rest else 0.0
    exact = [scale * part for part in wanted]
    counts = [1 + math.floor(part) for part in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda k: (math.floor(exact[k]) - exact[k], k))
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return counts


def microbatches(interval: Interval, micro_samples: int) -> list[Interval]:
    """Consecutive cuts of `micro_samples` positions, the last one maybe shorter; none of an empty interval.

    Raises:
        ValueError: `micro_samples` is not positive.
    """
    if micro_samples < 1:
        raise ValueError(f"microbatches of {micro_samples} samples: they need at least 1")
    starts = range(interval.start, interval.stop, micro_samples)
    return [Interval(start, min(start + micro_samples, interval.stop)) for start in starts]
