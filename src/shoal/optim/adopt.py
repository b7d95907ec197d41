"""An optimizer that a user has built, made to step what a rank owns.

A user writes `torch.optim.AdamW(model.parameters())`. What a rank steps may be pieces of those parameters, in memory of
their own (ZeRO). `OwnOptimizer.adopt` puts the pieces in their place, group by group, so that the user's own object
goes on to work: its options, its learning rate, a scheduler that holds it.

Which state it will keep is not declared anywhere, and it keeps none before its first step. `slots_of` asks the class: a
second optimizer with the same options steps two small parameters of different shapes, and what it then keeps for each
has the shape of the parameter, or one number, or neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.errors import UserCodeError
from shoal.optim.declared import Granularity, Slot, counter
from shoal.optim.layer_statistics import SeesLayers
from shoal.optim.separable import step_of, tried, twin_of

ON_ELEMENTS = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
"""Optimizers of `torch.optim` that treat every number alone, so that a parameter may be cut anywhere."""

_PROBES = ((3, 2), (5, 4))


def works_on(optimizer: torch.optim.Optimizer) -> Granularity:
    """What an update needs to see together: single numbers, or (of a class that is not known) whole parameters."""
    kind = type(optimizer)
    if (declared := getattr(kind, "works_on", None)) in ("elements", "matrices"):
        return declared
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in ON_ELEMENTS
    return "elements" if known else "matrices"


def check_fresh(optimizer: Any, names: Mapping[int, str]) -> None:
    """Raises `UserCodeError` unless `optimizer` has taken no step, and steps parameters that have `names`, by id."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"the optimizer is of type {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    if any(float(state.get("step", 1)) != 0 for state in optimizer.state.values()):
        raise UserCodeError(
            "the optimizer has taken steps already; hand it over as it was built: a resumed run gets its state from "
            "the checkpoint"
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
    change (`shoal.optim.separable`).
    """

    optimizer: torch.optim.Optimizer
    groups: Sequence[Sequence[str]]
    slots: Sequence[Slot]
    works_on: Granularity
    couples: bool = False
    counts: Sequence[str] = ()

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
            if self.works_on == "matrices" and whole and not group["params"]:
                group["params"] = [_placeholder(self.optimizer, whole[0].device)]
        if isinstance(self.optimizer, torch.optim.Adagrad):
            _start_adagrad(self.optimizer)
        return self.optimizer

    def to_state(self) -> dict[str, Any]:
        """What a scheduler, or a step, may have changed in each group."""
        names = (*SCHEDULED, *self.counts)
        return {"groups": [{n: g[n] for n in names if _is_saved(g.get(n))} for g in self.optimizer.param_groups]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes the saved learning rates over, and what else schedulers change."""
        names = (*SCHEDULED, *self.counts)
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=False):
            group.update({n: tuple(v) if isinstance(v, list) else v for n, v in saved.items() if n in names})


SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")
"""What PyTorch's schedulers keep in an optimizer's groups."""


def own_optimizers(optimizers: Sequence[Any], model: nn.Module) -> list[OwnOptimizer]:
    """Raises `UserCodeError` unless together they can train `model`: fresh ones, each parameter by one of them, and
    with state that a checkpoint can hold (`slots_of`).
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        check_fresh(optimizer, names)
    _check_shares(optimizers, model)
    return [_own(optimizer, names) for optimizer in optimizers]


def _own(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OwnOptimizer:
    groups = [[names[id(p)] for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    own = OwnOptimizer(optimizer, groups, slots_of(optimizer), works_on(optimizer))
    if own.works_on == "elements" or isinstance(optimizer, SeesLayers):  # one that sees layers cannot step without
        return own
    return replace(own, **tried(optimizer)._asdict())


def _placeholder(optimizer: torch.optim.Optimizer, device: torch.device) -> Parameter:
    """What a rank steps in a group of which it owns nothing, with a gradient of 0: not every optimizer can step
    nothing. No checkpoint holds it.
    """
    placeholder = Parameter(torch.zeros(1, 1, device=device))
    zeros = torch.zeros_like(placeholder)

    def give_gradient(*_: Any) -> None:
        placeholder.grad = zeros.zero_()

    optimizer.register_step_pre_hook(give_gradient)
    return placeholder


def _is_saved(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(isinstance(v, float) for v in value))


def _start_adagrad(optimizer: torch.optim.Adagrad) -> None:
    """The state that it makes when it is built (before PyTorch 2.12), or at its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            first = torch.full_like(parameter, group["initial_accumulator_value"])
            optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": first}


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[Slot, ...]:
    """The state that it keeps for each parameter. Raises `UserCodeError` for state of a shape that is neither the
    parameter's nor one number, which a checkpoint could not divide, unless its class declares `slots`.
    """
    if (declared := getattr(optimizer, "slots", None)) is not None:
        return declared
    found: dict[str, Slot] = {}
    for number in _unlike(optimizer.param_groups):
        probes = [Parameter(torch.ones(shape)) for shape in _PROBES]
        for probe in probes:
            probe.grad = torch.full_like(probe, 1e-3)
        for probe, state in _stepped(optimizer, number, probes):
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                if value.shape == probe.shape:
                    found[name] = Slot(name)
                elif value.numel() == 1:
                    found[name] = counter(name)
                else:
                    raise UserCodeError(
                        f"{type(optimizer).__name__} keeps '{name}' of shape {tuple(value.shape)} for a parameter of "
                        f"{tuple(probe.shape)}; Shoal's checkpoints hold state of the parameter's shape, or one number"
                    )
    return tuple(found.values())


def _unlike(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """A group of each kind, by number: those that have the same options, but for how large they are, keep the same
    state. There may be thousands.
    """
    kinds: dict[str, int] = {}
    for number, group in enumerate(groups):
        options = {name: value for name, value in group.items() if name != "params"}
        kind = {n: bool(v) if isinstance(v, int | float) else v for n, v in options.items()}
        kinds.setdefault(repr(sorted(kind.items())), number)
    return list(kinds.values())


def _stepped(
    optimizer: torch.optim.Optimizer, number: int, probes: Sequence[Parameter]
) -> list[tuple[Parameter, Mapping[str, Any]]]:
    """The state of a copy with the options of group `number`, after a step on `probes`."""
    try:
        twin = twin_of(optimizer, {number: probes})
        if isinstance(twin, torch.optim.Adagrad):
            _start_adagrad(twin)
        step_of(twin)
    except Exception as error:
        raise UserCodeError(
            f"{type(optimizer).__name__} cannot step without a closure ({error}); Shoal steps it once for each update"
        ) from error
    return [(probe, twin.state.get(probe, {})) for probe in probes]
