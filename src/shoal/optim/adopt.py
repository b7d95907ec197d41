"""An optimizer that a user has built, made to step what a rank owns.

A user writes `torch.optim.AdamW(model.parameters())`. What a rank steps may be pieces of those parameters, in memory of
their own (ZeRO). `OwnOptimizer.adopt` puts the pieces in their place, group by group, so that the user's own object
goes on to work: its options, its learning rate, a scheduler that holds it. What state it keeps, and what its update
needs to see together, is found by trying (`shoal.optim.probe`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.errors import UserCodeError
from shoal.optim.declared import Granularity, Slot
from shoal.optim.fused import FusedOptimizer
from shoal.optim.layer_statistics import SeesLayers
from shoal.optim.probe import slots_of, start_adagrad, tried, works_on
from shoal.optim.slots import has_stepped, state_of_whole


def check_own(optimizer: Any, names: Mapping[int, str]) -> None:
    """Raises `UserCodeError` unless it steps parameters that have `names`, by id, and its steps so far can be kept."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"the optimizer is of type {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    if (apart := next((key for key in optimizer.state if not isinstance(key, Tensor)), None)) is not None:
        raise UserCodeError(
            f"{type(optimizer).__name__} keeps state of no parameter, under {apart!r}, which no checkpoint would hold: "
            "keep numbers in its groups, and tensors in the state of a parameter"
        )
    if has_stepped(optimizer) and hasattr(optimizer, "slots"):
        raise UserCodeError(
            f"{type(optimizer).__name__} has taken steps already, and its state of layers is not taken over: hand it "
            "over as it was built; a resumed run gets its state from the checkpoint"
        )
    if any(number not in names for number in _stepped_by(optimizer)):
        raise UserCodeError(
            "the optimizer steps a parameter that is not in the model; build it from the parameters of the model that "
            "is handed over with it"
        )


def _check_shares(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Raises `UserCodeError` unless every parameter of `model` that trains is stepped by one of them, and once."""
    stepped = [number for optimizer in optimizers for number in _stepped_by(optimizer)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in stepped:
            raise UserCodeError(
                f"the optimizer does not step {name}, which requires a gradient; give it to the optimizer, or "
                "freeze it with requires_grad_(False)"
            )
        if stepped.count(id(parameter)) > 1:
            raise UserCodeError(
                f"two optimizers step {name}; a parameter belongs to one: take it out of the parameters of the other"
            )


def _stepped_by(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class OwnOptimizer:
    """A user's optimizer before the model is divided. `groups` are the names of the parameters of each group; it
    `couples` if the update of one depends on the gradients of others; `counts` are numbers of a group that steps
    change, `attributes` what they change of the optimizer itself; it `moves_alone` if a step without a gradient changes
    parameters or state; `taken` is the state of steps that it took before, by slot and parameter.
    """

    optimizer: torch.optim.Optimizer
    groups: Sequence[Sequence[str]]
    slots: Sequence[Slot]
    works_on: Granularity
    couples: bool = False
    counts: Sequence[str] = ()
    attributes: Sequence[str] = ()
    moves_alone: bool = False
    taken: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The parameters that it steps."""
        return [name for group in self.groups for name in group]

    @property
    def kind(self) -> str:
        """What it is called."""
        return type(self.optimizer).__name__

    def adopt(self, owned: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        """Makes it step, in each group, what this rank owns of the parameters of that group."""
        pieces: dict[str, list[Parameter]] = {}
        for name, parameter in owned:
            pieces.setdefault(name, []).append(parameter)
        self.optimizer.state.clear()
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            whole, group["params"] = group["params"], [p for name in names for p in pieces.get(name, ())]
            if self.works_on == "matrices" and whole:
                _fill(self.optimizer, group, whole[0].device)
        if isinstance(self.optimizer, torch.optim.Adagrad):
            start_adagrad(self.optimizer)
        keep_numbers(self.optimizer, self.slots)
        return self.optimizer

    def to_state(self) -> dict[str, Any]:
        """What a scheduler, or a step, may have changed in each group, and what the optimizer counts by itself."""
        every = [{n: _number(g.get(n)) for n in (*SCHEDULED, *self.counts)} for g in self.optimizer.param_groups]
        groups = [{name: each for name, each in group.items() if _is_saved(each)} for group in every]
        found = {name: getattr(self.optimizer, name, None) for name in self.attributes}
        own = {name: value for name, value in found.items() if type(value) in (int, float)}
        return {"groups": groups, **({"own": own} if own else {})}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes the saved learning rates over, and what else schedulers change."""
        names = (*SCHEDULED, *self.counts)
        for name in (name for name in self.attributes if type(state.get("own", {}).get(name)) in (int, float)):
            setattr(self.optimizer, name, state["own"][name])
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=False):
            for name in (name for name in names if name in saved):
                if isinstance(group.get(name), Tensor):  # it stays there, as PyTorch's schedulers leave it
                    group[name].fill_(saved[name])
                else:
                    group[name] = tuple(saved[name]) if isinstance(saved[name], list) else saved[name]


SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")
"""What PyTorch's schedulers keep in an optimizer's groups."""


def own_optimizers(optimizers: Sequence[Any], model: nn.Module) -> list[OwnOptimizer]:
    """Raises `UserCodeError` unless together they can train `model`: each parameter by one of them, and with state
    that a checkpoint can hold (`slots_of`).
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        check_own(optimizer, names)
    _check_shares(optimizers, model)
    return [_own(optimizer, names) for optimizer in optimizers]


def _own(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OwnOptimizer:
    groups = [[names[id(p)] for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    taken = state_of_whole(optimizer, names) if has_stepped(optimizer) else {}
    own = OwnOptimizer(optimizer, groups, slots_of(optimizer), works_on(optimizer), taken=taken)
    known = type(optimizer).__module__.startswith("torch.optim") and own.works_on == "elements"
    if known or isinstance(optimizer, SeesLayers):  # one that sees layers cannot step without
        return own
    found = tried(optimizer)
    couples = found.couples and own.works_on == "matrices"
    return replace(
        own, couples=couples, counts=found.counts, attributes=found.attributes, moves_alone=found.moves_alone
    )


def keep_numbers(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> None:
    """Checkpoints hold slots of Python's numbers, and what one was read into is a number again before the next step."""
    names = [slot.name for slot in slots if slot.python_number]
    if not names:
        return
    optimizer.__dict__["python_numbers"] = names

    def take_numbers(stepping: torch.optim.Optimizer, *_: Any) -> None:
        for state in stepping.state.values():
            state.update({name: state[name].item() for name in names if isinstance(state.get(name), Tensor)})

    optimizer.register_step_pre_hook(take_numbers)


def fill_empty_groups(optimizer: torch.optim.Optimizer) -> None:
    """Gives groups without parameters something to step."""
    for group in optimizer.param_groups:
        _fill(optimizer, group, torch.device("cpu"))


def _fill(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> None:
    """Not every optimizer can step nothing; Shoal's own can, and know the parameters of all ranks by their names."""
    if not group["params"] and not isinstance(optimizer, FusedOptimizer):
        group["params"] = [_placeholder(optimizer, device)]


def _placeholder(optimizer: torch.optim.Optimizer, device: torch.device) -> Parameter:
    """What a rank steps in a group of which it owns nothing, with a gradient of 0. No checkpoint holds it."""
    placeholder = Parameter(torch.zeros(1, 1, device=device))
    zeros = torch.zeros_like(placeholder)

    def give_gradient(*_: Any) -> None:
        placeholder.grad = zeros.zero_()

    optimizer.register_step_pre_hook(give_gradient)
    return placeholder


def _number(value: Any) -> Any:
    """A rate in a tensor is a number in a checkpoint."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_saved(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(isinstance(v, float) for v in value))
