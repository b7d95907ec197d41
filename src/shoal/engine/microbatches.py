"""Microbatches of one number and one size on all ranks, where the ranks of a replica work in lock-step.

Pipelines, sharded parameters and experts exchange tensors within every microbatch, so that no rank may have more of
them than another, nor of more samples; lengths are left as they are. What a rank lacks is made up by samples of
weight 0, which change no sum; their position is -1, and they are not counted.

A context rank's part of every sample: some of its tokens, and where they stand in their sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.data.sample import Batch, Tree, first_leaf, map_tree, padding_like


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


def leaves(*trees: object) -> list[Tensor]:
    """The leaves in the order in which `map_tree` visits them."""
    found: list[Tensor] = []
    for tree in trees:
        map_tree(lambda leaf: found.append(leaf) or leaf, tree)  # type: ignore[arg-type]
    return found


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
