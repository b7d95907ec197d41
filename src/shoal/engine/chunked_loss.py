"""The loss of some tokens after the other, so that a rank never holds the logits of all.

With a large vocabulary V, logits are the largest tensors of a step: `tokens x V` numbers, as many again in their
softmax and in their gradient. Here the head hands its input on, and the loss multiplies one chunk of the tokens after
the other with the head's weight, keeps only the losses, and does so again in the backward (`torch.utils.checkpoint`;
Liger Kernel, arXiv:2410.10989, chunks its fused cross-entropy the same way):

    kept for the backward    the head's input, tokens x width
    at once                  logits of a chunk, their softmax, their gradient: 3 x tokens / chunks x V
    computed twice           the head's product and the losses

It is the same sum of the same terms; only the weight's gradient is summed in another order. Evaluations keep all
logits: without a gradient there is one tensor of them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.engine.loss import Loss
from shoal.engine.outputs import described, prediction_in
from shoal.errors import UserCodeError
from shoal.models.roles import role_of
from shoal.parallel.tensor.layers import ColumnLinear


def in_chunks(model: nn.Module, loss: Loss, chunks: int) -> Loss:
    """`loss`, one value for each token, over `chunks` chunks of the tokens; `model`'s head leaves its product to it.

    Called once for a model, after ranks have split it. Raises `UserCodeError` for a model without a head that is named.
    """
    name, head = _head_of(model)
    postponed = PostponedHead(head)
    head.forward = postponed
    return ChunkedLoss(type(model).__name__, name, postponed, loss, chunks)


class PostponedHead:
    """The `forward` of a head: with gradients it gives its input, `[..., in]`, and `product` the logits of any part."""

    def __init__(self, head: nn.Module) -> None:
        self._head, self._inner = head, head.forward
        self._given: weakref.ref[Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._inner(x)
        entered = self._head.entrance(x) if isinstance(self._head, ColumnLinear) else x
        given = entered.view_as(entered)
        self._given = weakref.ref(given)
        return given

    def gave(self, tensor: Tensor | None) -> bool:
        """Is it, itself, what the last forward gave?"""
        return tensor is not None and self._given is not None and self._given() is tensor

    def product(self, x: Tensor) -> Tensor:
        """Logits `[..., out]` of what was given, or of a part of it."""
        return self._head.product(x) if isinstance(self._head, ColumnLinear) else self._inner(x)


@dataclass(frozen=True)
class ChunkedLoss:
    """`loss` of the head's logits. `model` and `head` are names, for messages."""

    model: str
    head: str
    postponed: PostponedHead
    loss: Loss
    chunks: int

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """The losses, in the shape of `targets`. Raises `UserCodeError` where the outputs are not the head's."""
        if not torch.is_grad_enabled():
            return self.loss(outputs, targets)
        given = prediction_in(outputs)
        if given is None or not self.postponed.gave(given):
            raise UserCodeError(
                f"memory.loss_chunks = {self.chunks}: {self.model} returned {described(outputs)}, and not what its "
                f"head '{self.head}' gave, so chunks of tokens cannot go through the head alone; return the head's "
                "output as it is, or set memory.loss_chunks = 1"
            )
        if given.shape[:-1] != targets.shape:
            raise UserCodeError(
                f"the head '{self.head}' of {self.model} was called with {tuple(given.shape)} for targets "
                f"{tuple(targets.shape)}; cross-entropy needs logits [*targets, classes]"
            )
        parts = zip(given.flatten(0, -2).chunk(self.chunks), targets.reshape(-1).chunk(self.chunks), strict=True)
        losses = [
            checkpoint(self._part, own, wanted, use_reentrant=False, preserve_rng_state=False) for own, wanted in parts
        ]
        return torch.cat(losses).view(targets.shape)

    def _part(self, given: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.postponed.product(given), targets)


def _head_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The name of the module that makes the logits, and the module: what transformers calls the output embeddings, or
    the linear layer whose weight has the role "head"."""
    names = {module: name for name, module in model.named_modules()}
    of_transformers = getattr(model, "get_output_embeddings", None)
    if callable(of_transformers) and isinstance(found := of_transformers(), nn.Module) and found in names:
        return names[found], found
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        if last == "weight" and not isinstance(module, nn.Embedding) and role_of(model, name).kind == "head":
            return owner, module
    raise UserCodeError(
        f"{type(model).__name__} names no head, whose product memory.loss_chunks divides: give the weight of its last "
        'linear layer the role "head" in parameter_roles(), or set memory.loss_chunks = 1'
    )
