"""How replicas agree, as one process plays it: the equations of the papers on whole vectors, in float64.

`shoal verify` compares a strategy of `[sync]` with these. Replica i is one vector `x[i]` of all trained numbers.
Nothing here is packed, sent, split or overlapped, and nothing is shared with `shoal.sync`, not even mixing matrices.

What follows from time has no rule here: `refusals` says so in a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.sync.config import (
    EASGDConfig,
    GossipConfig,
    LocalConfig,
    OuterKeys,
    ServerConfig,
    StreamingConfig,
    SyncConfig,
)

Vectors = list[Tensor]
"""For each replica all numbers of its model, float64 `[numbers]`."""

Edges = list[set[int]]
"""For each replica those that it sends to."""


class Stepped(NamedTuple):
    """Step `step`, after every replica's own update: the vectors `x`, the weight of each one's samples, its loss, and
    the learning rate. `last`: of the run.
    """

    step: int
    x: Vectors
    weights: Sequence[float]
    losses: Sequence[float]
    lr: float
    last: bool


class RuleOutcome(NamedTuple):
    """What each replica goes on from, and what its parameters are until then. `together`: all have met."""

    own: Vectors
    shown: Vectors
    together: bool


class Rule(Protocol):
    """One strategy. `equation` is what it plays; `updates_together`: one update, of the mean of all gradients."""

    equation: str
    updates_together: bool

    def agree(self, stepped: Stepped) -> RuleOutcome:
        """What follows a step of all replicas. Steps come in order, from 1."""
        ...


class Setting(NamedTuple):
    """What a rule begins with: the vector of all replicas, their number, and for each fragment the numbers in it."""

    start: Tensor
    replicas: int
    fragments: Sequence[Tensor] = ()


class OuterMomentum:
    """The outer optimizer along g, of one vector: DiLoCo's and SlowMo's (arXiv:2311.08105, arXiv:1910.00643)."""

    def __init__(self, config: OuterKeys, like: Tensor) -> None:
        self._config, self._m = config, torch.zeros_like(like)

    def step(self, x: Tensor, g: Tensor, *, unit: float = 1.0) -> Tensor:
        """The new x. `unit`: SlowMo's gamma."""
        lr, mu, config = self._config.outer_lr, self._config.outer_momentum, self._config
        self._m = mu * self._m + g / unit
        return x - lr * (g + unit * mu * self._m if config.nesterov and mu else unit * self._m)


def outer_equation(config: OuterKeys) -> str:
    """For people."""
    lr, mu = config.outer_lr, config.outer_momentum
    if not mu:
        return f"x <- x - {lr:g} g"
    return f"m <- {mu:g} m + g, x <- x - {lr:g} " + (f"(g + {mu:g} m)" if config.nesterov else "m")


