"""`MaskChanges`: the next masks of a run, by the criterion of its kind.

kind        score of a weight w with the agreed gradient g                  what may come back
magnitude   |w|                                                             nothing
random      a number that follows from seed, name and place                 nothing
snip        |g w|                                                           nothing
grasp       w (H g), H the Hessian of the loss                              nothing
movement    the sum over the steps of -g w                                  nothing
l0          the location of its gate's distribution                         nothing: masks change once, in the end
set         |w| says what goes, a random number what comes                  anything
rigl        |w| says what goes, |g| what comes                              anything
top_kast    |w|, of weights that wait, too                                  anything
lottery     |w| of another run                                              nothing: the masks stay
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.maths.counter import indices, key_of, uniform
from shoal.sparsity.config import L0, SET, Grasp, Lottery, Movement, RandomPruning, RigL, Snip, Sparse, TopKAST
from shoal.sparsity.mask_plan import MaskPlan, erk
from shoal.sparsity.masks import Masks
from shoal.sparsity.owners import Owners
from shoal.sparsity.patterns import MASKED, moved, of_every, of_every_tile, spread, top, units, units_in
from shoal.sparsity.units import unit_mask, unit_scores
from shoal.state import Owned

Ticket = Callable[[str], Tensor]
"""From a layer's name to its whole weights in the trained run that a lottery ticket comes from."""
NewMasks = Mapping[str, Tensor]
"""Masks of the layers that this rank decides."""


def magnitude(own: Owned) -> Tensor:
    """|w|"""
    return own.parameter.abs()


def gradient(own: Owned) -> Tensor:
    """|g|; zero where the backward did not come."""
    return torch.zeros_like(own.parameter) if own.parameter.grad is None else own.parameter.grad.abs()


def saliency(own: Owned) -> Tensor:
    """|g w|"""
    return gradient(own) * own.parameter.abs()


