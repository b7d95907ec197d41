"""What a run is, between two steps: everything that a checkpoint holds, and nothing else.

Every tensor goes by its name in the unsplit model. Where ranks split the model, a name stands for the parts of that
tensor that this rank has: of the weights what it computes with (`held`), of the optimizer's slots what it updates
(`owned`). Ranks together then hold the same tensors in every layout, and a checkpoint of one is a checkpoint of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.checkpoint.inventory import Held, Target, targets_of, views
from shoal.data.cursor import Cursor
from shoal.engine.precision import LossScaler
from shoal.errors import UsageError, UserCodeError
from shoal.models.mixture import Mixture
from shoal.models.mixture_loads import mixtures_of
from shoal.optim.slots import local, make_slots, named_slots, slot_and_parameter
from shoal.sync.owned import Owned
from shoal.sync.strategy import Remembered
from shoal.topology.box import Box, Dims

MODEL, OPTIMIZER = "model/", "optimizer/"


class HeldWeight(NamedTuple):
    """A weight as this rank computes with it: `tensor` is the part `box` of one of `global_shape`."""

    name: str
    tensor: Tensor
    global_shape: Dims
    box: Box


@dataclass
class TrainState:
    """Model, optimizer, loss scale, and how far the run has come. `step` is the number of steps taken.

    `identity` is what may not change between two lives of a run, by the key that says it: the order of the samples and
    the optimizer. With another one, "exactly once" or the moments would be lost in silence.

    The rest is for split models. `owned` are the tensors that the optimizer steps (None: the parameters as they are),
    `held` the parts of parameters that are saved from this rank (None: all of them, whole), and `names` all parameters
    and persistent buffers of the unsplit model (None: those of `model`), tied ones once.

    `sync` is what the sync has found out in the run.
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
    owned: Sequence[Owned] | None = None
    held: Sequence[HeldWeight] | None = None
    names: Collection[str] | None = None
    sync: Remembered | None = None

    @property
    def parameters(self) -> list[tuple[str, Parameter]]:
        """Name and parameter, tied ones once, under the names of the unsplit model."""
        return list(self.model.named_parameters())

    @cached_property
    def mixtures(self) -> list[Mixture]:
        """The mixtures of experts that are on this rank."""
        return mixtures_of(self.model)

    def tensors(self) -> dict[str, Held]:
        """Every tensor of the state: `model/<name>` and `optimizer/<slot>/<name>`."""
        return self.weights() | self._located(named_slots(self.optimizer, self._stepped))

    def weights(self) -> dict[str, Held]:
        """The model's parameters and persistent buffers, tied ones once; no parts of what others have."""
        all_names: dict[str, Held] = {f"{MODEL}{name}": () for name in self.names or ()}
        whole = {f"{MODEL}{name}": tensor for name, tensor in self._state().items()}
        return all_names | whole | _parts(self.held or ())

    def weight_targets(self) -> dict[str, Held]:
        """What a checkpoint's weights are read into: `weights`, and what the optimizer steps in memory of its own."""
        targets = {name: list(targets_of(held)) for name, held in self.weights().items()}
        filled = {_memory(target.tensor) for parts in targets.values() for target in parts}
        for owned in self.owned or ():
            if _memory(owned.parameter) not in filled:
                targets.setdefault(f"{MODEL}{owned.name}", []).extend(_views(local(owned.parameter), owned))
        return dict(targets)

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
            "sync": None if self.sync is None else self.sync.to_state(),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Takes over what `to_json` gave. Raises `UsageError` where the saved run was another one."""
        if "identity" not in state:
            raise UsageError(
                "this run directory holds imported weights and no run to go on with: give another run.directory, and "
                "this one as run.warm_start"
            )
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
        if self.sync is not None and state.get("sync") is not None:
            self.sync.load(state["sync"])

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """The tensors that a checkpoint holding `saved` (name and dtype) is read into, the optimizer's made anew."""
        slots = {name.removeprefix(OPTIMIZER): dtype for name, dtype in saved.items() if name.startswith(OPTIMIZER)}
        return self.weight_targets() | self._located(make_slots(self.optimizer, self._stepped, slots))

    def elsewhere(self, saved: Iterable[str]) -> set[str]:
        """Those of the slots in `saved` that other ranks may fill: the model has their parameter."""
        slots = (name for name in saved if name.startswith(OPTIMIZER))
        known = self.names or ()
        return {name for name in slots if slot_and_parameter(name.removeprefix(OPTIMIZER))[1] in known}

    @property
    def _stepped(self) -> list[tuple[str, Parameter]]:
        return self.parameters if self.owned is None else [(owned.name, owned.parameter) for owned in self.owned]

    def _located(self, slots: Mapping[str, Tensor]) -> dict[str, Held]:
        """Slots under the names that they are saved by, and where in the unsplit parameter they lie."""
        owned = {own.name: own for own in self.owned or ()}
        return {
            f"{OPTIMIZER}{key}": _slot(tensor, owned.get(slot_and_parameter(key)[1])) for key, tensor in slots.items()
        }

    def _state(self) -> dict[str, Tensor]:
        """What of the module's state is whole here: buffers, and the parameters unless `held` lists their parts."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):
                raise UserCodeError(
                    f"the module's state {name} is a {type(tensor).__name__}; checkpoints hold tensors only"
                )
            if id(tensor) not in seen and not (self.held is not None and isinstance(tensor, Parameter)):
                seen.add(id(tensor))
                found[name] = tensor.detach()
        return found


def held_pieces(owned: Iterable[Owned]) -> list[HeldWeight]:
    """The weights of a rank that has nothing of them but what it updates (ZeRO-3)."""
    return [
        HeldWeight(own.name, target.tensor, target.global_shape, target.box)
        for own in owned
        for target in _views(local(own.parameter), own)
    ]


def _parts(held: Iterable[HeldWeight]) -> dict[str, list[Target]]:
    parts: dict[str, list[Target]] = defaultdict(list)
    for name, tensor, global_shape, box in held:
        parts[f"{MODEL}{name}"].append(Target(local(tensor).detach(), tuple(global_shape), box.offset))
    return dict(parts)


def _slot(tensor: Tensor, owned: Owned | None) -> Held:
    """A slot of one number belongs to the whole parameter; any other lies as the tensor that the optimizer steps."""
    return tensor if owned is None or tensor.dim() == 0 else _views(tensor, owned)


def _views(tensor: Tensor, owned: Owned) -> list[Target]:
    regions = ((region.box, region.start) for region in owned.regions)
    return views(tensor, regions, global_shape=owned.holding.global_shape)


def _memory(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
