"""When blocks have settled, by what is measured of them; and what they give beside what a reference gives.

movement      how far a block has moved from a copy of its weights that is some steps old, for its size and the rate:
                  p = |w - w_ref| / (|w_ref| lr every)
              Settled: p is below a share of the largest that it ever was.
gradient      g is the sum of a block's gradients since the last comparison (AutoFreeze, arXiv:2102.01386, section 3.2):
                  c = | |g_before| - |g| | / |g_before|
              Settled: c is not above the quantile of all trained blocks that `below` says.
activations   A are a block's outputs for some samples, a row each, A_ref those of a reference, a copy of the model that
              is some steps old and has weights of 8 bits. How far the similarities of samples are apart is (Egeria,
              arXiv:2201.06227; the loss is that of arXiv:1907.09682, equations 1 to 4)
                  p = |G - G_ref|^2 / samples^2,     G: the rows of A A^T, each divided by its norm
              A line is fitted to p of the last comparisons by least squares. Settled: its slope is not above a share
              of the largest that it ever had, or not above its own standard error: each comparison has other samples,
              by which p of a block that has settled goes on to differ. Egeria has the first alone, of averages.

Blocks are frozen from the front, each when those before it are, because only then its backward is saved; they thaw when
the learning rate has fallen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.models.adapters import integers, restored
from shoal.models.config import QuantisationConfig
from shoal.sparsity.config import FreezeByProgress
from shoal.state import Held

ROUNDING = 1e-9
"""Of learning rates, relative: 0.1 x 0.1 x 10 is more than 0.1."""
NOT_FINITE = -1.0
"""In place of what was measured of a block, which is never negative."""


@dataclass
class Plasticity:
    """How blocks settle, one after the other. Pure: measurements come in, the number of frozen blocks goes out. A block
    of which no finite number was measured has not settled.

    `largest` is the largest plasticity of each block so far, or slope; `before` the norms of their gradients at the
    last comparison, `recent` what was measured of activations at the last ones; `settled` comparisons in a row in which
    a block was below; `frozen` blocks at the front are frozen, at the learning rate `lr`.
    """

    config: FreezeByProgress
    blocks: int
    frozen: int = 0
    lr: float = 0.0
    largest: list[float] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    recent: list[list[float]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list, compare=False)
    """What is to be said."""
    _unknown: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """Blocks of which that was said."""

    def __post_init__(self) -> None:
        self.largest = self.largest or [0.0] * self.blocks
        self.settled = self.settled or [0] * self.blocks

    def observe(self, measured: Sequence[float], lr: float) -> None:
        """What the criterion measures of every block, at a comparison; frozen ones are passed by."""
        if self.frozen and lr * self.config.thaw <= self.lr * (1 + ROUNDING):
            self.frozen, self.settled, self.before, self.recent = 0, [0] * self.blocks, [], []
            return
        measured = [each if math.isfinite(each) else NOT_FINITE for each in measured]
        trained = range(self.frozen, self.blocks)
        self._say([block for block in trained if measured[block] < 0])
        settled = {
            "movement": self._settled_by_movement,
            "gradient": self._settled_by_gradient,
            "activations": self._settled_by_activations,
        }
        for block, below in zip(trained, settled[self.config.criterion](measured, trained), strict=True):
            self.settled[block] = self.settled[block] + 1 if below and measured[block] >= 0 else 0
        most = int(self.config.most * self.blocks)
        while self.frozen < most and self.settled[self.frozen] >= self.config.patience:
            self.frozen, self.lr = self.frozen + 1, lr

    def _say(self, unknown: Sequence[int]) -> None:
        """Once of each block."""
        if not self._unknown.issuperset(unknown):
            self._unknown.update(unknown)
            self.lines.append(
                f'freeze.progress.criterion = "{self.config.criterion}": what is measured of '
                f"{'blocks' if len(unknown) > 1 else 'block'} {', '.join(map(str, unknown))} is not finite, and counts "
                "as not settled; neither it nor what is behind it is frozen while that is so"
            )

    def _settled_by_movement(self, plasticity: Sequence[float], blocks: Sequence[int]) -> list[bool]:
        for block in blocks:
            self.largest[block] = max(self.largest[block], plasticity[block])
        return [plasticity[block] < self.config.share * self.largest[block] for block in blocks]

    def _settled_by_gradient(self, norms: Sequence[float], blocks: Sequence[int]) -> list[bool]:
        before, self.before = self.before, list(norms)
        if not before:
            return [False for _ in blocks]
        changes = [_change(before[block], norms[block]) for block in blocks]
        limit = sorted(changes)[max(0, math.ceil(self.config.share * len(changes)) - 1)]
        return [change <= limit and math.isfinite(change) for change in changes]

    def _settled_by_activations(self, losses: Sequence[float], blocks: Sequence[int]) -> list[bool]:
        window = self.config.window
        self.recent = [*self.recent, list(losses)][-window:]
        return [len(self.recent) == window and self._is_level(block) for block in blocks]

    def _is_level(self, block: int) -> bool:
        """Whether the line through its last distances is."""
        distances = [each[block] for each in self.recent]
        if min(distances) < 0:  # not finite
            return False
        slope, error = slope_of(distances)
        self.largest[block] = max(self.largest[block], abs(slope))
        return abs(slope) <= max(self.config.share * self.largest[block], error)

    def to_state(self) -> dict[str, Any]:
        names = ("frozen", "lr", "largest", "settled", "before", "recent")
        return {"criterion": self.config.criterion, **{name: getattr(self, name) for name in names}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; by another criterion than that of `state`, only what is frozen is taken over."""
        self.frozen, self.lr = int(state["frozen"]), float(state["lr"])
        before = state.get("criterion", self.config.criterion)  # earlier versions did not say it
        if before != self.config.criterion:
            self.forget(f'criterion was "{before}" before and is "{self.config.criterion}" now')
            return
        self.before = list(map(float, state.get("before", ())))  # earlier versions saved none
        self.recent = [list(map(float, each)) for each in state.get("recent", ())]
        self.largest, self.settled = list(map(float, state["largest"])), list(map(int, state["settled"]))

    def forget(self, why: str) -> None:
        """All but what is frozen."""
        self.largest, self.settled, self.before, self.recent = [0.0] * self.blocks, [0] * self.blocks, [], []
        self.lines.append(
            f"freeze.progress.{why}: what is frozen stays so, and how the other blocks settle is measured anew"
        )


