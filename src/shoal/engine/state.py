"""What a run is, between two steps: everything that a checkpoint holds, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.data.cursor import Cursor
from shoal.engine.precision import LossScaler
from shoal.errors import UsageError, UserCodeError
from shoal.optim.slots import make_slots, named_slots


@dataclass
class TrainState:
    """Model, optimizer, loss scale, and how far the run has come. `step` is the number of steps taken.

    `identity` is what may not change between two lives of a run, by the key that says it: the order of the samples and
    the optimizer. With another one, "exactly once" or the moments would be lost in silence.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    cursor: Cursor
    identity: Mapping[str, Any]
    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0

    @property
    def parameters(self) -> list[tuple[str, Parameter]]:
        """Name and parameter, tied ones once, under the names of the unsplit model."""
        return list(self.model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state: `model/<name>` and `optimizer/<slot>/<name>`."""
        slots = named_slots(self.optimizer, self.parameters)
        return self.weights() | {f"optimizer/{name}": tensor for name, tensor in slots.items()}

    def weights(self) -> dict[str, Tensor]:
        """The model's parameters and persistent buffers, tied ones once: `model/<name>`."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise UserCodeError(
                    f"the module's state {name} is a {type(tensor).__name__}; checkpoints hold tensors only"
                )
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"model/{name}"] = tensor.detach()
        return found

    def to_json(self) -> dict[str, Any]:
        """What is not a tensor. Random numbers follow from `seed` and `step`, so there is no generator to save."""
        return {
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "identity": dict(self.identity),
            "cursor": self.cursor.to_state(),
            "scaler": self.scaler.to_state(),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Takes over what `to_json` gave. Raises `UsageError` where the saved run was another one."""
        for key, value in state["identity"].items():
            if self.identity.get(key) != value:
                raise UsageError(
                    f"this run directory was trained with {key} = {value!r}, and now it is {self.identity.get(key)!r}; "
                    "keep it, or give another run.directory (and run.warm_start to begin with these weights)"
                )
        self.step, self.samples, self.tokens = int(state["step"]), int(state["samples"]), int(state["tokens"])
        self.skipped = int(state["skipped"])
        self.cursor = Cursor.from_state(state["cursor"])
        self.scaler.load(state["scaler"])

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The tensors that a checkpoint holding `saved` (name and dtype) is read into, the optimizer's made anew."""
        prefix = "optimizer/"
        slots = {name[len(prefix) :]: dtype for name, dtype in saved.items() if name.startswith(prefix)}
        made = make_slots(self.optimizer, self.parameters, slots)
        return self.weights() | {f"{prefix}{name}": tensor for name, tensor in made.items()}
