"""FedBuff: asynchronous training with a buffer (Nguyen et al., arXiv:2106.06639, algorithm 1).

    x <- x + lr (1 / K) sum over the K updates in the buffer of d_i / sqrt(1 + tau_i)

tau_i, the staleness, is how many steps the server took since client i fetched its model. An update staler than
`stalest` does not go into the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.federated.config import FedBuffConfig
from shoal.federated.strategy import Strategy, Update, weighted_sum


class FedBuff(Strategy):
    """Takes a full buffer at a time."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        factors = [staleness_factor(version - update.version) for update in updates]
        weights = torch.tensor(factors, dtype=torch.float64) / len(updates)
        return model + self.config.server_lr * weighted_sum([update.delta for update in updates], weights)

    def takes(self, update: Update, *, version: int) -> bool:
        """Whether the update may go into the buffer."""
        assert isinstance(self.config, FedBuffConfig)
        return version - update.version <= self.config.stalest


def staleness_factor(staleness: int) -> float:
    """1 / sqrt(1 + tau)."""
    return 1 / math.sqrt(1 + staleness)