def adaptive_sum(changes: Sequence[Tensor]) -> Tensor:
    """Adasum of one parameter's changes (arXiv:2006.02924, equations 3 and 4), pair by pair from the outside in."""
    if len(changes) == 1:
        return changes[0]
    one, other = adaptive_sum(changes[: len(changes) // 2]), adaptive_sum(changes[len(changes) // 2 :])
    parts = [x * (1 - (one @ other) / (2 * (x @ x))) if x @ x > 0 else x for x in (one, other)]
    return parts[0] + parts[1]


class Local:
    """g = mean of x - x_i over the replicas, by the weight of their samples, or their adaptive sum, then the outer
    step.
    """

    updates_together = False

    def __init__(self, config: LocalConfig, setting: Setting) -> None:
        unit = ", both in units of the learning rate" if config.per_lr else ""
        merge = "mean" if config.merge == "mean" else "Adasum"
        self.equation = f"every {config.period} steps g = {merge}(x - x_i), {outer_equation(config)}{unit}"
        self._parameters = setting.fragments
        self._config, self._x, self._outer = config, setting.start, OuterMomentum(config, setting.start)
        self._period, self._agreed, self._adapted = config.period, 0, 0
        self._first: tuple[float, float] | None = None
        self._round: list[Stepped] = []

    def agree(self, stepped: Stepped) -> RuleOutcome:
        self._round.append(stepped)
        warming_up = stepped.step <= self._config.warmup_steps
        adapts = bool(self._config.adapt_every)
        over = stepped.step - self._agreed >= self._period if adapts else stepped.step % self._period == 0
        if not (over or warming_up or stepped.last):
            return RuleOutcome(stepped.x, stepped.x, together=False)
        g = self._merged(stepped.x)
        rates = [one.lr for one in self._round]
        unit = sum(rates) / len(rates) if self._config.per_lr and sum(rates) > 0 else 1.0
        self._x = self._x - g if warming_up else self._outer.step(self._x, g, unit=unit)
        if adapts:
            self._adapt(stepped)
        self._agreed, self._round = stepped.step, []
        everyone = [self._x] * len(stepped.x)
        return RuleOutcome(everyone, everyone, together=True)

    def _merged(self, vectors: Vectors) -> Tensor:
        changes = [self._x - x for x in vectors]
        if self._config.merge == "mean":
            weights = [sum(own) for own in zip(*(one.weights for one in self._round), strict=True)]
            return sum((w * change for w, change in zip(weights, changes, strict=True)), 0 * self._x) / sum(weights)
        g = torch.zeros_like(self._x)
        for chosen in self._parameters:
            g[chosen] = adaptive_sum([change[chosen] for change in changes])
        return g

    def _adapt(self, stepped: Stepped) -> None:
        """AdaComm, arXiv:1810.08313, equations 17 and 18."""
        losses = [sum(one.losses) / len(one.losses) for one in self._round]
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss) or loss <= 0 or stepped.lr <= 0:
            return
        self._first = self._first or (loss, stepped.lr)
        if stepped.step - self._adapted < self._config.adapt_every:
            return
        self._adapted, (first_loss, first_lr) = stepped.step, self._first
        wanted = math.ceil(math.sqrt(first_lr * loss / (stepped.lr * first_loss)) * self._config.period)
        self._period = wanted if wanted < self._period else max(1, self._period // 2)


class Streaming:
    """Streaming DiLoCo (arXiv:2501.18512, algorithm 2): fragment p of P is sent `delay` steps before (p + 1) H / P."""

    updates_together = False

    def __init__(self, config: StreamingConfig, setting: Setting) -> None:
        self.equation = (
            f"in turn for each of {config.fragments} fragments g = mean(x - x_i), {outer_equation(config)}, and "
            f"{config.delay} steps later x_i <- {config.mixing:g} x_i + {1 - config.mixing:g} x"
        )
        self._config, self._x = config, setting.start.clone()
        self._fragments = setting.fragments
        self._outer = [OuterMomentum(config, setting.start[where]) for where in setting.fragments]
        self._g: dict[int, Tensor] = {}

    def agree(self, stepped: Stepped) -> RuleOutcome:
        config, x = self._config, [own.clone() for own in stepped.x]
        place = (stepped.step - 1) % config.period + 1
        for p, where in enumerate(self._fragments):
            due = (p + 1) * (config.period // config.fragments)
            if place == due - config.delay:
                self._g[p] = sum((self._x[where] - own[where] for own in x), 0 * self._x[where]) / len(x)
            if p in self._g and (place == due or stepped.last):
                self._x[where] = self._outer[p].step(self._x[where], self._g.pop(p))
                for own in x:
                    own[where] = config.mixing * own[where] + (1 - config.mixing) * self._x[where]
        if stepped.last:
            return RuleOutcome(x, [sum(x, 0 * self._x) / len(x)] * len(x), together=True)
        if place == config.period:
            return RuleOutcome(x, [self._x.clone()] * len(x), together=True)
        return RuleOutcome(x, x, together=False)


class Elastic:
    """EASGD (arXiv:1412.6651, equations 5 and 6): x_i <- x_i - alpha (x_i - c), c <- c + sum of alpha (x_i - c)."""

    updates_together = False

    def __init__(self, config: EASGDConfig, setting: Setting) -> None:
        self._config, self._c, self._alpha = config, setting.start, config.beta / setting.replicas
        self.equation = (
            f"every {config.period} steps x_i <- x_i - {self._alpha:g} (x_i - c), c <- c + {self._alpha:g} sum(x_i - c)"
        )

    def agree(self, stepped: Stepped) -> RuleOutcome:
        if stepped.step % self._config.period and not stepped.last:
            return RuleOutcome(stepped.x, stepped.x, together=False)
        pulls = [self._alpha * (x - self._c) for x in stepped.x]
        self._c = self._c + sum(pulls, 0 * self._c)
        own = [x - pull for x, pull in zip(stepped.x, pulls, strict=True)]
        return RuleOutcome(own, [self._c] * len(own), together=True)


class Gossip:
    """x_i <- sum over j of W[i][j] x_j (arXiv:1705.09056); push-sum also weighs: z_i = x_i / w_i (arXiv:1811.10792)."""

    updates_together = False

    def __init__(self, config: GossipConfig, setting: Setting) -> None:
        self.equation = "x_i <- sum over j of W[i][j] x_j" + (
            ", w_i <- sum over j of W[i][j] w_j, z_i = x_i / w_i" if config.algorithm == "sgp" else ""
        )
        self.equation += f' on the graph "{config.graph}"'
        self._config, self._matrices = config, mixing_of(config, setting.replicas)
        self._x = self._z = [setting.start] * setting.replicas
        self._w = [1.0] * setting.replicas
        self._sent: list[tuple[Tensor, Vectors, list[float]]] = []

    def agree(self, stepped: Stepped) -> RuleOutcome:
        config, everyone = self._config, range(len(stepped.x))
        matrix = self._matrices[(stepped.step - 1) % len(self._matrices)]
        x = [self._x[i] + (stepped.x[i] - self._z[i]) for i in everyone]  # the update, of z, is made to x
        self._sent.append((matrix, x, self._w))
        self._x = [matrix[i, i] * x[i] for i in everyone]
        self._w = [float(matrix[i, i]) * self._w[i] for i in everyone]
        together = stepped.last or stepped.step % config.meet_every == 0
        while len(self._sent) > (0 if together else config.delay):
            sent_by, x, w = self._sent.pop(0)
            for i in everyone:
                for j in everyone:
                    if j != i:
                        self._x[i] = self._x[i] + sent_by[i, j] * x[j]
                        self._w[i] += float(sent_by[i, j]) * w[j]
        push_sum = config.algorithm == "sgp"
        self._z = [x / w for x, w in zip(self._x, self._w, strict=True)] if push_sum else list(self._x)
        average = sum(self._x, 0 * self._x[0]) / (sum(self._w) if push_sum else len(self._x))
        return RuleOutcome(self._z, [average] * len(self._z) if together else self._z, together)


class Served:
    """Every worker's gradient, clipped by its own norm, in one update: of their mean by the weight of their samples."""

    updates_together = True
    equation = "one update with g = sum(w_i g_i) / sum(w_i) of all workers"

    def __init__(self, config: ServerConfig, setting: Setting) -> None:
        self._period = config.steps_between

    def agree(self, stepped: Stepped) -> RuleOutcome:
        return RuleOutcome(stepped.x, stepped.x, together=stepped.last or stepped.step % self._period == 0)


def mixing_of(config: GossipConfig, replicas: int) -> list[Tensor]:
    """The matrices W of the graph, float64 `[replicas, replicas]`, one a step in turn."""
    n = replicas
    if config.graph == "weights":
        return [torch.tensor(config.weights, dtype=torch.float64)]
    if config.graph == "exponential":
        jumps = [2**k for k in range(max(1, math.ceil(math.log2(n))))]
        return [(torch.eye(n) + torch.roll(torch.eye(n), jump % n, 0)).double() / 2 for jump in jumps]
    edges = _edges(config, n)
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for j in range(n):
        for i in edges[j]:
            degree = len(edges[j]) if config.algorithm == "sgp" else max(len(edges[i]), len(edges[j]))
            matrix[i, j] = 1 / (1 + degree)
        matrix[j, j] = 1 - matrix[:, j].sum()
    return [matrix]


def _edges(config: GossipConfig, n: int) -> Edges:
    if config.graph == "neighbours":
        return [set(row) for row in config.neighbours]
    rows = 1 if config.graph == "ring" else max(r for r in range(1, isqrt(n) + 1) if n % r == 0)
    columns = n // rows
    edges: Edges = [set() for _ in range(n)]
    for r in range(rows):
        for c in range(columns):
            around = [(r, c + 1), (r, c - 1), (r + 1, c), (r - 1, c)]
            edges[r * columns + c] = {(i % rows) * columns + j % columns for i, j in around} - {r * columns + c}
    return edges


def fragments_of(sizes: Mapping[str, int], number: int) -> dict[str, int]:
    """The fragment of each tensor: the largest first, each to the smallest fragment."""
    totals, found = [0] * number, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        found[name] = totals.index(min(totals))
        totals[found[name]] += sizes[name]
    return found


def _local_steps(config: LocalConfig, replicas: int) -> int:
    return config.warmup_steps + max(2 * config.period, config.adapt_every + config.period)


class _Played(NamedTuple):
    rule: Callable[[Any, Setting], Rule]
    steps: Callable[[Any, int], int]


_PLAYED: Mapping[type, _Played] = {
    LocalConfig: _Played(Local, _local_steps),
    StreamingConfig: _Played(Streaming, lambda config, _: 2 * config.period),
    EASGDConfig: _Played(Elastic, lambda config, _: 2 * config.period),
    GossipConfig: _Played(Gossip, lambda config, replicas: 2 * len(mixing_of(config, replicas))),
    ServerConfig: _Played(Served, lambda config, _: 0),
}
"""For each kind its rule, and the steps that show all of it."""


def rule_of(config: SyncConfig, setting: Setting) -> Rule:
    """The rule that one process plays."""
    return _PLAYED[type(config)].rule(config, setting)


def telling_steps(config: SyncConfig, replicas: int) -> int:
    """Steps after which every part of the rule was played twice, and one more."""
    return _PLAYED[type(config)].steps(config, replicas) + 1
