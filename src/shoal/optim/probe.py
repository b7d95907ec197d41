"""What an optimizer does, found by stepping copies of it: it declares nothing, and keeps nothing before its first step.

    slots_of   the state that it keeps: a copy with the same options steps two small parameters of different shapes, and
               what it then keeps for each has the shape of the parameter, or is one number, or neither
    tried      whether it updates each parameter by itself, and which numbers beside its state a step changes
    works_on   whether it may see pieces of a parameter: what its class says, or what is known of PyTorch's own

A copy has everything of the optimizer but its parameters, hooks and state, so that the optimizer itself is never
touched: what a class keeps beside them (another optimizer inside, as SAM does) is copied with it.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from shoal.errors import UserCodeError
from shoal.optim.declared import Granularity, Slot, counter

_HOOKS = ("_optimizer_", "_warned_capturable")


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
        start_adagrad(clone)
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


def start_adagrad(optimizer: torch.optim.Adagrad) -> None:
    """The state that it makes when it is built (before PyTorch 2.12), or at its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            first = torch.full_like(parameter, group["initial_accumulator_value"])
            optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": first}


ON_ELEMENTS = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
"""Optimizers of `torch.optim` that treat every number alone, so that a parameter may be cut anywhere."""


def works_on(optimizer: torch.optim.Optimizer) -> Granularity:
    """What an update needs to see together: single numbers, or (of a class that is not known) whole parameters."""
    kind = type(optimizer)
    if (declared := getattr(kind, "works_on", None)) in ("elements", "matrices"):
        return declared
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in ON_ELEMENTS
    return "elements" if known else "matrices"


_PROBES = ((3, 2), (5, 4))


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
                    found[name] = _slot_of(optimizer, probe, name, value)
    return tuple(found.values())


def _slot_of(optimizer: torch.optim.Optimizer, probe: Parameter, name: str, value: Any) -> Slot:
    """How a checkpoint holds `value`, which a step on `probe` has left in the state."""
    said = f"{type(optimizer).__name__} keeps '{name}'"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return replace(counter(name), python_number=True)
    if not isinstance(value, Tensor):
        raise UserCodeError(
            f"{said} of type {type(value).__name__} for a parameter; Shoal's checkpoints hold tensors and numbers: "
            "keep it as one of these"
        )
    if value.shape == probe.shape:
        return Slot(name)
    if value.numel() == 1:
        return counter(name)
    raise UserCodeError(
        f"{said} of shape {tuple(value.shape)} for a parameter of {tuple(probe.shape)}; Shoal's checkpoints hold state "
        "of the parameter's shape, or one number"
    )


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
        if "closure" in str(error) or "NoneType" in str(error):  # it is called without one
            raise UserCodeError(
                f"{type(optimizer).__name__} steps by a closure, in which it computes the loss of a batch again at "
                "other weights, and here a step has one gradient, summed over all ranks: use an optimizer whose step() "
                "needs none"
            ) from error
        raise UserCodeError(
            f"{type(optimizer).__name__} fails in a step without a closure on other parameters than its own ({error}); "
            "Shoal steps it once for each update, gives it none, and hands it the pieces that a rank has: what it "
            "keeps of a parameter belongs into its state, where checkpoints find it"
        ) from error
    return [(probe, clone.state.get(probe, {})) for probe in probes]


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


SHAPES = ((3, 2), (5, 4), (2, 6))
"""Of the parameters that copies step: matrices, which no optimizer refuses."""
SIZES = (0.01, 1.0, 100.0)
"""Of their numbers: the small ones show steps as small as some begin with, the large ones what decays weights."""
STEPS = 6
STEPS_BEFORE_ALONE = 12
"""With gradients, each before one without: Lookahead takes parameters back every fifth step, or tenth."""
MOST_GROUPS = 4
"""Groups that are tried: a model may have one for each of its parameters."""
TOLERANCE = 1e-4
"""Of an update. The same numbers in another order differ by 1e-6; what others' gradients do is as large as it is."""


class Tried(NamedTuple):
    """`couples`: the update of a parameter depends on other gradients. `counts`: the numbers of a group that a step
    changes, by their names there. `attributes`: what it changes of the optimizer itself. `moves_alone`: it changes
    parameters or their state without a gradient, as one that decays all of them, or takes them back now and then.
    """

    couples: bool
    counts: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    moves_alone: bool = False


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
        couples = False
        if torch.equal(before, torch.random.get_rng_state()):
            try:
                apart = [_stepped_elements(optimizer, [each])[0] for each in chosen]
                couples = not all(map(_alike, together, apart))
            except Exception:
                couples = True
        return Tried(couples, counts, attributes, _moves_alone(optimizer, chosen))


class _End(NamedTuple):
    """Where a parameter began and came to, the numbers of its group that changed, and the optimizer's attributes."""

    begin: Tensor
    end: Tensor
    counts: Mapping[str, float]
    attributes: tuple[str, ...]


def _stepped_elements(optimizer: torch.optim.Optimizer, chosen: Sequence[tuple[int, int]]) -> list[_End]:
    """What becomes of the `chosen` parameters (group, place), which a copy steps together."""
    parameters = {key: _planted(key) for key in chosen}
    clone, groups = _copy_on(optimizer, parameters)
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


def _copy_on(
    optimizer: torch.optim.Optimizer, parameters: Mapping[tuple[int, int], Parameter]
) -> tuple[torch.optim.Optimizer, Mapping[int, Sequence[Parameter]]]:
    """A copy that steps these, at a rate that is not 0; and they by their groups."""
    groups: dict[int, list[Parameter]] = {}
    for (group, _), parameter in parameters.items():
        groups.setdefault(group, []).append(parameter)
    clone = clone_of(optimizer, groups)
    for group in clone.param_groups:
        if isinstance(group.get("lr"), int | float) and not group["lr"]:
            group["lr"] = 0.01  # a scheduler begins at 0, where nothing moves
    return clone, groups


def _moves_alone(optimizer: torch.optim.Optimizer, chosen: Sequence[tuple[int, int]]) -> bool:
    """See `Tried`. One that cannot step without a gradient changes nothing there."""
    parameters = {key: _planted(key) for key in chosen}
    clone, _ = _copy_on(optimizer, parameters)

    def values() -> list[Any]:
        own = [[parameter.detach(), dict(clone.state.get(parameter, {}))] for parameter in parameters.values()]
        return [_noted(leaf, clone) for leaf in tree_leaves(own)]

    for step in range(STEPS_BEFORE_ALONE):
        for key, parameter in parameters.items():
            parameter.grad = _gradient(key, step)
        step_of(clone)
        before = values()
        for parameter in parameters.values():
            parameter.grad = None
        try:
            step_of(clone)
        except Exception:
            return False
        if values() != before:
            return True
    return False


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
