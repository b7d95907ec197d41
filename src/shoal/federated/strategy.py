"""A strategy says how clients train and how a server makes one model of what they send.

The server's half has three parts: `configure` what clients need beside the model, `aggregate` their updates, `evaluate`
what they measured. The client's half is two pure functions. A local step of any strategy here is

    y <- y - lr (grad f_i(y) + pull (y - x) + shift_i)

x is the model of the round; `shift` makes a constant vector from the plan and from what client i keeps between rounds
(SCAFFOLD's and FedDyn's), `finish` the new state. So one trainer serves all, and can train many clients at once.

Models are flat vectors; `vector.py` says which parameter lies where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.config.check import implementation_of
from shoal.federated.config import FederatedConfig

BLOCK_NUMEL = 1 << 17
"""Numbers of a sum that are made at a time."""


Setting = bool | int | float | str


@dataclass(frozen=True)
class RoundPlan:
    """What clients get beside the model. `control` is as long as the model; `settings` are for a user's training.

    `others` [models x numel]: further models, one behind the other; a client trains the one that serves it best.
    """

    pull: float = 0.0
    control: Tensor | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    others: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """What local training did: `delta` = y - x [numel], in `steps` steps of rate `lr` and momentum `momentum`."""

    delta: Tensor
    steps: int
    lr: float
    momentum: float = 0.0


@dataclass(frozen=True)
class Update:
    """What a client sends: `delta` and, for some strategies, `control`, both [numel]; trained from model `version`.

    `contributors`: how many clients it is the mean of, where only their mean is known. `payload`: `delta` as it
    travels. `cluster`: which of the round's models it was trained from. `width`: at which of
    the widths of `federated.widths`; its vectors are as long as that model. `chance`: how likely its client was to take
    part, where that weighs updates.
    """

    client: str
    version: int
    samples: int
    delta: Tensor
    steps: int = 1
    momentum: float = 0.0
    control: Tensor | None = None
    contributors: int = 1
    payload: tuple[Tensor, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    cluster: int = 0
    width: int = 0
    chance: float = 1.0


class Strategy(ABC):
    """`numel`: numbers in the model. What it keeps between rounds is in `kept`, by names, as vectors or numbers."""

    def __init__(self, config: FederatedConfig, numel: int) -> None:
        self.config, self.numel = config, numel
        self.kept: dict[str, Tensor] = {}

    def begin(self, model: Tensor, *, version: int) -> None:  # noqa: B027
        """A round begins from `model` [numel]; called before `configure`, and again after a restart."""

    def configure(self) -> RoundPlan:
        """What the clients of the next round get."""
        return RoundPlan()

    def models(self, model: Tensor) -> list[Tensor]:
        """All models that clients train, of which `model` [numel] is the first."""
        return [model]

    @abstractmethod
    def aggregate(self, model: Tensor, updates: Sequence[Update], *, version: int) -> Tensor:
        """The next model [numel]; `model` stays as it is. There is at least one update, in an order that does not
        depend on when they came. `version` counts the models before this one."""

    def evaluate(self, updates: Sequence[Update]) -> dict[str, float]:
        """Mean of each figure that clients measured, weighted by their samples."""
        names = sorted({name for update in updates for name in update.metrics})
        found = {}
        for name in names:
            having = [update for update in updates if name in update.metrics]
            total = sum(update.samples for update in having)
            found[name] = sum(update.samples * update.metrics[name] for update in having) / max(1, total)
        return found

    def shift(self, plan: RoundPlan, state: Tensor | None) -> Tensor | None:
        """The constant vector of a client's local steps; None: zero. `state`: what the client keeps; None: nothing."""
        return None

    def finish(self, plan: RoundPlan, state: Tensor | None, outcome: Outcome) -> tuple[Tensor | None, Tensor | None]:
        """What the client keeps from now on, and the control that it sends."""
        return None, None

    def weights(self, updates: Sequence[Update]) -> Tensor:
        """The weights of the updates, float64 [updates], which sum to 1."""
        counts = [(update.samples if self.config.by_samples else 1) / update.chance for update in updates]
        return torch.tensor(counts, dtype=torch.float64) / (sum(counts) or 1)

    def mean(self, updates: Sequence[Update]) -> Tensor:
        """The weighted mean of what clients changed."""
        return weighted_sum([update.delta for update in updates], self.weights(updates))


def norms_of(updates: Sequence[Update], config: FederatedConfig) -> list[float]:
    """The norm of each update, where it says how likely its client is to take part again; else none. In float64: the
    squares of finite float32 numbers may be beyond float32."""
    return [float(update.delta.double().norm()) for update in updates] if config.sampling == "importance" else []


def contributors(updates: Sequence[Update]) -> int:
    """How many clients the updates are of."""
    return sum(update.contributors for update in updates)


def weighted_sum(vectors: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum of w_i v_i [numel]: no copy of all, and one order of summation for every number.

    It goes through the vectors side by side, block by block, so that a block of the sum stays in the cache, and every
    vector is read from memory once.
    """
    total, factors = torch.zeros_like(vectors[0]), weights.tolist()
    for into, *blocks in zip(*(vector.split(BLOCK_NUMEL) for vector in (total, *vectors)), strict=True):
        for block, factor in zip(blocks, factors, strict=True):
            into.add_(block, alpha=factor)
    return total


def build_strategy(config: FederatedConfig, numel: int) -> Strategy:
    """The strategy that a table `[federated]` names."""
    return implementation_of(config)(config, numel)