def _change(before: float, norm: float) -> float:
    """Of a gradient's norm, relative; infinite where one of them is not known."""
    return math.inf if min(before, norm) < 0 else abs(before - norm) / max(before, 1e-300)


def slope_of(values: Sequence[float]) -> tuple[float, float]:
    """That of the line through values at 0, 1, 2, ... which is nearest by least squares, and its standard error."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    places = [place - middle for place in range(len(values))]
    spread = sum(x * x for x in places)
    slope = sum(x * (y - mean) for x, y in zip(places, values, strict=True)) / spread
    rest = sum((y - mean - slope * x) ** 2 for x, y in zip(places, values, strict=True))
    return slope, math.sqrt(rest / (len(values) - 2) / spread)


def similarity_loss(one: Tensor, other: Tensor) -> Tensor:
    """How far similarities between `[samples, ...]` are from those between other outputs for the same samples."""
    return (_similarities(one) - _similarities(other)).square().sum() / len(one) ** 2


def _similarities(outputs: Tensor) -> Tensor:
    rows = outputs.detach().flatten(1).double()
    return nn.functional.normalize(rows @ rows.T, dim=1)


CODES, SCALES, WHOLE = "freeze/codes/", "freeze/scales/", "freeze/whole/"
IN_8_BITS = QuantisationConfig(bits=8)


class Activations:
    """What the blocks of `model` give, by its weights and by a reference. All of the model is on this rank.

    `parameters` are those that are trained, by name, `blocks` names of modules; the ranks of `group` measure together,
    each the first microbatch that it computes. Weights of two dimensions or more have 8 bits in the reference, with a
    scale a row; others, and buffers, which may hold what is not finite, are whole. Weights that
    are never trained are those of the model.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, Parameter], blocks: Sequence[str], group: Collective
    ) -> None:
        self._model, self._group = model, group
        self._blocks = [model.get_submodule(name) for name in blocks]
        buffers = {name: each for name, each in model.named_buffers() if each.is_floating_point()}
        self._copied: dict[str, Tensor] = {**parameters, **buffers}
        self._in_8_bits = {name for name, each in parameters.items() if each.ndim > 1}
        self._reference: dict[str, Tensor] = {}
        self._looks = False
        self._seen: tuple[tuple[Any, ...], dict[str, Any], torch.dtype | None] | None = None
        model.register_forward_pre_hook(self._called, with_kwargs=True)

    def look(self, now: bool) -> None:
        """Whether the samples of the next forward are wanted."""
        self._looks, self._seen = now, None

    @property
    def has_reference(self) -> bool:
        """Whether there is something to compare with."""
        return bool(self._reference)

    @torch.no_grad()
    def losses(self) -> list[float]:
        """`similarity_loss` of every block, the mean over ranks; all of them call it together.

        Raises `UserCodeError` for a block that gives no tensor, or fewer than two samples, and where the step has not
        called the model.
        """
        if self._seen is None:
            raise UserCodeError(
                f'freeze.progress.criterion = "activations": the step has computed without a call of '
                f"{type(self._model).__name__} itself, so that its samples are not known: call the model and not a "
                'method of it, or use criterion = "movement"'
            )
        mine, theirs = self._outputs({}), self._outputs(self._restored())
        self._seen = None
        found = torch.stack([similarity_loss(one, other) for one, other in zip(mine, theirs, strict=True)])
        self._group.all_reduce(found).wait()
        return (found / self._group.size).tolist()

    @torch.no_grad()
    def renew(self) -> None:
        """The reference becomes a copy of the weights as they are."""
        self._reference, self._seen = {}, None
        for name, each in self._copied.items():
            if name not in self._in_8_bits:
                self._reference[WHOLE + name] = each.detach().clone()
            else:
                self._reference[CODES + name], self._reference[SCALES + name] = integers(each.flatten(1), IN_8_BITS)

    def tensors(self) -> dict[str, Held]:
        """The reference, which every rank has."""
        return dict(self._reference)

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """What a checkpoint that holds `saved` is read into."""
        forms = {
            prefix + name: (prefix, each) for name, each in self._copied.items() for prefix in (CODES, SCALES, WHOLE)
        }
        self._reference = {name: _empty(*forms[name]) for name in saved if name in forms}
        return self.tensors()

    def _called(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._looks and model.training and torch.is_grad_enabled():
            device = next(iter(self._copied.values())).device.type
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            self._looks, self._seen = False, (args, named, autocast)

    def _outputs(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """What each block gives for the samples, as in an evaluation, with these in the place of the model's."""
        assert self._seen is not None, "samples are there"
        args, named, autocast = self._seen
        given: list[list[Tensor]] = [[] for _ in self._blocks]
        hooks = [
            block.register_forward_hook(partial(_take_first, own))
            for block, own in zip(self._blocks, given, strict=True)
        ]
        device = next(iter(self._copied.values())).device.type
        try:
            with _evaluating(self._model), torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                functional_call(self._model, dict(weights), args, named)
        finally:
            for hook in hooks:
                hook.remove()
        return [self._checked(number, own) for number, own in enumerate(given)]

    def _checked(self, number: int, given: Sequence[Tensor]) -> Tensor:
        if given and given[0].ndim > 1 and len(given[0]) > 1:
            return given[0]
        what = f"gives {list(given[0].shape)}" if given else "gives no tensor"
        raise UserCodeError(
            f'freeze.progress.criterion = "activations": block {number} of {type(self._model).__name__} {what}, and at '
            'least two samples are compared: raise batch.micro_samples, or use criterion = "movement"'
        )

    def _restored(self) -> dict[str, Tensor]:
        found = {}
        for name, each in self._copied.items():
            if (whole := self._reference.get(WHOLE + name)) is not None:
                found[name] = whole
            else:
                codes, scales = self._reference[CODES + name], self._reference[SCALES + name]
                found[name] = restored(codes, scales, dtype=each.dtype).view(each.shape)
        return found


def _empty(prefix: str, like: Tensor) -> Tensor:
    """What is kept of a weight under `prefix`, to be read into."""
    if prefix == WHOLE:
        return torch.empty_like(like)
    rows = like.detach().flatten(1)
    return rows.new_empty(rows.shape, dtype=torch.int8) if prefix == CODES else rows.new_empty(len(rows), 1)


def _take_first(taken: list[Tensor], block: nn.Module, args: Any, given: Any) -> None:
    taken.extend(each for each in tree_leaves(given) if isinstance(each, Tensor))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Around a forward without dropout, after which each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
