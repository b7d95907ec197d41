"""The base of optimizers that work on whole matrices, and leave everything else to AdamW.

    d = direction(g)  where the part lies   ->   u = updated(d)  whole, on its owner   ->   x <- (1 - lr w) x - lr u

A subclass says what `d` and `u` are. State of `direction` lies with the part and is divided with it; state of `updated`
lies whole with the owner (`Slot.whole`), and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from shoal.optim.declared import Dims, Granularity
from shoal.optim.fused import FusedAdamW, FusedOptimizer, Work
from shoal.optim.owners import Owners
from shoal.optim.parts import Parts


class Whole(NamedTuple):
    """A whole matrix on the rank that updates it: its group, its direction and its state."""

    group: dict[str, Any]
    direction: Tensor
    state: dict[str, Any]


class WholeOptimizer(FusedAdamW):
    """Groups that say `whole` go through `direction` and `updated`, others through AdamW.

    Args:
        params: Dictionaries with `params` and their options. Of plain parameters, matrices are `whole`.
        options: Those of groups that do not say them; `betas` and `eps` are AdamW's too.
    """

    works_on: Granularity = "matrices"
    _owners: Owners | None = None

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        FusedOptimizer.__init__(self, _groups(params), **options)
        self._shapes: dict[int, Dims] = {}
        self._names: dict[int, str] = {}

    def connect(self, parts: Parts) -> None:
        """Matrices become whole on their owners."""
        self._names = {id(own.parameter): own.name for own in parts.owned}
        self._shapes = {id(own.parameter): own.holding.global_shape for own in parts.owned}
        if parts.equal.size > 1:
            whole = {id(p) for group in self.param_groups if group["whole"] for p in group["params"]}
            own = {owned.name for owned in parts.owned if id(owned.parameter) in whole}
            self._owners = Owners(parts, self.cost, wanted=lambda name, shape: name in own)

    def whole_shape(self, parameter: Parameter) -> Dims | None:
        """That of the whole parameter, if its state is on this rank; None if another rank has it."""
        name = None if self._owners is None else self._owners.names[id(parameter)]
        if self._owners is not None and name in self._owners.owner and name not in self._owners.mine:
            return None
        return self._shapes.get(id(parameter), tuple(parameter.shape))

    def direction(self, group: dict[str, Any], parameter: Parameter, gradient: Tensor) -> Tensor:
        """What of `gradient` the owner is sent, number by number."""
        return gradient

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """What is subtracted from the whole parameter, times the rate; `state` is the owner's."""
        raise NotImplementedError

    def cost(self, shape: Dims) -> float:
        """What `updated` computes for a parameter of this shape, in any unit."""
        return float(math.prod(shape))

    def scales(self, parameters: list[Parameter]) -> list[float]:
        """Numbers by which updates are multiplied; they may ask something of whole parameters."""
        return [1.0] * len(parameters)

    def update_all(self, work: list[Work]) -> None:
        """Updates everything that has a gradient."""
        for one in work:
            if not one.group["whole"]:
                self.update(one.group, one.parameters, one.gradients)
        groups = [one.group for one in work if one.group["whole"] for _ in one.parameters]
        held = [p for one in work if one.group["whole"] for p in one.parameters]
        gradients = [g for one in work if one.group["whole"] for g in one.gradients]
        directions = [self.direction(*each) for each in zip(groups, held, gradients, strict=True)]
        scales = self.scales(held)
        for group, p, update, scale in zip(groups, held, self._updates(groups, held, directions), scales, strict=True):
            if group["weight_decay"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(update.view(p.shape), alpha=-group["lr"] * scale)

    def updates(self, own: Mapping[str, Whole]) -> dict[str, Tensor]:
        """`updated` of every matrix that this rank updates, by name. All ranks call it, whatever they own."""
        return {name: self.updated(one.group, one.direction, one.state) for name, one in own.items()}

    def _updates(self, groups: list[dict[str, Any]], held: list[Parameter], directions: list[Tensor]) -> list[Tensor]:
        """The update of each part, flat or in its shape."""
        names = [self._names.get(id(p), str(id(p))) for p in held]
        own = {name: (group, p) for name, group, p in zip(names, groups, held, strict=True)}
        whole = dict(zip(names, directions, strict=True))
        if self._owners is not None:
            whole = self._owners.gather(whole)
        found = self.updates(
            {name: Whole(own[name][0], tensor, self.state[own[name][1]]) for name, tensor in whole.items()}
        )
        parts = found if self._owners is None else self._owners.scatter(found)
        return [parts[name] for name in names]


def as_matrix(x: Tensor) -> Tensor:
    """Dimensions from the second on as columns; a vector as one row, a number as one."""
    return x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups that say `whole`; of plain parameters, matrices and the rest."""
    params = list(params)
    if params and not isinstance(params[0], dict):
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        params = [{"params": matrices, "whole": True}, {"params": others}]
    return [{"whole": False, **group} for group in params]