@dataclass(frozen=True)
class MaskChanges:
    """`measured` gives what a kind has measured for a part: sums of "movement", products of "grasp", locations of "l0".
    `ticket`: see `Lottery`.
    """

    plan: MaskPlan
    owners: Owners
    masks: Masks
    seed: int
    measured: Callable[[Owned], Tensor]
    ticket: Ticket | None = None

    @property
    def config(self) -> Sparse:
        """The table."""
        return self.plan.config

    def first(self) -> NewMasks:
        """Of a run that starts sparse: the ticket's, the largest weights, or at random. All ranks call it together."""
        if isinstance(self.config, Lottery):
            assert self.ticket is not None, "the assembly opens it"
            scores = {name: self.ticket(name).abs().to(self.owners.dtype) for name in self._mine()}
        elif isinstance(self.config, TopKAST):
            scores = self._whole(magnitude)
        else:
            scores = {name: self._drawn(name, 0) for name in self._mine()}
        return self._largest(scores, self.config.final_density)

    def next(self, step: int) -> NewMasks:
        """At `step`, after its backward; weights that wait are in their places. All ranks call it together."""
        match self.config:
            case SET():
                weights = self._whole(magnitude)
                return self._moved(weights, {name: self._drawn(name, step) for name in weights}, step)
            case RigL():
                return self._moved(self._whole(magnitude), self._whole(gradient), step)
            case TopKAST():
                return self._largest(self._whole(magnitude), self.config.final_density)
            case Snip():
                scores = self._whole(saliency)
            case Movement() | L0():
                scores = self._whole(self.measured)
            case Grasp():
                scores = self._whole(lambda own: own.parameter * self.measured(own))
            case RandomPruning():
                scores = {name: self._drawn(name, 0) for name in self._mine()}
            case _:
                scores = self._whole(magnitude)
        return self._largest({n: self._only_kept(n, each) for n, each in scores.items()}, self.plan.density(step))

    def trained(self) -> NewMasks:
        """What `kind = "top_kast"` trains, a superset of what it computes with. All ranks call it together."""
        assert isinstance(self.config, TopKAST), "other kinds train what they compute with"
        return self._largest(self._whole(magnitude), self.config.trained)

    def counts(self, density: float) -> dict[str, int]:
        """Units of each layer that are kept. Raises `ConfigError` where that is none."""
        config, owners = self.config, self.owners
        shapes = {name: owners.rows_shape(name) for name in owners.shapes}
        sizes = {name: group.size for group in owners.groups for name in group.dims}
        numbers = {name: sizes.get(name) or units_in(shape, config) for name, shape in shapes.items()}
        shares = self._erk(density) if config.distribution == "erk" else dict.fromkeys(shapes, density)
        counts = {name: round(shares[name] * number) for name, number in numbers.items()}
        empty = next((name for name, count in counts.items() if count == 0), None)
        if empty is not None and config.kept_of is None:
            raise ConfigError(
                f"sparsity.density = {density:g} leaves nothing of {empty}, which has {numbers[empty]} units of "
                f'sparsity.pattern = "{config.pattern}": raise it, or leave the layer out of sparsity.layers'
            )
        return counts

    def _erk(self, density: float) -> dict[str, float]:
        """Of a layer of several matrices, that of one of them."""
        shapes, matrices = {}, {}
        for name, stored in self.owners.shapes.items():
            number = matrices[name] = self.owners.form(name).matrices(stored)
            rows, *others = self.owners.rows_shape(name)
            shapes[name] = (rows // number, *others)
        return erk(shapes, density, matrices)

    def _largest(self, scores: NewMasks, density: float) -> NewMasks:
        if self.config.removes:
            return self._removable(scores, density)
        rows = {name: self.owners.form(name).as_rows(each) for name, each in scores.items()}
        return self._as_stored(self._largest_rows(rows, density))

    def _as_stored(self, rows: NewMasks) -> NewMasks:
        shapes = self.owners.shapes
        return {name: self.owners.form(name).as_stored(mask, shapes[name]) for name, mask in rows.items()}

    def _largest_rows(self, scores: NewMasks, density: float) -> NewMasks:
        config = self.config
        if config.kept_of is not None:
            kept, of = config.kept_of
            number = max(kept, round(density * of))
            if config.transposable:
                return {name: of_every_tile(each, number) for name, each in scores.items()}
            return {name: of_every(each, number, of) for name, each in scores.items()}
        flat, counts = {name: units(each, config) for name, each in scores.items()}, self.counts(density)
        if config.distribution == "global":
            found = self.owners.largest(flat, round(density * sum(map(math.prod, self.owners.shapes.values()))))
        else:
            found = {name: top(each, counts[name]) for name, each in flat.items()}
        return {name: spread(mask, self.owners.rows_shape(name), config) for name, mask in found.items()}

    def _removable(self, scores: NewMasks, density: float) -> NewMasks:
        found = {}
        for group in self.owners.groups:
            if self.owners.owns(group.leader):
                kept = top(unit_scores(group, scores), round(density * group.size))
                found |= {n: unit_mask(kept, dim, self.owners.shapes[n]) for n, dim in group.dims.items()}
        return found

    def _moved(self, weights: NewMasks, growth: NewMasks, step: int) -> NewMasks:
        found, config = {}, self.config
        for name, weight in weights.items():
            whole, form = self.masks.whole(name, self.owners.shapes[name]), self.owners.form(name)
            assert whole is not None, "a run that starts sparse has masks"
            kept, size, growing = (
                units(form.as_rows(each), config) for each in (whole.to(weight.dtype), weight, growth[name])
            )
            count = int(self.plan.moved(step) * int((kept > 0).sum()))
            found[name] = spread(moved(kept > 0, size, growing, count), self.owners.rows_shape(name), config)
        return self._as_stored(found)

    def _mine(self) -> list[str]:
        return [name for name in self.owners.shapes if self.owners.owns(name)]

    def _whole(self, values: Callable[[Owned], Tensor]) -> NewMasks:
        """`values` of the whole layers that this rank decides."""
        found = ((name, self.owners.whole(name, values)) for name in self.owners.shapes)
        return {name: each for name, each in found if self.owners.owns(name)}

    def _only_kept(self, name: str, scores: Tensor) -> Tensor:
        mask = self.masks.whole(name, self.owners.shapes[name])
        return scores if mask is None else scores.masked_fill(~mask, MASKED)

    def _drawn(self, name: str, step: int) -> Tensor:
        shape = self.owners.shapes[name]
        counters = indices(shape, (0,) * len(shape), shape, device=self.owners.device)
        return uniform(key_of(self.seed, "masks", name, step), counters, dtype=torch.float64).to(self.owners.dtype)
