"""`MaskChanges`: the next masks of a run, by the criterion of its kind.

kind        score of a weight w with the agreed gradient g                  what may come back
magnitude   |w|                                                             nothing
random      a number that follows from seed, name and place                 nothing
snip        |g w|                                                           nothing
movement    the sum over the steps of -g w                                  nothing
set         |w| says what goes, a random number what comes                  anything
rigl        |w| says what goes, |g| what comes                              anything
top_kast    |w|, of weights that wait, too                                  anything
lottery     |w| of another run                                              nothing: the masks stay
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.maths.counter import indices, key_of, uniform
from shoal.sparsity.config import SET, Lottery, Movement, RandomPruning, RigL, Snip, Sparse, TopKAST
from shoal.sparsity.features import feature_mask, feature_scores
from shoal.sparsity.masks import Masks
from shoal.sparsity.owners import Owners
from shoal.sparsity.patterns import MASKED, moved, of_every, spread, top, units, units_in
from shoal.sparsity.plan import MaskPlan, erk
from shoal.state.ownership import Owned

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
    """`movement` gives what `kind = "movement"` has added up for a part; `ticket`: see `Lottery`."""

    plan: MaskPlan
    owners: Owners
    masks: Masks
    seed: int
    movement: Callable[[Owned], Tensor]
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
            case Movement():
                scores = self._whole(self.movement)
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
        config, shapes = self.config, self.owners.shapes
        sizes = {name: group.size for group in self.owners.groups for name in group.dims}
        numbers = {name: sizes.get(name) or units_in(shape, config) for name, shape in shapes.items()}
        shares = erk(shapes, density) if config.distribution == "erk" else dict.fromkeys(shapes, density)
        counts = {name: round(shares[name] * number) for name, number in numbers.items()}
        empty = next((name for name, count in counts.items() if count == 0), None)
        if empty is not None and config.kept_of is None:
            raise ConfigError(
                f"sparsity.density = {density:g} leaves nothing of {empty}, which has {numbers[empty]} units of "
                f'sparsity.pattern = "{config.pattern}": raise it, or leave the layer out of sparsity.layers'
            )
        return counts

    def _largest(self, scores: NewMasks, density: float) -> NewMasks:
        config, shapes = self.config, self.owners.shapes
        if config.kept_of is not None:
            kept, of = config.kept_of
            return {name: of_every(each, max(kept, round(density * of)), of) for name, each in scores.items()}
        if config.pattern == "features":
            return self._features(scores, density)
        flat, counts = {name: units(each, config) for name, each in scores.items()}, self.counts(density)
        if config.distribution == "global":
            found = self.owners.largest(flat, sum(counts.values()))
        else:
            found = {name: top(each, counts[name]) for name, each in flat.items()}
        return {name: spread(mask, shapes[name], config) for name, mask in found.items()}

    def _features(self, scores: NewMasks, density: float) -> NewMasks:
        found = {}
        for group in self.owners.groups:
            if self.owners.owns(group.leader):
                kept = top(feature_scores(group, scores), round(density * group.size))
                found |= {n: feature_mask(kept, dim, self.owners.shapes[n]) for n, dim in group.dims.items()}
        return found

    def _moved(self, weights: NewMasks, growth: NewMasks, step: int) -> NewMasks:
        found, config = {}, self.config
        for name, weight in weights.items():
            shape = self.owners.shapes[name]
            whole = self.masks.whole(name, shape)
            assert whole is not None, "a run that starts sparse has masks"
            kept = units(whole.to(weight.dtype), config) > 0
            count = int(self.plan.moved(step) * int(kept.sum()))
            found[name] = spread(moved(kept, units(weight, config), units(growth[name], config), count), shape, config)
        return found

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
