"""`Stages`: a model's chain, cut: what each stage runs, which parameters it has, and who holds copies of tied ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import LayoutError, UserCodeError
from shoal.models.roles import DeclaresParts, Part, role_of
from shoal.schedules.cut import Cut, balanced_cut, check_enough_blocks

__all__ = ["Cut", "Stages", "balanced_cut", "cut_at", "estimated_costs", "measured_costs", "stage_costs", "staged"]

# What each part of a chain costs, from its parameters or by the clock, and a cut by the names of its parts.
#
# The automatic cut by costs is `schedules.cut.balanced_cut`.


LEAST_SHARE = 1e-3
"""A part without matrix products is not free: this share of the dearest part's cost."""


def estimated_costs(model: nn.Module, parts: Sequence[Part]) -> list[float]:
    """Multiplications a token: the numbers of each part's matrices, those of an embedding, which is looked up, left
    out. The same on every rank, with or without storage."""
    costs = [float(sum(_products(model, name) for name in part.modules)) for part in parts]
    return [max(cost, LEAST_SHARE * max(costs)) for cost in costs]


def _products(model: nn.Module, module: str) -> int:
    named = [
        (name, p) for name, p in model.named_parameters(remove_duplicate=False) if f"{name}.".startswith(f"{module}.")
    ]
    return sum(p.numel() for name, p in named if p.ndim >= 2 and role_of(model, name).kind != "embedding")


def measured_costs(
    model: DeclaresParts, *inputs: Any, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds of forward and backward of each part on `inputs`, on a device that is done when calls return.

    Leaves gradients in the parameters. Ranks measure differently: let one measure and tell the others.
    """
    context = model.context(*inputs)
    rounds = [_timed(model.parts(), context, clock) for _ in range(repeats + 1)]
    return [median(seconds) for seconds in zip(*rounds[1:], strict=True)]  # the first round warms up


def _timed(parts: Sequence[Part], context: Any, clock: Callable[[], float]) -> list[float]:
    seconds, x = [], None
    for part in parts:
        start_s = clock()
        output = part.run(x, context)
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))
        seconds.append(clock() - start_s)
        x = _leaf(output)
    return seconds


def _leaf(output: Tensor) -> Tensor:
    return output.detach().requires_grad_()


def cut_at(names: Sequence[str], firsts: Sequence[str], *, stages: int) -> Cut:
    """The cut by hand: `firsts` are the names of the first part of each stage but the first one.

    Raises `LayoutError` for a name that no part has, for names out of order, and where their number does not fit.
    """
    check_enough_blocks(len(names), stages)
    if len(firsts) != stages - 1:
        raise LayoutError(
            f"pipeline.cut names {len(firsts)} parts, but {stages} stages are cut at {stages - 1}; name the first part "
            f"of each stage but the first"
        )
    for name in firsts:
        if name not in names:
            raise LayoutError(f"pipeline.cut names {name!r}, which is no part of the model; it has {', '.join(names)}")
    starts = [0, *(names.index(name) for name in firsts)]
    if any(a >= b for a, b in pairwise(starts)):
        raise LayoutError(
            f"pipeline.cut = {list(firsts)} is not in the order of the model, {', '.join(names)}, or leaves a stage "
            f"empty; put the names in that order, without {names[0]!r}"
        )
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], len(names)], strict=True))


def stage_costs(costs: Sequence[float], cut: Cut) -> tuple[float, ...]:
    """The cost of each stage."""
    return tuple(sum(costs[part] for part in stage) for stage in cut)


class Absent(nn.Module):
    """Stands where a module was that another rank holds, so that the names of the others stay as they were."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises `RuntimeError`: a stage runs its own parts only."""
        raise RuntimeError("this part of the model is on another rank of the pipeline: run the parts of a held stage")


@dataclass(frozen=True)
class Stages:
    """Made from the whole model by `staged`, on every rank alike; then `keep` drops what the rank does not hold.

    `names[stage]` are the stage's parameters, by all of their names; `placement[stage]` is the rank that holds it.
    """

    model: nn.Module
    parts: tuple[Part, ...]
    cut: Cut
    placement: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]

    def forward(self, stage: int, x: Tensor | None, context: Any) -> Tensor:
        """Runs the parts of a stage: the `forward` of a `Computation`."""
        for part in self.cut[stage]:
            x = self.parts[part].run(x, context)
        assert x is not None
        return x

    def weights(self, stage: int) -> list[nn.Parameter]:
        """The parameters of a held stage, each once."""
        return list({id(p): p for p in map(self.model.get_parameter, self.names[stage])}.values())

    def holders(self, name: str) -> tuple[int, ...]:
        """The ranks that hold a parameter, by any of its names; several where it is tied across stages."""
        wanted = self.aliases[name]
        stages = [s for s, names in enumerate(self.names) if any(self.aliases[n] == wanted for n in names)]
        return tuple(sorted({self.placement[stage] for stage in stages}))

    def keep(self, rank: int) -> None:
        """Takes the modules of the stages that `rank` does not hold out of the model."""
        for stage, holder in enumerate(self.placement):
            if holder != rank:
                drop_parts(self.model, [self.parts[part] for part in self.cut[stage]])


def staged(model: nn.Module, cut: Cut, placement: Sequence[int]) -> Stages:
    """Raises `UserCodeError` where the model is no chain, or a parameter belongs to no part or to two."""
    if not isinstance(model, DeclaresParts):
        raise UserCodeError(
            f"{type(model).__name__} does not say which chain it is, so it cannot be cut into stages: let `shoal "
            "split` propose the cut, give it context() and parts() (see shoal.models.roles), or set layout.pipeline=1"
        )
    parts = tuple(model.parts())
    owners = {name: _owner(name, parts) for name, _ in model.named_parameters(remove_duplicate=False)}
    names = tuple(tuple(name for name, owner in owners.items() if owner in stage) for stage in cut)
    return Stages(model, parts, cut, tuple(placement), names, _aliases(model))


def drop_parts(model: nn.Module, absent: Sequence[Part]) -> None:
    """Puts `Absent` in the place of these parts' modules. Parameters that a kept part is tied to stay there."""
    for part in absent:
        for name in part.modules:
            path, _, last = name.rpartition(".")
            parent = model.get_submodule(path)
            if last in dict(parent.named_parameters(recurse=False)):
                parent.register_parameter(last, None)
            else:
                setattr(parent, last, Absent())


def _owner(name: str, parts: Sequence[Part]) -> int:
    owners = [i for i, part in enumerate(parts) if any(f"{name}.".startswith(f"{module}.") for module in part.modules)]
    if len(owners) != 1:
        found = "no part" if not owners else f"the parts {', '.join(parts[i].name for i in owners)}"
        raise UserCodeError(
            f"the parameter {name!r} belongs to {found}; each belongs to one: name its module in one Part of parts()"
        )
    return owners[0]


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter to its first one."""
    firsts: dict[int, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    return {name: firsts.setdefault(id(parameter), name) for name, parameter in named}
