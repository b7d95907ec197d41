"""Against client drift: SCAFFOLD and FedDyn. Where data differ, local steps lead each client to its own optimum.

SCAFFOLD (arXiv:1910.06378, algorithm 1, option II): each client keeps c_i, an estimate of its gradient, the server
their mean c. K local steps of rate lr go along grad f_i - c_i + c, and then

    c_i' = c_i - c + (x - y) / (K lr),   c <- c + (|S| / N) mean of (c_i' - c_i),   x <- x + lr_g mean of (y - x)

FedDyn (arXiv:2111.04263, algorithm 1): each client keeps h_i, its gradient at its newest copy, and minimises
f_i(y) - <h_i, y> + alpha/2 |y - x|^2; then h_i <- h_i - alpha (y - x), and at the server

    h <- h - alpha (1 / N) sum of (y - x),   x <- mean of y - h / alpha
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.federated.config import FedDynConfig
from shoal.federated.strategy import Outcome, Plan, Strategy, Update, contributors, weighted_sum


class Scaffold(Strategy):
    """`kept["control"]` is c. With weights by samples, c is the weighted mean, as f is."""

    def configure(self) -> Plan:
        return Plan(control=self.kept.get("control", torch.zeros(self.numel)))

    def shift(self, plan: Plan, state: Tensor | None) -> Tensor | None:
        return plan.control if state is None or plan.control is None else plan.control - state

    def finish(self, plan: Plan, state: Tensor | None, outcome: Outcome) -> tuple[Tensor | None, Tensor | None]:
        assert plan.control is not None
        before = torch.zeros_like(outcome.delta) if state is None else state
        after = before - plan.control - outcome.delta / (outcome.steps * outcome.lr)
        return after, after - before

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        changes = [update.control for update in updates if update.control is not None]
        mean = weighted_sum(changes, self.weights(updates))
        control = self.kept.get("control", torch.zeros(self.numel, dtype=model.dtype))
        self.kept["control"] = control + len(updates) / self.config.clients * mean
        return model + self.config.server_lr * self.mean(updates)


class FedDyn(Strategy):
    """`kept["h"]` is h."""

    def configure(self) -> Plan:
        assert isinstance(self.config, FedDynConfig)
        return Plan(pull=self.config.alpha)

    def shift(self, plan: Plan, state: Tensor | None) -> Tensor | None:
        return None if state is None else -state

    def finish(self, plan: Plan, state: Tensor | None, outcome: Outcome) -> tuple[Tensor | None, Tensor | None]:
        before = torch.zeros_like(outcome.delta) if state is None else state
        return before - plan.pull * outcome.delta, None

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        assert isinstance(self.config, FedDynConfig)
        mean = self.mean(updates)
        h = self.kept.get("h", torch.zeros(self.numel, dtype=model.dtype))
        self.kept["h"] = h - self.config.alpha * contributors(updates) / self.config.clients * mean
        return model + self.config.server_lr * (mean - self.kept["h"] / self.config.alpha)
