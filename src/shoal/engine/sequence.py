"""A context rank's part of every sample: some of its tokens, and where they stand in their sequence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shoal.data.sample import Batch, Tree, first_leaf, map_tree

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
