"""Whether an optimizer updates each parameter by itself, found by trying.

Under ZeRO a rank steps the parameters that it owns, with their gradients alone. That is the update of one process if
the optimizer is separable: if the update of a parameter depends on no other's gradient. Those that estimate a step
length from all of them are not (D-Adaptation, arXiv:2301.07733; Prodigy, arXiv:2306.06101; any that clips inside).

No optimizer declares it. So copies of it, with the same options, step a few small parameters, once together and once
each alone, with planted gradients whose sizes change from step to step, by a factor of their own for each parameter. A
separable optimizer ends at the same values, and with the same numbers in its groups (Prodigy's `d`, a counter). The
numbers that a step changes belong to a checkpoint.

A copy has everything of the optimizer but its parameters, hooks and state, so that the optimizer itself is never
touched: what a class keeps beside them (another optimizer inside, as SAM does) is copied with it.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

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
    changes, by their names there.
    """

    couples: bool
    counts: tuple[str, ...]


def tried(optimizer: torch.optim.Optimizer) -> Tried:
    """Steps copies of `optimizer`, which can step without a closure (`shoal.optim.adopt.slots_of`). Draws nothing.

    One that does not step alone what it steps in company couples. One that draws random numbers is taken for separable:
    its updates differ for that reason already.
    """
    groups = range(min(len(optimizer.param_groups), MOST_GROUPS))
    chosen = [(group, place) for group in groups for place in range(len(SHAPES))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = torch.random.get_rng_state()
        together = _stepped(optimizer, chosen)
        counts = tuple(sorted({name for each in together for name in each.counts}))
        if not torch.equal(before, torch.random.get_rng_state()):
            return Tried(False, counts)
        try:
            apart = [_stepped(optimizer, [each])[0] for each in chosen]
        except Exception:
            return Tried(True, counts)
    return Tried(not all(map(_alike, together, apart)), counts)


def twin_of(optimizer: torch.optim.Optimizer, groups: Mapping[int, Sequence[Parameter]]) -> torch.optim.Optimizer:
    """A copy without state and hooks that steps `groups`: of each of its groups, by number, these parameters."""
    found = [{**optimizer.param_groups[number], "params": list(own)} for number, own in groups.items()]
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict), id(optimizer.param_groups): found}
    stands_for = next(iter(groups.values()))[0]
    for number, group in enumerate(optimizer.param_groups):
        memo[id(group["params"])] = list(groups.get(number, ()))
        memo |= {id(parameter): stands_for for parameter in group["params"]}
    for group in found:
        group.update({name: copy.deepcopy(value, memo) for name, value in group.items() if name != "params"})
    return _copied(optimizer, memo)


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """PyTorch's own copy leaves out what a class keeps beside its groups and its state."""
    twin = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # a scheduler's wrapper, which would step the optimizer itself
        if name.startswith(_HOOKS) and isinstance(value, OrderedDict):
            twin.__dict__[name] = OrderedDict()
        elif isinstance(value, torch.optim.Optimizer):
            memo.setdefault(id(value.state), defaultdict(dict))
            twin.__dict__[name] = memo.get(id(value)) or _copied(value, memo)
        else:
            twin.__dict__[name] = copy.deepcopy(value, memo)
    return twin


def step_of(twin: torch.optim.Optimizer) -> None:
    """One step. By the class: see `_copied`."""
    type(twin).step(twin)


class _End(NamedTuple):
    """Where a parameter began and came to, and the numbers of its group that changed."""

    begin: Tensor
    end: Tensor
    counts: Mapping[str, float]


def _stepped(optimizer: torch.optim.Optimizer, chosen: Sequence[tuple[int, int]]) -> list[_End]:
    """What becomes of the `chosen` parameters (group, place), which a copy steps together."""
    parameters = {key: _planted(key) for key in chosen}
    groups: dict[int, list[Parameter]] = {}
    for (group, _), parameter in parameters.items():
        groups.setdefault(group, []).append(parameter)
    twin = twin_of(optimizer, groups)
    for group in twin.param_groups:
        if isinstance(group.get("lr"), int | float) and not group["lr"]:
            group["lr"] = 0.01  # a scheduler begins at 0, where nothing moves
    first = [dict(group) for group in twin.param_groups]
    begins = [parameter.detach().clone() for parameter in parameters.values()]
    for step in range(STEPS):
        for key, parameter in parameters.items():
            parameter.grad = _gradient(key, step)
        step_of(twin)
    counts = [_changed(*both) for both in zip(first, twin.param_groups, strict=True)]
    of_group = dict(zip(groups, counts, strict=True))
    return [
        _End(begin, parameter.detach().clone(), of_group[group])
        for begin, ((group, _), parameter) in zip(begins, parameters.items(), strict=True)
    ]


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in after.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if value != before.get(name)}


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
