"""The average and what is nearest to it: FedAvg, FedAvgM, FedProx, FedNova.

    D = sum over clients i of p_i (y_i - x)      p_i: the client's part of the samples, or one over their number
    FedAvg, FedProx      x <- x + lr D
    FedAvgM              v <- momentum v + D,   x <- x + lr v
    FedNova              x <- x + lr tau sum of p_i (y_i - x) / a_i,   tau = sum of p_i a_i

a_i is how much the gradients of client i's steps weigh in y_i - x: the number of its steps, or with momentum rho
(K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) for K steps (FedNova, arXiv:2007.07481, section 4). FedProx differs
at clients alone, by the gradient mu (y - x) of its term.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.federated.config import FedAvgMConfig, FedProxConfig
from shoal.federated.strategy import Plan, Strategy, Update, weighted_sum


class FedAvg(Strategy):
    """McMahan et al., arXiv:1602.05629, algorithm 1."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        return model + self.config.server_lr * self.mean(updates)


class FedAvgM(Strategy):
    """Hsu et al., arXiv:1909.06335, section 4.3."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        assert isinstance(self.config, FedAvgMConfig)
        velocity = self.kept.get("velocity")
        mean = self.mean(updates)
        self.kept["velocity"] = mean if velocity is None else self.config.momentum * velocity + mean
        return model + self.config.server_lr * self.kept["velocity"]


class FedProx(FedAvg):
    """Li et al., arXiv:1812.06127, equation 2."""

    def configure(self) -> Plan:
        assert isinstance(self.config, FedProxConfig)
        return Plan(pull=self.config.mu)


class FedNova(Strategy):
    """Wang et al., arXiv:2007.07481, equation 6."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        weights = self.weights(updates)
        lengths = torch.tensor([accumulated(u.steps, u.momentum) for u in updates], dtype=torch.float64)
        effective = float((weights * lengths).sum())
        direction = weighted_sum([update.delta for update in updates], weights / lengths)
        return model + self.config.server_lr * effective * direction


def accumulated(steps: int, momentum: float) -> float:
    """a_i: the weight of all gradients of a client's steps together, in units of its learning rate."""
    if momentum == 0.0:
        return float(max(1, steps))
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
