"""An optimizer that a user has built, made to step what a rank owns.

A user writes `torch.optim.AdamW(model.parameters())`. What a rank steps may be pieces of those parameters, in memory of
their own (ZeRO). `OwnOptimizer.adopt` puts the pieces in their place, group by group, so that the user's own object
goes on to work: its options, its learning rate, a scheduler that holds it.

Which state it will keep is not declared anywhere, and it keeps none before its first step. `slots_of` asks the class: a
second optimizer with the same options steps two small parameters of different shapes, and what it then keeps for each
has the shape of the parameter, or one number, or neither.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from shoal.errors import UserCodeError
from shoal.optim.declared import Granularity, Slot
from shoal.optim.layer_statistics import SeesLayers
from shoal.optim.slots import has_stepped, slot_of, state_of_whole

# Whether an optimizer updates each parameter by itself, found by trying.
#
# Under ZeRO a rank steps the parameters that it owns, with their gradients alone. That is the update of one process if
# the optimizer is separable: if the update of a parameter depends on no other's gradient. Those that estimate a step
# length from all of them are not (D-Adaptation, arXiv:2301.07733; Prodigy, arXiv:2306.06101; any that clips inside).
#
# No optimizer declares it. So copies of it, with the same options, step a few small parameters, once together and once
# each alone, with planted gradients whose sizes change from step to step, by a factor of their own for each parameter.
# A separable optimizer ends at the same values, and with the same numbers in its groups (Prodigy's `d`, a counter). The
# numbers that a step changes belong to a checkpoint.
#
# A copy has everything of the optimizer but its parameters, hooks and state, so that the optimizer itself is never
# touched: what a class keeps beside them (another optimizer inside, as SAM does) is copied with it.


SHAPES = ((3, 2), (5, 4), (2, 6))
"""Of the parameters that copies step: matrices, which no optimizer refuses."""
SIZES = (0.01, 1.0, 100.0)
"""Of their numbers: the small ones show steps as small as some begin with, the large ones what decays weights."""
STEPS = 6
MOST_GROUPS = 4
"""Groups that are tried: a model may have one for each of its parameters."""
TOLERANCE = 1e-4
"""Of an update. The same numbers in another order differ by 1e-6; what others' gradients do is as large as it is."""
_HOOKS = ("_optimizer_", "_warned_capturable")


class Tried(NamedTuple):
    """`couples`: the update of a parameter depends on other gradients. `counts`: the numbers of a group that a step
    changes, by their names there. `attributes`: what it changes of the optimizer itself.
    """

    couples: bool
    counts: tuple[str, ...]
    attributes: tuple[str, ...] = ()


