"""`Task`: what clients train and how, put together from the run file's tables by whoever builds models and data.

`OwnTraining` is a client's training in a user's own words, in place of the run file's local steps, and the user's own
evaluation.

    def train(model, samples, *, round, lr):      # the model of the round, and this client's samples: d[i], len(d)
        ...                                       # any optimizer, any loop; what changed in `model` is the update
        return {"loss": 0.3, "steps": 40}         # figures for the report, or None

    def evaluate(model):                          # at the server, after a round
        return {"accuracy": 0.9}

A strategy whose clients step with corrections (FedProx, SCAFFOLD, FedDyn) needs the run file's steps, and so does
DP-SGD: an own loop would leave them out without a word.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.config import Denominator
from shoal.data.dataset import Dataset
from shoal.data.sampling import SampleSubset
from shoal.errors import ConfigError, UserCodeError
from shoal.federated.config import (
    DeviceConfig,
    FederatedConfig,
    PartitionConfig,
    PrivacyConfig,
    SecureAggregationConfig,
)
from shoal.federated.local_training import LocalTrainer, Replica
from shoal.federated.strategies import Clustered, HeteroFL
from shoal.federated.strategy import Setting, Strategy, build_strategy
from shoal.federated.vector import Upload, VectorLayout, vector_of, write_vector

CORRECTED = ("fedprox", "scaffold", "feddyn")
"""Strategies whose clients add something to each gradient."""


@dataclass(frozen=True)
class OwnTraining:
    """See above; what is None is Shoal's."""

    train: Callable[..., Any] | None = None
    evaluate: Callable[[nn.Module], Any] | None = None
    strategy: Callable[[FederatedConfig, LocalTrainer], Strategy] | None = None

    def require_possible(self, config: FederatedConfig, privacy: PrivacyConfig | None, *, secure: bool) -> None:
        """Raises `ConfigError` for what an own loop would leave out, or an own strategy would not see."""
        if self.strategy is not None:
            self._require_possible_strategy(config, privacy, secure=secure)
        if self.train is None:
            return
        if config.variant in CORRECTED:
            raise ConfigError(
                f'federated.kind = "{config.variant}" corrects each local step, which an own train function does not '
                'know of: leave train out, or use "fedavg", "fedavgm", "fednova", "fedopt" or a robust strategy'
            )
        if config.ditto is not None:
            raise ConfigError(
                "federated.ditto trains a second model by the run file's local steps, which an own train function does "
                "not know of: leave one of them out"
            )
        if privacy is not None and privacy.unit == "sample":
            raise ConfigError(
                'privacy.unit = "sample" makes each local step private, which an own train function does not know of: '
                'leave train out, or set privacy.unit = "client"'
            )

    def _require_possible_strategy(
        self, config: FederatedConfig, privacy: PrivacyConfig | None, *, secure: bool
    ) -> None:
        if config.variant != "fedavg":
            raise ConfigError(f'strategy takes the place of federated.kind = "{config.variant}": leave one of them out')
        if secure or (privacy is not None and privacy.unit == "client"):
            table = "[secure_aggregation]" if secure else 'privacy.unit = "client"'
            raise ConfigError(
                f"{table} with a strategy of one's own: it may need each update, and would get their sum; name one by "
                "federated.kind"
            )

    def measured(self, module: nn.Module, layout: VectorLayout, model: Tensor) -> dict[str, float]:
        """What `evaluate` says of the model [numel]; nothing without it."""
        if self.evaluate is None:
            return {}
        write_vector(module, layout, model)
        module.eval()
        with torch.no_grad():
            return numbers(self.evaluate(module), "evaluate")


@dataclass(frozen=True)
class ClientResult:
    """What one client's training came to: `delta` [numel], its steps, and figures by name."""

    delta: Tensor
    steps: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class OwnTurn:
    """What a user's training is told: of `settings` and `client` (its name) if it has arguments of these names. What it
    draws from PyTorch's generator follows from `seed`."""

    round: int
    lr: float
    seed: int
    client: str
    settings: Mapping[str, Setting]


