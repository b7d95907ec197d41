"""The samples of one client, in an order of its own: an epoch takes them by random keys, and a round goes on where the
one before it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from shoal.federated.config import FederatedConfig
from shoal.maths.counter import bits, key_of, uniform


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
        if self._kept is None or self._kept[:2] != self.span(config, batch, turn):
            order_rounds([self], config, batch, turns=[turn])
        assert self._kept is not None
        return self._kept[2][step * batch : (step + 1) * batch]

    def span(self, config: FederatedConfig, batch: int, turn: int) -> tuple[int, int]:
        """The client's positions of a round: from the first up to the last, over all its epochs."""
        whole = config.local_epochs * len(self) if config.local_steps is None else config.local_steps * batch
        return turn * whole, (turn + 1) * whole

    def keep(self, first: int, last: int, ids: np.ndarray) -> None:
        """The sample ids at these positions, until others are kept."""
        self._kept = first, last, ids

    @cached_property
    def order_key(self) -> int:
        """The key of the random order."""
        return key_of(self.seed, "order")


def order_rounds(clients: Sequence[ClientData], config: FederatedConfig, batch: int, *, turns: Sequence[int]) -> None:
    """Orders the samples of a round of each client, which takes them in the order of a random key of each position of
    an epoch; the epochs of all clients with as many samples are drawn and sorted at once."""
    by_size: dict[int, list[tuple[ClientData, int]]] = {}
    for client, turn in zip(clients, turns, strict=True):
        by_size.setdefault(len(client), []).append((client, turn))
    for size, some in by_size.items():
        spans = [client.span(config, batch, turn) for client, turn in some]
        epochs = [(first // size, -(-last // size)) for first, last in spans]
        rows = np.concatenate([np.arange(*pair) for pair in epochs])  # the epochs of one client after another's
        counts = [after - before for before, after in epochs]
        owners = np.repeat(np.arange(len(some)), counts)
        ids = np.stack([client.ids for client, _ in some])
        if all(client.shuffle for client, _ in some):
            keys = torch.tensor([client.order_key for client, _ in some])[torch.from_numpy(owners)]
            drawn = bits(keys[:, None], torch.from_numpy(rows[:, None] * size + np.arange(size)))
            taken = np.take_along_axis(ids[owners], drawn.numpy().argsort(1), 1)
        else:
            taken = ids[owners]
        edges = np.cumsum([0, *counts[:-1]])
        for (client, _), (first, last), edge in zip(some, spans, edges.tolist(), strict=True):
            start = edge * size + first % size
            client.keep(first, last, taken.reshape(-1)[start : start + last - first])


def steps_of(config: FederatedConfig, samples: int, batch: int) -> int:
    """Local steps of a round of a client with so many samples."""
    return config.local_steps or -(-config.local_epochs * samples // batch)
