"""What a rank does with the logits of its part of the model: the loss, and the outputs that accuracy is judged of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.engine.chunked_loss import in_chunks
from shoal.engine.compute import as_it_is
from shoal.engine.loss import Loss, cross_entropy
from shoal.engine.outputs import described, prediction_in, with_prediction
from shoal.errors import UserCodeError
from shoal.parallel.tensor.vocabulary import VocabularySplit, gather_logits, vocabulary_cross_entropy


def loss_of_logits(
    loss: Loss, vocabulary: VocabularySplit | None, mesh: Mesh, *, model: nn.Module | None, chunks: int
) -> Loss:
    """`loss` of logits that may be split over `tensor`; `chunks`: over so many parts of the tokens, one by one.

    `model` is this rank's part of it, None where that does not end with the head: its own forward then hands over to
    another rank. Raises `UserCodeError` for a model whose head no one names.
    """
    own = split_loss(loss, vocabulary, mesh)
    return own if model is None or chunks == 1 else in_chunks(model, own, chunks)


def split_loss(loss: Loss, vocabulary: VocabularySplit | None, mesh: Mesh) -> Loss:
    """The loss over logits that are split over `tensor`: cross-entropy as they are, another after gathering them."""
    if vocabulary is None:
        return loss
    group = mesh.axis("tensor")

    def of_parts(outputs: Any, targets: Tensor) -> Tensor:
        logits = _logits(outputs)
        if loss is cross_entropy:
            return vocabulary_cross_entropy(logits, targets, split=vocabulary, group=group)
        return loss(with_prediction(outputs, gather_logits(logits, vocabulary, group)), targets)

    return of_parts


def gathered_outputs(vocabulary: VocabularySplit | None, mesh: Mesh) -> Callable[[Any], Any]:
    """Outputs `[samples, classes]`, of which accuracy is judged, over all classes; those of a sequence as they are."""
    if vocabulary is None:
        return as_it_is
    group = mesh.axis("tensor")

    def whole(outputs: Any) -> Any:
        logits = _logits(outputs)
        return with_prediction(outputs, gather_logits(logits, vocabulary, group)) if logits.ndim == 2 else outputs

    return whole


def _logits(outputs: Any) -> Tensor:
    """The logits of a model whose head is split. Raises `UserCodeError` where the outputs do not say which they are."""
    found = prediction_in(outputs)
    if found is None:
        raise UserCodeError(
            f"the model returned {described(outputs)}, and layout.tensor splits its logits: name them 'logits', so "
            "that ranks know what to put together"
        )
    return found
