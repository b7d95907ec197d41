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

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.maths.counter import indices, key_of, uniform
from shoal.sparsity.config import L0, SET, Grasp, Lottery, Movement, RandomPruning, RigL, Snip, Sparse, TopKAST
from shoal.sparsity.masks import Masks, Owners, unit_mask, unit_scores
from shoal.state import Owned
from shoal.topology.holding import Dims

# What is kept together, and which of it: pure functions of the scores of one whole layer.
#
# A layer's scores have its shape. A **unit** is what is kept or masked as one: a weight, a row, a block. The score of a
# unit is the mean of its weights' scores, so that units of different layers can be compared. Of equal scores the one
# that comes first in the layer is kept.


MASKED = -math.inf
"""The score of what may not come back."""


def top(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of flat `scores`, as a mask of their shape."""
    if count >= scores.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.topk(count, sorted=True).values[-1]
    kept = scores > threshold
    ties = (scores == threshold).nonzero().flatten()
    kept[ties[: count - int(kept.sum())]] = True
    return kept


def units(scores: Tensor, config: Sparse) -> Tensor:
    """The scores of the units of a layer, flat; those of single weights for "unstructured" and "N:M"."""
    match config.pattern:
        case "rows":
            return scores.flatten(1).mean(1)
        case "columns":
            return scores.transpose(0, 1).flatten(1).mean(1)
        case "block":
            rows, columns = config.block
            return _blocks(scores.flatten(1), rows, columns).mean((1, 3)).flatten()
    return scores.flatten()


def spread(kept: Tensor, shape: Dims, config: Sparse) -> Tensor:
    """The mask of a layer of `shape` from that of its units."""
    match config.pattern:
        case "rows":
            return kept.view(-1, *(1,) * (len(shape) - 1)).expand(shape)
        case "columns":
            return kept.view(1, -1, *(1,) * (len(shape) - 2)).expand(shape)
        case "block":
            rows, columns = config.block
            height, width = shape[0], math.prod(shape[1:])
            grid = kept.view(height // rows, 1, width // columns, 1)
            return grid.expand(-1, rows, -1, columns).reshape(shape)
    return kept.view(shape)


def of_every(scores: Tensor, kept: int, of: int) -> Tensor:
    """The mask that keeps the `kept` largest of every `of` neighbours of a row of `scores`."""
    groups = scores.reshape(-1, of)
    order = groups.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True).view(scores.shape)


def of_every_tile(scores: Tensor, kept: int) -> Tensor:
    """The mask that keeps `kept` of each row and of each column of every tile of 4 x 4, and of all such masks the one
    of the largest sum of `scores` `[rows, columns]` in each tile (transposable masks, arXiv:2102.08124).
    """
    masks = _regular_tiles(kept).to(scores.device)
    tiles = _blocks(scores.clamp(min=LEAST_SCORE), 4, 4).transpose(1, 2)
    chosen = masks[(tiles.flatten(2) @ masks.to(scores.dtype).T).argmax(2)]
    return chosen.unflatten(2, (4, 4)).transpose(1, 2).reshape(scores.shape)


LEAST_SCORE = -1e30
"""In the place of what may not come back, so that sums are numbers."""


def _regular_tiles(kept: int) -> Tensor:
    """All masks of 4 x 4 with `kept` in each row and column, bool `[masks, 16]`."""
    rows = [row for row in itertools.product((False, True), repeat=4) if sum(row) == kept]
    tiles = torch.tensor(list(itertools.product(rows, repeat=4)))
    return tiles[(tiles.sum(1) == kept).all(1)].flatten(1)


def units_in(shape: Dims, config: Sparse) -> int:
    """How many units a layer of `shape` has."""
    match config.pattern:
        case "rows":
            return shape[0]
        case "columns":
            return shape[1]
        case "block":
            return math.prod(shape) // math.prod(config.block)
    return math.prod(shape)


def check_divides(name: str, shape: Dims, config: Sparse) -> None:
    """Raises `ConfigError` where the pattern does not divide the layer `name`, of `shape` as rows."""
    refused = undivided(name, shape, config)
    if refused is not None:
        raise ConfigError(refused)


def undivided(name: str, shape: Dims, config: Sparse) -> str | None:
    """Why the pattern does not divide the layer `name`, of `shape` as rows, and what to do; None where it does."""
    height, width, kept = shape[0], math.prod(shape[1:]), config.kept_of
    if kept is not None and width % kept[1]:
        return (
            f'sparsity.pattern = "{config.pattern}": the rows of {name} have {width} weights, which is no multiple of '
            f"{kept[1]}; leave it out of sparsity.layers, or use another pattern"
        )
    if config.transposable and (len(shape) != 2 or height % 4):
        return (
            f"sparsity.transposable: {name} is {' x '.join(map(str, shape))}, which tiles of 4 x 4 do not divide; "
            "leave it out of sparsity.layers, or leave transposable out"
        )
    if config.pattern in ("rows", "columns") and units_in(shape, config) == 1:
        return (
            f'sparsity.pattern = "{config.pattern}": {name} has one, which is all of it; leave it out of '
            "sparsity.layers, or use another pattern"
        )
    rows, columns = config.block
    if config.pattern == "block" and (height % rows or width % columns):
        return (
            f"sparsity.block = {list(config.block)}: {name} has {height} rows of {width} weights, which such blocks do "
            "not divide; leave it out of sparsity.layers, or use other blocks"
        )
    return None


def moved(kept: Tensor, weight: Tensor, growth: Tensor, count: int) -> Tensor:
    """A mask of as many units: of those `kept`, `count` of the smallest `weight` go, and what has the largest `growth`
    of all that do not stay comes (RigL, algorithm 1). All are flat.
    """
    number = int(kept.sum())
    stay = top(weight.masked_fill(~kept, MASKED), number - count)
    return stay | top(growth.masked_fill(stay, MASKED), count)


def _blocks(matrix: Tensor, rows: int, columns: int) -> Tensor:
    height, width = matrix.shape
    return matrix.reshape(height // rows, rows, width // columns, columns)


# When masks change and how many weights they keep: pure functions of the step.
#
# cubic       d(t) = d_end + (1 - d_end) (1 - t)^3,  t from 0 at `begin` to 1 at `end`   arXiv:1710.01878, equation 1
# linear      d(t) = d_end + (1 - d_end) (1 - t)
# drop        f(t) = drop / 2 (1 + cos(pi t)),       t = step / end                      arXiv:1911.11134, section 3
# ERK         d_l ~ (sum of a layer's sizes) / (product of them), at most 1              arXiv:1911.11134, section 3


DEFAULT_END = 0.75
"""Of the run's steps, where the schedule names no end (arXiv:1911.11134, section 4)."""


@dataclass(frozen=True)
class MaskPlan:
    """The schedule of a run of `steps` steps, which are counted from 1."""

    config: Sparse
    steps: int

    @property
    def begin(self) -> int:
        return self.config.schedule.begin

    @property
    def end(self) -> int:
        """The last step at which masks change."""
        return max(self.begin, self.config.schedule.end or int(DEFAULT_END * self.steps))

    def due(self, step: int) -> bool:
        """Whether masks change in `step`, beside the first masks of a run that starts sparse."""
        schedule = self.config.schedule
        if isinstance(self.config, L0):
            return step == self.end
        if self.config.starts_sparse:
            changes = self.config.grows or self.config.sends_all
            return changes and self.begin <= step < self.end and step % schedule.every == 0
        if schedule.shape == "one_shot":
            return step == self.begin
        return self.begin <= step <= self.end and ((step - self.begin) % schedule.every == 0 or step == self.end)

    def late(self, step: int) -> bool:
        """Whether masks that are made once are due in `step` where there are none: the step that makes them is over,
        and was skipped.
        """
        if isinstance(self.config, L0):
            return step > self.end
        return not self.config.starts_sparse and self.config.schedule.shape == "one_shot" and step > self.begin

    def density(self, step: int) -> float:
        """The share of weights that is kept after `step`."""
        final, shape = self.config.final_density, self.config.schedule.shape
        if self.config.starts_sparse or (step >= self.begin and shape == "one_shot"):
            return final
        if step < self.begin:
            return 1.0
        left = 1.0 - min(1.0, (step - self.begin) / max(1, self.end - self.begin)) if step < self.end else 0.0
        return final + (1.0 - final) * left ** (3 if shape == "cubic" else 1)

    def moved(self, step: int) -> float:
        """The share of kept weights that a change at `step` drops and grows anew."""
        assert isinstance(self.config, SET | RigL), "no other kind moves weights"
        return self.config.drop / 2 * (1 + math.cos(math.pi * min(1.0, step / self.end)))


def erk(
    shapes: Mapping[str, tuple[int, ...]], density: float, matrices: Mapping[str, int] = MappingProxyType({})
) -> dict[str, float]:
    """The density of each layer of `shapes`, so that all of them together have `density`; `matrices`: of how many such
    shapes a layer is, where that is not one.

    Layers whose share would be above 1 stay dense, and the others have what is left.
    """
    numbers = {name: math.prod(shape) * matrices.get(name, 1) for name, shape in shapes.items()}
    raw = {name: sum(shape) / math.prod(shape) for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        sparse = [name for name in shapes if name not in dense]
        if not sparse:
            return dict.fromkeys(shapes, 1.0)
        kept = density * sum(numbers.values()) - sum(numbers[name] for name in dense)
        factor = kept / sum(raw[name] * numbers[name] for name in sparse)
        above = {name for name in sparse if factor * raw[name] > 1}
        if not above:
            return {name: 1.0 if name in dense else factor * raw[name] for name in shapes}
        dense |= above


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