def train_own(
    train: Callable[..., Any], trainer: LocalTrainer, start: Tensor, samples: SampleSubset, turn: OwnTurn
) -> ClientResult:
    """One client's round from the model `start` [numel]. Raises `UserCodeError` for what `train` must not return."""
    module, layout = trainer.module, trainer.layout
    write_vector(module, layout, start)
    module.train()
    told = {"client": turn.client, "settings": turn.settings}
    wanted = {name: told[name] for name in inspect.signature(train).parameters if name in told}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(turn.seed)
        said = numbers(train(module, samples, round=turn.round, lr=turn.lr, **wanted), "train")
    steps = said.pop("steps", 1.0)
    if not steps.is_integer() or steps < 1:
        raise UserCodeError(f"train returned steps = {steps:g}: it is how many local steps were taken, at least 1")
    return ClientResult(vector_of(module, layout) - start, int(steps), {f"{name}/train": said[name] for name in said})


def numbers(returned: Any, function: str) -> dict[str, float]:
    """What a user's function returned, as numbers by name."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping) or not all(_is_number(value) for value in returned.values()):
        raise UserCodeError(f"{function} returned {returned!r}: return numbers by name, or None")
    endless = next((name for name, value in returned.items() if not math.isfinite(float(value))), None)
    if endless is not None:
        raise UserCodeError(f"{function} returned {endless} = {float(returned[endless])}: what it trained is of no use")
    return {str(name): float(value) for name, value in returned.items()}


def _is_number(value: Any) -> bool:
    tensor = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    return tensor or isinstance(value, int | float | np.integer | np.floating)


@dataclass(frozen=True)
class Corner:
    """A narrower model: all that there is of it, and where its numbers lie in the whole one (int64)."""

    task: Task
    where: Tensor


@dataclass(frozen=True)
class Task:
    """`model` are the first parameters [numel]. `rate` gives the learning rate of a round, from 1; `batch` is the
    samples of a local step, `rounds` how many models are made. `own`: what a user's functions do. `others` [models x
    numel]: what the further models of clusters begin from. `corners`: the narrower models of HeteroFL. `replica`: the
    ranks that train in the place of `trainer`, where they are one client."""

    trainer: LocalTrainer
    model: Tensor
    data: Dataset
    denominator: Denominator
    federated: FederatedConfig
    partition: PartitionConfig
    devices: DeviceConfig
    rate: Callable[[int], float]
    batch: int
    rounds: int
    seed: int
    upload: Upload
    shuffle: bool = True
    privacy: PrivacyConfig | None = None
    secure: SecureAggregationConfig | None = None
    own: OwnTraining = field(default_factory=OwnTraining)
    others: Tensor | None = None
    corners: Sequence[Corner] = ()
    replica: Replica | None = None

    def of_width(self, width: int) -> Task:
        """The task of clients that have the width of this number; 0: the whole model."""
        return self if width == 0 else self.corners[width - 1].task

    def trained_by(self, replica: Replica) -> Task:
        """The task of a client that is a replica, at whichever width."""
        corners = [replace(corner, task=replace(corner.task, replica=replica)) for corner in self.corners]
        return replace(self, replica=replica, corners=corners)

    def at_width(self, model: Tensor, width: int) -> Tensor:
        """What these clients get of a `model` [numel]."""
        return model if width == 0 else model[self.corners[width - 1].where]

    def strategy(self) -> Strategy:
        """A new one, of the user's or as `[federated]` names it."""
        if self.own.strategy is not None:
            return self.own.strategy(self.federated, self.trainer)
        strategy = build_strategy(self.federated, self.model.numel())
        if isinstance(strategy, Clustered):
            assert self.others is not None
            strategy.start(self.others)
        if isinstance(strategy, HeteroFL):
            strategy.corners = [corner.where for corner in self.corners]
        return strategy
