"""A client's training in a user's own words, in place of the run file's local steps, and the user's own evaluation.

    def train(model, samples, *, round, lr):      # the model of the round, and this client's samples: d[i], len(d)
        ...                                       # any optimizer, any loop; what changed in `model` is the update
        return {"loss": 0.3, "steps": 40}         # figures for the report, or None

    def evaluate(model):                          # at the server, after a round
        return {"accuracy": 0.9}

A strategy whose clients step with corrections (FedProx, SCAFFOLD, FedDyn) needs the run file's steps, and so does
DP-SGD: an own loop would leave them out without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data.sampling import SampleSubset
from shoal.errors import ConfigError, UserCodeError
from shoal.federated.config import FederatedConfig, PrivacyConfig
from shoal.federated.vector import VectorLayout, vector_of, write_vector

CORRECTED = ("fedprox", "scaffold", "feddyn")
"""Strategies whose clients add something to each gradient."""


@dataclass(frozen=True)
class OwnTraining:
    """See above; what is None is Shoal's."""

    train: Callable[..., Any] | None = None
    evaluate: Callable[[nn.Module], Any] | None = None

    def require_possible(self, config: FederatedConfig, privacy: PrivacyConfig | None) -> None:
        """Raises `ConfigError` for what an own loop would leave out."""
        if self.train is None:
            return
        if config.variant in CORRECTED:
            raise ConfigError(
                f'federated.kind = "{config.variant}" corrects each local step, which an own train function does not '
                'know of: leave train out, or use "fedavg", "fedavgm", "fednova", "fedopt" or a robust strategy'
            )
        if privacy is not None and privacy.unit == "sample":
            raise ConfigError(
                'privacy.unit = "sample" makes each local step private, which an own train function does not know of: '
                'leave train out, or set privacy.unit = "client"'
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


def train_own(
    train: Callable[..., Any],
    module: nn.Module,
    layout: VectorLayout,
    start: Tensor,
    samples: SampleSubset,
    *,
    round: int,
    lr: float,
    seed: int,
) -> ClientResult:
    """One client's round from the model `start` [numel]. What `train` draws from PyTorch's generator follows from
    `seed`. Raises `UserCodeError` for what it must not return.
    """
    write_vector(module, layout, start)
    module.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        said = numbers(train(module, samples, round=round, lr=lr), "train")
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
