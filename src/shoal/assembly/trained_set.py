"""`TrainedSet`: which parameters a script's own loop trains, while the loop may freeze them and let them go again.

What is trained at all is decided at the start, with buckets, pieces and optimizer state for it. Of that,
`requires_grad` says at every step what is trained now: a frozen parameter gets no gradient and the optimizer passes it
by, as in plain PyTorch. The flags are saved and restored with the run, so that a resumed loop trains what it would have
trained.

What was not trained at the start has no bucket and no state: a parameter that is unfrozen or added later would be
stepped by each rank with a gradient of its own. That is refused in the step in which it happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from shoal.errors import UserCodeError


class FrozenParameters:
    """Which of `trained`, by name, are frozen now: saved with the run, and restored."""

    def __init__(self, trained: Mapping[str, Parameter]) -> None:
        self._trained = trained

    @property
    def names(self) -> list[str]:
        return [name for name, parameter in self._trained.items() if not parameter.requires_grad]

    def to_state(self) -> dict[str, Any]:
        return {"frozen": names} if (names := self.names) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, parameter in self._trained.items():
            parameter.requires_grad_(name not in state["frozen"])


class TrainedSet:
    """The parameters of `model`, of which `trained` (by name) are trained, by `optimizers`."""

    def __init__(
        self, model: nn.Module, trained: Mapping[str, Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._optimizers = optimizers
        own = {id(parameter) for parameter in trained.values()}
        self._others = {name: each for name, each in model.named_parameters() if id(each) not in own}
        self._model, self._groups = model, [self._ids(optimizer) for optimizer in optimizers]

    def check(self, step: int) -> None:
        """Raises `UserCodeError` where parameters are to be trained now that were not at the start."""
        unfrozen = next((name for name, parameter in self._others.items() if parameter.requires_grad), None)
        if unfrozen is not None:
            raise UserCodeError(
                f"step {step}: {unfrozen} requires a gradient now, and did not when shoal.start was called, so this "
                f"run has no optimizer state for it. {REPAIR}"
            )
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            if self._ids(optimizer) != groups:
                raise UserCodeError(
                    f"step {step}: the parameters of the optimizer's groups are not those of the start "
                    f"({self._added(optimizer, groups)}), so their gradients would not be summed over ranks. {REPAIR}"
                )

    @staticmethod
    def _ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in optimizer.param_groups]

    def _added(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[int]]) -> str:
        before = {number for group in groups for number in group}
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        added = [number for group in self._ids(optimizer) for number in group if number not in before]
        if not added:
            return "some were taken out or moved"
        return "added: " + ", ".join(names.get(number, "one that is not in the model") for number in added)


REPAIR = (
    "Give the optimizer all parameters that it will ever train, unfrozen, before shoal.start; freeze those whose time "
    "has not come by requires_grad_(False) after it, and unfreeze them in the loop"
)
