"""`ServerModel`: the model of the newest version, and how updates make the next one. No I/O.

The simulation and the server over TLS both hold one. Its `state` is what has to survive a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.errors import EnvironmentFault
from shoal.federated.privacy.budget import chance_of
from shoal.federated.privacy.dp_fedavg import PrivateMean
from shoal.federated.privacy.noise import Noise, from_entropy
from shoal.federated.strategy import Plan, Update, build_strategy
from shoal.federated.task import Task

MODEL, CLIP = "model", "privacy/clip"


class ServerModel:
    """`version` counts the models that were made from updates. `noise`: of differential privacy, if there is any."""

    def __init__(self, task: Task, *, noise: Noise = from_entropy) -> None:
        self.task, self.version = task, 0
        self.model = task.model.clone()
        self.strategy = build_strategy(task.federated, task.model.numel())
        self.private: PrivateMean | None = None
        if task.privacy is not None and task.privacy.unit == "client":
            expected = chance_of(task.federated) * task.federated.clients
            self.private = PrivateMean(task.privacy, expected=expected, noise=noise)

    def plan(self) -> Plan:
        """What clients of the present version get beside the model."""
        return self.strategy.configure()

    def advance(self, updates: Sequence[Update]) -> dict[str, float]:
        """Makes the next model from the updates, in their order. Returns the means of what clients measured.

        Raises `EnvironmentFault` where the model is not finite afterwards; it is then what it was.
        """
        figures = self.strategy.evaluate(updates)
        if self.private is not None:
            updates = [self._hidden(updates, self.private)]
        model = self.strategy.aggregate(self.model, updates, version=self.version) if updates else self.model
        if not bool(torch.isfinite(model).all()):
            raise EnvironmentFault(
                f"the model of version {self.version + 1} is not finite, though every update was: lower "
                "federated.server_lr"
            )
        self.model, self.version = model, self.version + 1
        return figures

    def _hidden(self, updates: Sequence[Update], private: PrivateMean) -> Update:
        if self.task.secure is not None and updates:
            return private.of_sum(updates[0], like=self.model, version=self.version)
        return private.mean(updates, like=self.model, version=self.version)

    def state(self) -> dict[str, Tensor]:
        """The model and what the strategy keeps."""
        clip = {} if self.private is None else {CLIP: torch.tensor([self.private.clip], dtype=torch.float64)}
        kept = {f"strategy/{name}": one for name, one in self.strategy.kept.items()}
        return {MODEL: self.model, **clip, **kept}

    def load(self, state: Mapping[str, Tensor], *, version: int) -> None:
        """Goes on from a `state`."""
        self.model, self.version = state[MODEL].clone(), version
        if self.private is not None:
            self.private.clip = float(state[CLIP])
        prefix = "strategy/"
        self.strategy.kept = {n.removeprefix(prefix): t.clone() for n, t in state.items() if n.startswith(prefix)}
