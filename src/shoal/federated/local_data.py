"""The samples of a client's local steps.

In each epoch a client takes its samples in the order of random keys, one for each sample, and a round goes on where the
one before it ended. The batches of several clients lie side by side: every
tensor of a `CohortBatch` begins with the dims [clients, samples].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.data.batches import read_batch
from shoal.data.config import Denominator
from shoal.data.sample import Batch, Source, Tree, map_tree
from shoal.federated.config import FederatedConfig
from shoal.maths.counter import bits, key_of, uniform


@dataclass(frozen=True)
class CohortBatch:
    """One local step of several clients. `weights` are 0 where a client has fewer samples, or no step left."""

    inputs: Tree
    targets: Tree
    weights: Tensor
    active: Tensor


class ClientData:
    """The samples `ids` (int64) of a source, as one client's. Its order follows from `seed`.

    `each_by_chance`: a step takes each sample by itself, with chance batch / samples, as DP-SGD asks; a step may then
    have more samples than `batch`, or none.
    """

    def __init__(self, ids: np.ndarray, *, seed: int, shuffle: bool = True, each_by_chance: bool = False) -> None:
        self.ids, self.seed, self.shuffle, self.each_by_chance = ids, seed, shuffle, each_by_chance
        self._kept: tuple[int, int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def steps(self, config: FederatedConfig, batch: int) -> int:
        """Local steps of a round."""
        return steps_of(config, len(self), batch)

    def samples_of_step(self, config: FederatedConfig, batch: int, *, turn: int, step: int) -> np.ndarray:
        """Sample ids of local step `step` of the client's round `turn`, both from 0; at most `batch` of them.

        Rounds of steps follow on each other through the client's epochs; a round of epochs has a short last step.
        """
        if self.each_by_chance:
            places = torch.arange(len(self), dtype=torch.int64)
            drawn = uniform(key_of(self.seed, "batch", turn, step), places, dtype=torch.float64)
            return self.ids[(drawn < batch / len(self)).numpy()]
        whole = config.local_epochs * len(self) if config.local_steps is None else config.local_steps * batch
        return self._round(turn * whole, (turn + 1) * whole)[step * batch : (step + 1) * batch]

    def _round(self, first: int, last: int) -> np.ndarray:
        """The sample ids at the client's positions from `first` up to `last`; those of the newest round are kept."""
        if self._kept is None or self._kept[:2] != (first, last):
            epoch, start = divmod(first, len(self))
            epochs = -(-last // len(self)) - epoch
            self._kept = first, last, self._epochs(epoch, epochs)[start : start + last - first]
        return self._kept[2]

    def _epochs(self, first: int, count: int) -> np.ndarray:
        """The samples of `count` epochs, one behind the other."""
        if not self.shuffle:
            return np.tile(self.ids, count)
        counters = torch.arange(first * len(self), (first + count) * len(self), dtype=torch.int64)
        keys = bits(key_of(self.seed, "order"), counters).view(count, len(self))
        return self.ids[keys.argsort(1).numpy()].reshape(-1)


def steps_of(config: FederatedConfig, samples: int, batch: int) -> int:
    """Local steps of a round of a client with so many samples."""
    return config.local_steps or -(-config.local_epochs * samples // batch)


def cohort_batch(
    source: Source, rows: Sequence[np.ndarray], *, batch: int, denominator: Denominator, active: Sequence[bool]
) -> CohortBatch:
    """The samples `rows` of each client side by side; a row with fewer than `batch` is filled up with weight 0."""
    lengths = [len(row) for row in rows]
    stand_in = next((int(row[0]) for row in rows if len(row)), 0)
    filled = [row if len(row) == batch else _filled(row, batch, stand_in) for row in rows]
    read = read_batch(source, np.concatenate(filled), np.arange(batch * len(rows)), denominator=denominator).batch
    inputs, targets, weights = side_by_side(read, len(rows))
    for row, length in enumerate(lengths):
        if length < batch:
            weights[row, length:] = 0
    return CohortBatch(inputs, targets, weights, torch.tensor(active))


def _filled(row: np.ndarray, batch: int, stand_in: int) -> np.ndarray:
    """A row of `batch` sample ids; those that are made up weigh nothing."""
    return np.concatenate([row, np.full(batch - len(row), row[0] if len(row) else stand_in)])


def side_by_side(batch: Batch, clients: int) -> tuple[Tree, Tree, Tensor]:
    """Inputs, targets and weights [clients, samples, ...] of a batch [clients x samples, ...]."""

    def cut(leaf: Tensor) -> Tensor:
        return leaf.reshape(clients, -1, *leaf.shape[1:])

    return map_tree(cut, batch.inputs), map_tree(cut, batch.targets), cut(batch.weights).clone()
