"""FedOpt: the mean change is minus the gradient of an adaptive optimizer at the server.

    m <- beta1 m + (1 - beta1) D
    adagrad   v <- v + D^2
    yogi      v <- v - (1 - beta2) D^2 sign(v - D^2)
    adam      v <- beta2 v + (1 - beta2) D^2
    x <- x + lr m / (sqrt(v) + tau)

(Reddi et al., arXiv:2003.00295, algorithm 2.) As there, v begins at tau^2 and nothing is corrected for bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.federated.config import FedOptConfig
from shoal.federated.strategy import Strategy, Update


class FedOpt(Strategy):
    """`kept["m"]` and `kept["v"]` are its moments."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        config = self.config
        assert isinstance(config, FedOptConfig)
        mean = self.mean(updates)
        m = self.kept.get("m", torch.zeros_like(mean))
        v = self.kept.get("v", torch.full_like(mean, config.adaptivity**2))
        self.kept["m"] = config.beta1 * m + (1 - config.beta1) * mean
        self.kept["v"] = _second_moment(config, v, mean.square())
        return model + config.server_lr * self.kept["m"] / (self.kept["v"].sqrt() + config.adaptivity)


def _second_moment(config: FedOptConfig, v: Tensor, square: Tensor) -> Tensor:
    if config.rule == "adagrad":
        return v + square
    if config.rule == "yogi":
        return v - (1 - config.beta2) * square * torch.sign(v - square)
    return config.beta2 * v + (1 - config.beta2) * square