def tried(optimizer: torch.optim.Optimizer) -> Tried:
    """Steps copies of `optimizer`, which can step without a closure (`slots_of`). Draws nothing.

    One that does not step alone what it steps in company couples. One that draws random numbers is taken for separable:
    its updates differ for that reason already.
    """
    groups = range(min(len(optimizer.param_groups), MOST_GROUPS))
    chosen = [(group, place) for group in groups for place in range(len(SHAPES))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = torch.random.get_rng_state()
        try:
            together = _stepped_elements(optimizer, chosen)
        except Exception as error:
            raise UserCodeError(
                f"{type(optimizer).__name__} cannot step other parameters than its own ({error}), as the pieces that a "
                "rank has of them: what it keeps of a parameter belongs into its state, where checkpoints find it"
            ) from error
        counts = tuple(sorted({name for each in together for name in each.counts}))
        attributes = together[0].attributes
        if not torch.equal(before, torch.random.get_rng_state()):
            return Tried(False, counts, attributes)
        try:
            apart = [_stepped_elements(optimizer, [each])[0] for each in chosen]
        except Exception:
            return Tried(True, counts, attributes)
    return Tried(not all(map(_alike, together, apart)), counts, attributes)


def clone_of(optimizer: torch.optim.Optimizer, groups: Mapping[int, Sequence[Parameter]]) -> torch.optim.Optimizer:
    """A copy without hooks and before its first step; of `groups`, by their numbers, it steps these parameters."""
    found = [{**optimizer.param_groups[number], "params": list(own)} for number, own in groups.items()]
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict), id(optimizer.param_groups): found}
    stands_for = next(iter(groups.values()))[0]
    for number, group in enumerate(optimizer.param_groups):
        memo[id(group["params"])] = list(groups.get(number, ()))
        memo |= {id(parameter): stands_for for parameter in group["params"]}
    for group in found:
        group.update({name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"})
    clone = _copied(optimizer, memo)
    if isinstance(clone, torch.optim.Adagrad):
        _start_adagrad(clone)
    return clone


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """PyTorch's own copy leaves out what a class keeps beside its groups and its state."""
    clone = object.__new__(type(optimizer))
    memo[id(optimizer)] = clone
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # a scheduler's wrapper, which would step the optimizer itself
        if name.startswith(_HOOKS) and isinstance(value, OrderedDict):
            clone.__dict__[name] = OrderedDict()
        elif isinstance(value, torch.optim.Optimizer):
            memo.setdefault(id(value.state), defaultdict(dict))
            clone.__dict__[name] = memo.get(id(value)) or _copied(value, memo)
        else:
            clone.__dict__[name] = copy.deepcopy(value, memo)
    return clone


def step_of(clone: torch.optim.Optimizer) -> None:
    """One step. By the class: see `_copied`."""
    type(clone).step(clone)


class _End(NamedTuple):
    """Where a parameter began and came to, the numbers of its group that changed, and the optimizer's attributes."""

    begin: Tensor
    end: Tensor
    counts: Mapping[str, float]
    attributes: tuple[str, ...]


def _stepped_elements(optimizer: torch.optim.Optimizer, chosen: Sequence[tuple[int, int]]) -> list[_End]:
    """What becomes of the `chosen` parameters (group, place), which a copy steps together."""
    parameters = {key: _planted(key) for key in chosen}
    groups: dict[int, list[Parameter]] = {}
    for (group, _), parameter in parameters.items():
        groups.setdefault(group, []).append(parameter)
    clone = clone_of(optimizer, groups)
    for group in clone.param_groups:
        if isinstance(group.get("lr"), int | float) and not group["lr"]:
            group["lr"] = 0.01  # a scheduler begins at 0, where nothing moves
    first = [dict(group) for group in clone.param_groups]
    begins = [parameter.detach().clone() for parameter in parameters.values()]
    own = _own_values(clone)
    for step in range(STEPS):
        for key, parameter in parameters.items():
            parameter.grad = _gradient(key, step)
        step_of(clone)
    counts = [_changed(*both) for both in zip(first, clone.param_groups, strict=True)]
    of_group, attributes = dict(zip(groups, counts, strict=True)), _changed_values(own, _own_values(clone))
    return [
        _End(begin, parameter.detach().clone(), of_group[group], attributes)
        for begin, ((group, _), parameter) in zip(begins, parameters.items(), strict=True)
    ]


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in after.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if value != before.get(name)}


def _own_values(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """What it keeps beside its state and its groups, by the attribute: numbers, strings, tensors, and how much state
    another optimizer has.
    """
    apart = ("state", "param_groups", "defaults", "step")
    own = {n: v for n, v in vars(optimizer).items() if n not in apart and not n.startswith(_HOOKS)}
    return {name: [_noted(leaf, optimizer) for leaf in tree_leaves(value)] for name, value in own.items()}


def _noted(leaf: Any, optimizer: torch.optim.Optimizer) -> Any:
    if isinstance(leaf, torch.optim.Optimizer):
        return len(leaf.state) if leaf.state is not optimizer.state else None
    if isinstance(leaf, Tensor):
        return None if isinstance(leaf, Parameter) else leaf.detach().reshape(-1).view(torch.uint8).tolist()
    return leaf if isinstance(leaf, int | float | str) else None


def _changed_values(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> tuple[str, ...]:
    return tuple(sorted(name for name, values in after.items() if before.get(name) != values))


def _planted(key: tuple[int, int]) -> Parameter:
    group, place = key
    generator = torch.Generator().manual_seed(1 + 100 * group + place)
    return Parameter(SIZES[place] * torch.randn(SHAPES[place], generator=generator))


def _gradient(key: tuple[int, int], step: int) -> Tensor:
    """Of a size between 1/30 and 30 that depends on parameter and step, mostly along one direction."""
    group, place = key
    generator = torch.Generator().manual_seed(10_000 + 1000 * group + 100 * place + step)
    size = 30.0 ** (2 * torch.rand((), generator=generator) - 1)
    return size * (1 + 0.5 * torch.randn(SHAPES[place], generator=generator))


def _alike(one: _End, other: _End) -> bool:
    """Whether both came to the same, but for rounding."""
    update, difference = (float((one.end - start).abs().max()) for start in (one.begin, other.end))
    rounding = 4 * torch.finfo(torch.float32).eps * float(one.end.abs().max())
    if not difference <= max(TOLERANCE * update, rounding) or one.counts.keys() != other.counts.keys():
        return False
    return all(math.isclose(one.counts[name], other.counts[name], rel_tol=TOLERANCE) for name in one.counts)


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


def check_own(optimizer: Any, names: Mapping[int, str]) -> None:
    """Raises `UserCodeError` unless it steps parameters that have `names`, by id, and its steps so far can be kept."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"the optimizer is of type {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
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
    change; `taken` is the state of steps that it took before, by slot and parameter.
    """

    optimizer: torch.optim.Optimizer
    groups: Sequence[Sequence[str]]
    slots: Sequence[Slot]
    works_on: Granularity
    couples: bool = False
    counts: Sequence[str] = ()
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
            if self.works_on == "matrices" and whole and not group["params"]:
                group["params"] = [_placeholder(self.optimizer, whole[0].device)]
        if isinstance(self.optimizer, torch.optim.Adagrad):
            _start_adagrad(self.optimizer)
        keep_numbers(self.optimizer, self.slots)
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
    return replace(own, couples=found.couples and own.works_on == "matrices", counts=found.counts)


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
        group["params"] = group["params"] or [_placeholder(optimizer, torch.device("cpu"))]


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
    parameter's nor one number, which a checkpoint could not divide, and for what is neither tensor nor number, unless
    its class declares `slots`.
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
                if value is not None:
                    found[name] = slot_of(optimizer, probe, name, value)
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
        clone = clone_of(optimizer, {number: probes})
        step_of(clone)
    except Exception as error:
        raise UserCodeError(
            f"{type(optimizer).__name__} fails in a step without a closure ({error}); Shoal steps it once for each "
            "update, and gives it none"
        ) from error
    return [(probe, clone.state.get(probe, {})) for probe in probes]
