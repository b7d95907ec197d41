"""Microbatches of one number and one size on all ranks, where the ranks of a replica work in lock-step.

Pipelines, sharded parameters and experts exchange tensors within every microbatch, so that no rank may have more of
them than another, nor of more samples; lengths are left as they are. What a rank lacks is made up by samples of
weight 0, which change no sum; their position is -1, and they are not counted.

A context rank's part of every sample: some of its tokens, and where they stand in their sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.data.sample import Batch, Tree, first_leaf, leaves, map_tree, padding_like
from shoal.errors import UserCodeError


@dataclass(frozen=True)
class Uniform:
    """Microbatches of `samples` samples, as many in a step on every rank: the least of `counts`, ascending, that holds
    this rank's share, which is as large as that of others where there are several counts.
    """

    counts: Sequence[int]
    samples: int

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """The same samples in the same order, padded. There is at least one sample."""
        filler = padding_like(batches[0], self.samples)
        padded = [_padded(batch, self.samples) for batch in batches]
        return [*padded, *[filler] * (self.count(len(padded)) - len(padded))]

    def count(self, own: int) -> int:
        """Microbatches of a step of which this rank has `own`."""
        return next(count for count in self.counts if own <= count)


def _padded(batch: Batch, samples: int) -> Batch:
    if len(batch) == samples:
        return batch
    filler = padding_like(batch, samples - len(batch))
    fillers: Iterator[Tensor] = iter(leaves(filler.inputs, filler.targets))
    join = lambda leaf: torch.cat([leaf, next(fillers)])  # noqa: E731
    inputs, targets = map_tree(join, batch.inputs), map_tree(join, batch.targets)
    return Batch(
        inputs,
        targets,
        weights=torch.cat([batch.weights, filler.weights]),
        positions=torch.cat([batch.positions, filler.positions]),
    )


def topped_up(batches: Iterable[Batch], count: int, *, spare: Callable[[], Batch]) -> Iterator[Batch]:
    """`batches`, and as many made-up ones as it takes to make `count`; `spare` gives a sample to a rank without any."""
    number, last = 0, None
    for last in batches:
        number += 1
        yield last
    if number < count:
        filler = padding_like(spare() if last is None else last, 1)
        yield from (filler for _ in range(count - number))


Places = Callable[[int], Tensor]
"""From the length of a sequence to the places, int64, ascending, of the tokens that this rank holds."""


def cut_sequences(places: Places) -> Callable[[Batch], Batch]:
    """The cut that keeps `places(length)` of dim 1 of everything that has the length of the first input there.

    The model must learn where its tokens stand: inputs of one tensor become `(tokens, positions)`, a mapping without
    the key gets `positions` `[samples, tokens]`; a tuple must have brought them.
    """

    def cut(batch: Batch) -> Batch:
        length = first_leaf(batch.inputs).shape[1]
        own = places(length)

        def part(leaf: Tensor) -> Tensor:
            return leaf.index_select(1, own.to(leaf.device)) if leaf.ndim > 1 and leaf.shape[1] == length else leaf

        weights = batch.weights
        if weights.ndim == 1:  # of whole samples, whose losses are averaged over their positions
            weights = (weights / length)[:, None].expand(-1, length)
        return Batch(
            _placed(map_tree(part, batch.inputs), own),
            map_tree(part, batch.targets),
            weights=part(weights),
            positions=batch.positions,
        )

    return cut


def _placed(inputs: Tree, places: Tensor) -> Tree:
    positions = places.expand(first_leaf(inputs).shape[0], -1)
    if isinstance(inputs, Tensor):
        return (inputs, positions)
    if isinstance(inputs, dict) and "positions" not in inputs:
        return inputs | {"positions": positions}
    return inputs


# `gather_samples`: a tensor of this rank's samples becomes that of the whole global batch, with gradients.
#
#     z = [z_0; z_1; ...],    dL/dz_r = sum over ranks q of (dL_q/dz)[rows of r]
#
# A loss that couples samples (contrastive, InfoNCE arXiv:1807.03748, CLIP arXiv:2103.00020, in-batch negatives)
# compares each sample of its rank with all others. Every rank then computes the losses of its own samples alone, and
# their sum over ranks is that of one process: the forward is an all-gather, the backward a reduce-scatter.
#
# Rows stand in the order of the global batch, whatever rank they come from. Samples that are made up (padding of a
# microbatch) are left out.


class GatheredSamples(NamedTuple):
    """`samples` `[global samples, ...]`; `own` int64 `[samples]`: in which of its rows each of this rank's stands."""

    samples: Tensor
    own: Tensor


