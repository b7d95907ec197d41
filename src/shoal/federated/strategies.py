"""Strategies that average: plainly, with the server's momentum or optimizer, against client drift, without rounds.

    D = sum over clients i of p_i (y_i - x)      p_i: the client's part of the samples, or one over their number
    FedAvg, FedProx      x <- x + lr D
    FedAvgM              v <- momentum v + D,   x <- x + lr v
    FedNova              x <- x + lr tau sum of p_i (y_i - x) / a_i,   tau = sum of p_i a_i

a_i is how much the gradients of client i's steps weigh in y_i - x: the number of its steps, or with momentum rho
(K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) for K steps (FedNova, arXiv:2007.07481, section 4). FedProx differs
at clients alone, by the gradient mu (y - x) of its term.

FedOpt: D is minus the gradient of an adaptive optimizer (Reddi et al., arXiv:2003.00295, algorithm 2). As there, v
begins at tau^2 and nothing is corrected for bias.

    m <- beta1 m + (1 - beta1) D
    adagrad   v <- v + D^2
    yogi      v <- v - (1 - beta2) D^2 sign(v - D^2)
    adam      v <- beta2 v + (1 - beta2) D^2
    x <- x + lr m / (sqrt(v) + tau)

SCAFFOLD (arXiv:1910.06378, algorithm 1, option II): each client keeps c_i, an estimate of its gradient, the server
their mean c. K local steps of rate lr go along grad f_i - c_i + c, and then

    c_i' = c_i - c + (x - y) / (K lr),   c <- c + (|S| / N) mean of (c_i' - c_i),   x <- x + lr_g mean of (y - x)

FedDyn (arXiv:2111.04263, algorithm 1): each client keeps h_i, its gradient at its newest copy, and minimises
f_i(y) - <h_i, y> + alpha/2 |y - x|^2; then h_i <- h_i - alpha (y - x), and at the server

    h <- h - alpha (1 / N) sum of (y - x),   x <- mean of y - h / alpha

Clustered (IFCA, Ghosh et al., arXiv:2006.04088, algorithm 1, model averaging): there are k models, and S_j are the
clients whose samples have the lowest loss under model j. They train it alone; a model that nobody trains stays.

    x_j <- x_j + lr sum over clients i of S_j of p_i (y_i - x_j)      p_i: of the samples of S_j

HeteroFL (Diao et al., arXiv:2010.01264, section 3): client i trains a corner of each parameter, as wide as it can.
Every number of the model is averaged over the clients that have it; one that none of them has stays.

    x_c <- x_c + lr sum over clients i with c of p_i (y_i - x)_c / sum over the same of p_i

FedBuff (Nguyen et al., arXiv:2106.06639, algorithm 1) has a buffer in the place of rounds. tau_i, the staleness, is how
many steps the server took since client i fetched its model; an update staler than `stalest` is left out.

    x <- x + lr (1 / K) sum over the K updates in the buffer of d_i / sqrt(1 + tau_i)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.federated.config import (
    ClusteredConfig,
    FedAvgMConfig,
    FedBuffConfig,
    FedDynConfig,
    FedOptConfig,
    FedProxConfig,
    HeteroFLConfig,
)
from shoal.federated.strategy import Outcome, RoundPlan, Strategy, Update, contributors, weighted_sum


class FedAvg(Strategy):
    """McMahan et al., arXiv:1602.05629, algorithm 1."""

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        return self.mean(updates).mul_(self.config.server_lr).add_(model)


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

    def configure(self) -> RoundPlan:
        assert isinstance(self.config, FedProxConfig)
        return RoundPlan(pull=self.config.mu)


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


class Scaffold(Strategy):
    """`kept["control"]` is c. With weights by samples, c is the weighted mean, as f is."""

    def configure(self) -> RoundPlan:
        return RoundPlan(control=self.kept.get("control", torch.zeros(self.numel)))

    def shift(self, plan: RoundPlan, state: Tensor | None) -> Tensor | None:
        return plan.control if state is None or plan.control is None else plan.control - state

    def finish(self, plan: RoundPlan, state: Tensor | None, outcome: Outcome) -> tuple[Tensor | None, Tensor | None]:
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

    def configure(self) -> RoundPlan:
        assert isinstance(self.config, FedDynConfig)
        return RoundPlan(pull=self.config.alpha)

    def shift(self, plan: RoundPlan, state: Tensor | None) -> Tensor | None:
        return None if state is None else -state

    def finish(self, plan: RoundPlan, state: Tensor | None, outcome: Outcome) -> tuple[Tensor | None, Tensor | None]:
        before = torch.zeros_like(outcome.delta) if state is None else state
        return before - plan.pull * outcome.delta, None

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        assert isinstance(self.config, FedDynConfig)
        mean = self.mean(updates)
        h = self.kept.get("h", torch.zeros(self.numel, dtype=model.dtype))
        self.kept["h"] = h - self.config.alpha * contributors(updates) / self.config.clients * mean
        return model + self.config.server_lr * (mean - self.kept["h"] / self.config.alpha)


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


class Clustered(Strategy):
    """See above. The first model is the server's, the others [(k - 1) x numel] are kept here."""

    def start(self, others: Tensor) -> None:
        """Takes the models that the others begin from."""
        assert isinstance(self.config, ClusteredConfig)
        assert others.numel() == (self.config.clusters - 1) * self.numel
        self.kept["others"] = others.clone()

    def configure(self) -> RoundPlan:
        return RoundPlan(others=self.kept["others"])

    def models(self, model: Tensor) -> list[Tensor]:
        return [model, *self.kept["others"].view(-1, self.numel)]

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        made = []
        for cluster, one in enumerate(self.models(model)):
            its = [update for update in updates if update.cluster == cluster]
            made.append(self.mean(its).mul_(self.config.server_lr).add_(one) if its else one)
        self.kept["others"] = torch.cat(made[1:])
        return made[0]

    def evaluate(self, updates: Sequence[Update]) -> dict[str, float]:
        assert isinstance(self.config, ClusteredConfig)
        sizes = {f"clients/cluster {j + 1}": 0.0 for j in range(self.config.clusters)}
        for update in updates:
            sizes[f"clients/cluster {update.cluster + 1}"] += 1
        return super().evaluate(updates) | sizes


class HeteroFL(Strategy):
    """See above. `corners`: where the numbers of each narrower model lie in the whole one (int64)."""

    corners: Sequence[Tensor] = ()

    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        total, weight = torch.zeros_like(model), torch.zeros_like(model)
        for update, part in zip(updates, self.weights(updates).tolist(), strict=True):
            where = slice(None) if update.width == 0 else self.corners[update.width - 1]
            total[where] += part * update.delta
            weight[where] += part
        return model + self.config.server_lr * torch.where(weight > 0, total / weight, 0.0)

    def evaluate(self, updates: Sequence[Update]) -> dict[str, float]:
        assert isinstance(self.config, HeteroFLConfig)
        trained = Counter(update.width for update in updates)
        counts = {f"clients/width {width:g}": float(trained[i]) for i, width in enumerate(self.config.widths)}
        return super().evaluate(updates) | counts
