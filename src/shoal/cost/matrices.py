"""The matrices of a transformer's parameters, one by one, as this project's GPT keeps them: query, key and value apart.

What a low-rank codec sends of a gradient follows from their shapes.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cost.transformer import Transformer, layer_kinds

Shapes = tuple[tuple[int, int, int], ...]
"""(rows, columns, how many of them)"""


def matrix_shapes(model: Transformer, *, layers: float, embedding: bool, head: bool) -> Shapes:
    """Of a stage with so many layers, and the `embedding` and the `head` of the model where it holds them."""
    found = [shape for share, kind in layer_kinds(model) for shape in _of_layers(kind, round(share * layers))]
    if embedding:
        found.append((model.vocabulary, model.hidden, 1))
    if head and not (model.tied and embedding):
        found.append((model.vocabulary, model.hidden, 1))
    return tuple(shape for shape in found if shape[2])


def _of_layers(model: Transformer, layers: int) -> Iterator[tuple[int, int, int]]:
    hidden, own = model.hidden, model.attention_width
    yield own, hidden, layers
    yield model.kv_width, hidden, 2 * layers
    yield hidden, own, layers
    wide = model.feed_forward_matrices - 1
    copies = max(1, model.experts) * layers
    yield model.feed_forward, hidden, wide * copies
    yield hidden, model.feed_forward, copies
    if model.experts:
        yield model.experts, hidden, layers
    if model.experts and model.shared_feed_forward:
        yield model.shared_feed_forward, hidden, wide * layers
        yield hidden, model.shared_feed_forward, layers