def gather_samples(x: Tensor) -> GatheredSamples:
    """The rows of `x` `[samples, ...]` of all ranks that hold samples of the global batch, and where one's own are.

    Call it in the loss or in the model, on every rank alike. The gradient of the result comes back to the rank that a
    row is from, summed over all ranks. Without gradients, as in an evaluation, and outside of a run it gives the rows
    of this process. A row of `own` whose sample is made up is 0; its loss is not counted.

        everyone, own = shoal.gather_samples(second)
        losses = F.cross_entropy(first @ everyone.T / temperature, own, reduction="none")

    Raises `UserCodeError` where the global batch is computed in several microbatches, where `x` has not one row for
    each sample, and under layouts that split samples.
    """
    batch = _current.get()
    if batch is not None and torch.is_grad_enabled():
        return batch.gather(x)
    if batch is None and torch.is_grad_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UserCodeError(
            "gather_samples was called outside of a step of Shoal, on one of several ranks: call it in the loss of "
            "`shoal train`, or between batches() and backward() of a loop of your own"
        )
    return GatheredSamples(x, torch.arange(len(x), device=x.device))


class GlobalBatch:
    """What this rank knows of the global batch while it computes its microbatch of it.

    `group` opens the group of ranks that hold its `samples`; `refusal` says why nothing can be gathered, if so.
    """

    def __init__(self, group: Callable[[], Collective], *, samples: int, refusal: str | None = None) -> None:
        self._open, self._refusal = group, refusal
        self._whole = self._samples = samples
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._rows: _Rows | None = None
        self.gathered = False
        """Whether a forward has gathered anything so far."""

    def step(self, samples: int | None) -> None:
        """A step begins, of so many samples of all ranks; None: of a whole one."""
        self._samples = self._whole if samples is None else samples

    def microbatch(self, positions: Tensor) -> None:
        """The samples that come next stand at these positions, int64 `[samples]`; those below 0 are made up."""
        self._positions, self._rows = positions, None

    def current(self) -> AbstractContextManager[None]:
        """Inside, `gather_samples` gathers samples of this batch."""
        return _Current(self)

    def gather(self, x: Tensor) -> GatheredSamples:
        """See `gather_samples`."""
        if self._refusal is not None:
            raise UserCodeError(f"gather_samples: {self._refusal}")
        if x.ndim == 0 or len(x) != len(self._positions):
            raise UserCodeError(
                f"gather_samples got a tensor {tuple(x.shape)} for {len(self._positions)} samples; its first dimension "
                "must have one row for each sample"
            )
        group, self.gathered = self._open(), True
        if self._rows is None:
            self._rows = _Rows.of(self._positions.to(x.device), group, wanted=self._samples)
        if x.dtype == torch.bool:
            return GatheredSamples(_Gather.apply(x.byte(), self._rows, group).bool(), self._rows.own)
        return GatheredSamples(_Gather.apply(x, self._rows, group), self._rows.own)


_current: ContextVar[GlobalBatch | None] = ContextVar("the global batch of the step under way", default=None)


class _Current:
    """A global batch that is the one of the step under way for a while."""

    def __init__(self, batch: GlobalBatch) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        self._token = _current.set(self._batch)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class _Rows(NamedTuple):
    """Where the rows of the global batch stand in the ranks' blocks of `block` rows each, and this rank's in it."""

    block: int
    places: Tensor
    own: Tensor

    @classmethod
    def of(cls, positions: Tensor, group: Collective, *, wanted: int) -> _Rows:
        """Ranks tell each other which samples they have."""
        most = torch.tensor(len(positions), device=positions.device)
        group.all_reduce(most, "max").wait()
        block = int(most)
        mine = positions.new_full((block,), -1)
        mine[: len(positions)] = positions
        all_of_them = positions.new_empty(group.size * block)
        group.all_gather(all_of_them, mine).wait()
        real = (all_of_them >= 0).nonzero().flatten()
        if len(real) != wanted:
            raise UserCodeError(
                f"gather_samples: one microbatch of all ranks holds {len(real)} of the {wanted} samples of the global "
                "batch, and the others are computed at another time; leave batch.micro_samples out, and give every "
                "rank a sample (batch.global_samples of at least their number)"
            )
        order = all_of_them[real].argsort()
        places = real[order]
        where = torch.zeros_like(all_of_them)
        where[places] = torch.arange(wanted, device=positions.device)
        first = group.rank * block
        return cls(block, places, where[first : first + len(positions)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows, group: Collective) -> Tensor:
        ctx.rows, ctx.group, ctx.samples = rows, group, len(x)
        mine = x.new_zeros(rows.block, *x.shape[1:])
        mine[: len(x)] = x
        blocks = x.new_empty(group.size * rows.block, *x.shape[1:])
        group.all_gather(blocks, mine).wait()
        return blocks[rows.places]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        blocks = gradient.new_zeros(ctx.group.size * ctx.rows.block, *gradient.shape[1:])
        blocks[ctx.rows.places] = gradient
        own = gradient.new_empty(ctx.rows.block, *gradient.shape[1:])
        ctx.group.reduce_scatter(own, blocks).wait()
        return own[: ctx.samples], None, None
