"""The samples of a client's local steps.

A client takes its samples in an `Order` of its own and goes on where its last round ended, so that with one client, all
data and one local step a round is a step of `shoal train`. The batches of several clients lie side by side: every
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
from shoal.data.order import Order
from shoal.data.sample import Batch, Source, Tree, map_tree
from shoal.federated.config import FederatedConfig


@dataclass(frozen=True)
class CohortBatch:
    """One local step of several clients. `weights` are 0 where a client has fewer samples, or no step left."""

    inputs: Tree
    targets: Tree
    weights: Tensor
    active: Tensor


class ClientData:
    """The samples `ids` (int64) of a source, as one client's. `name` seeds its order; `begins` counts rounds."""

    def __init__(self, ids: np.ndarray, *, seed: int, shuffle: bool = True) -> None:
        self.ids, self.order = ids, Order(len(ids), seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self.ids)

    def steps(self, config: FederatedConfig, batch: int) -> int:
        """Local steps of a round."""
        return config.local_steps or -(-config.local_epochs * len(self) // batch)

    def samples_of_step(self, config: FederatedConfig, batch: int, *, turn: int, step: int) -> np.ndarray:
        """Sample ids of local step `step` of the client's round `turn`, both from 0; at most `batch` of them.

        Rounds of steps follow on each other through the client's epochs; a round of epochs has a short last step.
        """
        if config.local_steps is not None:
            first = (turn * config.local_steps + step) * batch
            last = first + batch
        else:
            whole = config.local_epochs * len(self)
            first = turn * whole + step * batch
            last = min(first + batch, (turn + 1) * whole)
        return self.ids[self.order.ids(np.arange(first, max(first, last), dtype=np.int64))]


def cohort_batch(source: Source, rows: Sequence[np.ndarray], *, batch: int, denominator: Denominator) -> CohortBatch:
    """The samples `rows` of each client side by side; a row with fewer than `batch` is filled up with weight 0."""
    lengths = [len(row) for row in rows]
    stand_in = next(int(row[0]) for row in rows if len(row))
    filled = [np.concatenate([row, np.full(batch - len(row), row[0] if len(row) else stand_in)]) for row in rows]
    read = read_batch(source, np.concatenate(filled), np.arange(batch * len(rows)), denominator=denominator).batch
    inputs, targets, weights = side_by_side(read, len(rows))
    for row, length in enumerate(lengths):
        weights[row, length:] = 0
    return CohortBatch(inputs, targets, weights, torch.tensor([length > 0 for length in lengths]))


def side_by_side(batch: Batch, clients: int) -> tuple[Tree, Tree, Tensor]:
    """Inputs, targets and weights [clients, samples, ...] of a batch [clients x samples, ...]."""

    def cut(leaf: Tensor) -> Tensor:
        return leaf.reshape(clients, -1, *leaf.shape[1:])

    return map_tree(cut, batch.inputs), map_tree(cut, batch.targets), cut(batch.weights).clone()
