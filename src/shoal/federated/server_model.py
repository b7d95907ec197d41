"""`ServerModel`: the model of the newest version, and how updates make the next one. No I/O.

The simulation and the server over TLS both hold one. Its `state` is what has to survive a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.errors import EnvironmentFault
from shoal.federated.strategy import Plan, Update, build_strategy
from shoal.federated.task import Task

MODEL = "model"


class ServerModel:
    """`version` counts the models that were made from updates."""

    def __init__(self, task: Task) -> None:
        self.task, self.version = task, 0
        self.model = task.model.clone()
        self.strategy = build_strategy(task.federated, task.model.numel())

    def plan(self) -> Plan:
        """What clients of the present version get beside the model."""
        return self.strategy.configure()

    def advance(self, updates: Sequence[Update]) -> dict[str, float]:
        """Makes the next model from the updates, in their order. Returns the means of what clients measured.

        Raises `EnvironmentFault` where the model is not finite afterwards; it is then what it was.
        """
        figures = self.strategy.evaluate(updates)
        model = self.strategy.aggregate(self.model, updates, version=self.version) if updates else self.model
        if not bool(torch.isfinite(model).all()):
            raise EnvironmentFault(
                f"the model of version {self.version + 1} is not finite, though every update was: lower "
                "federated.server_lr"
            )
        self.model, self.version = model, self.version + 1
        return figures

    def state(self) -> dict[str, Tensor]:
        """The model and what the strategy keeps."""
        return {MODEL: self.model, **{f"strategy/{name}": kept for name, kept in self.strategy.kept.items()}}

    def load(self, state: Mapping[str, Tensor], *, version: int) -> None:
        """Goes on from a `state`."""
        self.model, self.version = state[MODEL].clone(), version
        prefix = "strategy/"
        self.strategy.kept = {n.removeprefix(prefix): t.clone() for n, t in state.items() if n.startswith(prefix)}
