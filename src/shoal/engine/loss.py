"""The loss as a sum: `sum(losses * weights)`, to be divided by the weights of the whole global batch.

A loss is a callable of (outputs, targets) that returns one value per sample or per position and averages nothing.
Then padding (weight 0), microbatches, uneven shares and the number of ranks cannot change what is minimised.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.engine.config import DistillationConfig
from shoal.errors import UserCodeError
from shoal.models.roles import role_of
from shoal.parallel.tensor.layers import ColumnLinear

# What a model returns, and the prediction in it that built-in losses and accuracies are taken of.
#
# A model may return a tensor, or several things of which one is the prediction:
#
#     a mapping or dataclass     its `logits`, else its only tensor          (also transformers' `ModelOutput`)
#     a tuple or list            its first tensor
#
# A user's own loss gets the outputs as they are.


PREDICTION = "logits"


def prediction_in(outputs: Any) -> Tensor | None:
    """The prediction; None where nothing says which tensor it is."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple | list):
        return next((entry for entry in outputs if isinstance(entry, Tensor)), None)
    key = _key_in(outputs)
    return None if key is None else _named(outputs)[key]


def with_prediction(outputs: Any, prediction: Tensor) -> Any:
    """`outputs` with another prediction in its place, such as one that is whole where a rank had a part."""
    if isinstance(outputs, Tensor):
        return prediction
    if isinstance(outputs, tuple | list):
        place = next(index for index, entry in enumerate(outputs) if isinstance(entry, Tensor))
        changed = [*outputs[:place], prediction, *outputs[place + 1 :]]
        make: Any = getattr(outputs, "_make", list if isinstance(outputs, list) else tuple)
        return make(changed)
    key = _key_in(outputs)
    assert key is not None, "outputs without a prediction"
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return dataclasses.replace(outputs, **{key: prediction})
    twin = cast(Any, copy.copy(outputs))
    twin[key] = prediction
    return twin


def described(outputs: Any) -> str:
    """The outputs for a message: the shape of a tensor, the names of what is in a mapping or dataclass."""
    if isinstance(outputs, Tensor):
        return f"a tensor {tuple(outputs.shape)}"
    names = ", ".join(map(str, _named(outputs)))
    return f"a {type(outputs).__name__}{f' of {names}' if names else ''}"


def _key_in(outputs: Any) -> str | None:
    tensors = [name for name, entry in _named(outputs).items() if isinstance(entry, Tensor)]
    if PREDICTION in tensors:
        return PREDICTION
    return tensors[0] if len(tensors) == 1 else None


def _named(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    return {}


Loss = Callable[[Any, Any], Tensor]


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Logits [..., classes] and integer targets [...] to losses [...], in float32 at least.

    Of outputs that hold several things it takes the prediction.
    """
    logits = prediction_in(outputs)
    if logits is None or logits.ndim != targets.ndim + 1 or logits.shape[:-1] != targets.shape:
        raise UserCodeError(
            f"the model returned {described(outputs)} for targets {_shape(targets)}; cross-entropy needs logits "
            "[*targets, classes]. Return those, or name a loss of your own in [loss]"
        )
    if targets.dtype != torch.int64:
        raise UserCodeError(
            f"targets are {str(targets.dtype).removeprefix('torch.')}; cross-entropy needs integers (int64). For "
            'regression set loss.kind = "squared_error"'
        )
    wide = at_least_float32(logits.flatten(0, -2) if logits.ndim > 1 else logits)
    try:
        return F.cross_entropy(wide, targets.reshape(-1), reduction="none").view(targets.shape)
    except IndexError:
        raise UserCodeError(
            f"targets lie between {int(targets.min())} and {int(targets.max())}, and the model gives logits of "
            f"{logits.shape[-1]} classes; targets must lie between 0 and {logits.shape[-1] - 1} (-100 is left out)"
        ) from None


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    """(prediction - targets)^2, elementwise. The shapes must be equal: broadcasting hides mistakes."""
    prediction = prediction_in(outputs)
    if prediction is None or prediction.shape != targets.shape:
        raise UserCodeError(f"the model returned {described(outputs)} for targets {_shape(targets)}; make them equal")
    return (at_least_float32(prediction) - targets).square()


def weighted_sum(losses: Any, weights: Tensor, *, ones: bool = False) -> Tensor:
    """`sum(losses * weights)`, a scalar; see `weighted_losses`."""
    return weighted_losses(losses, weights, ones=ones).sum()


def weighted_losses(losses: Any, weights: Tensor, *, ones: bool = False) -> Tensor:
    """`losses * weights`, in the shape of `weights`. Dimensions of `losses` behind those of `weights` are averaged.

    Positions of weight 0 do not count, whatever their loss. `ones`: every weight is known to be 1. Raises
    `UserCodeError` for losses of another shape.
    """
    if not isinstance(losses, Tensor) or losses.shape[: weights.ndim] != weights.shape:
        raise UserCodeError(
            f"the loss returned {_shape(losses)} for weights {tuple(weights.shape)}; return one value per sample or "
            "position and average nothing (in PyTorch: reduction='none')"
        )
    losses = at_least_float32(losses)
    if losses.ndim > weights.ndim:
        losses = losses.flatten(weights.ndim).mean(-1)
    if ones:
        return losses
    weights = weights.to(losses.dtype)
    return losses.masked_fill(weights == 0, 0) * weights


def at_least_float32(tensor: Tensor) -> Tensor:
    """Sums of half precision overflow or stall; nothing is summed in less than float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """A tuple of inputs becomes positional arguments, a mapping keywords, anything else the one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _shape(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# Distillation: a trained model, the teacher, says what the classes of each sample are worth (arXiv:1503.02531).
#
#     loss = (1 - weight) loss + weight T^2 KL( softmax(teacher / T) || softmax(student / T) )
#
# The teacher computes without gradients, in evaluation mode, on the samples of its own rank. Evaluation measures the
# student's own loss.


@dataclass(frozen=True)
class Distillation:
    """`teacher` is whole, in evaluation mode, and not trained."""

    config: DistillationConfig
    teacher: nn.Module

    def __call__(self, inputs: Any, outputs: Any, losses: Tensor) -> Tensor:
        """The losses of a forward that gave `outputs`, with the teacher's part. Raises `UserCodeError` where both have
        other classes.
        """
        if not torch.is_grad_enabled():
            return losses
        with torch.no_grad():
            wanted = prediction_in(call_model(self.teacher, inputs))
        own = prediction_in(outputs)
        if wanted is None or own is None or wanted.shape != own.shape:
            raise UserCodeError(
                f"distillation.teacher gives {described(wanted)}, and the model {described(outputs)}: both need logits "
                "of the same classes"
            )
        return (1 - self.config.weight) * losses + self.config.weight * divergence(own, wanted, self.config.temperature)


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL of both softened distributions; logits `[..., classes]` to `[...]`."""
    own = F.log_softmax(at_least_float32(student) / temperature, dim=-1)
    wanted = F.log_softmax(at_least_float32(teacher) / temperature, dim=-1)
    return temperature**2 * (wanted.exp() * (wanted - own)).sum(-1)


# The loss of some tokens after the other, so that a rank never holds the logits of all.
#
# With a large vocabulary V, logits are the largest tensors of a step: `tokens x V` numbers, as many again in their
# softmax and in their gradient. Here the head hands its input on, and the loss multiplies one chunk of the tokens after
# the other with the head's weight, and keeps no logits. There are two ways to the gradient:
#
#     again     keep the head's input, tokens x width, and compute each chunk's logits again in the backward
#               (`torch.utils.checkpoint`): the head's product and the losses are computed twice
#     at once   compute the gradients with the losses, while a chunk's logits are there, up to one factor that only the
#               backward knows (as Liger Kernel does, arXiv:2410.10989): nothing is computed twice, and what is kept are
#               the gradients of the head's input and of its weight
#
# With logits z of a token, its softmax p, its target y and what its loss weighs, k:
#
#   dz = k (p - onehot(y)),  dx = dz W,  dW = sum of dz^T x;  the backward brings c k for the loss, and gives c dx, c dW
#
# At once needs a plain linear head, the weights of the losses before the forward (`ChunkedLoss.expect`), and gradients
# that do not need a loss scale to be representable. Either way at most 3 x tokens / chunks x V numbers are there at
# once. It is the same sum of the same terms; only the weight's gradient is summed in another order. Evaluations keep
# all logits: without a gradient there is one tensor of them.


LEFT_OUT = -100
"""The target of a position that has no loss, as in PyTorch."""
PROPORTIONAL = 1e-4
"""Relative to the largest: how far a token's gradient may be from the weight that was announced, by rounding."""


def in_chunks(model: nn.Module, loss: Loss, chunks: int) -> ChunkedLoss:
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

    @property
    def linear(self) -> nn.Linear | None:
        """The head, where it is a product with a weight and nothing else."""
        head = self._head
        return head if type(head) is nn.Linear and not hasattr(head, "parametrizations") else None

    def product(self, x: Tensor) -> Tensor:
        """Logits `[..., out]` of what was given, or of a part of it."""
        return self._head.product(x) if isinstance(self._head, ColumnLinear) else self._inner(x)


class ChunkedLoss:
    """`loss` of the head's logits. `model` and `head` are names, for messages."""

    def __init__(self, model: str, head: str, postponed: PostponedHead, loss: Loss, chunks: int) -> None:
        self.model, self.head, self.postponed, self.loss, self.chunks = model, head, postponed, loss, chunks
        self._weights: Tensor | None = None

    @property
    def may_expect(self) -> bool:
        """Whether gradients may be computed with the losses."""
        return self.loss is cross_entropy and self.postponed.linear is not None

    def expect(self, weights: Tensor) -> None:
        """Before a forward: what its losses will be multiplied by, `[samples]` or in the shape of the targets, up to a
        factor. Gradients are then computed with the losses.
        """
        self._weights = weights

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
        head, weights = self.postponed.linear, self._weights
        if weights is not None and head is not None and targets.shape[: weights.ndim] == weights.shape:
            self._check_targets(targets, head.out_features)
            shares = weights.view(*weights.shape, *[1] * (targets.ndim - weights.ndim)).expand(targets.shape)
            flat = given.flatten(0, -2), targets.reshape(-1), shares.reshape(-1)
            return _LossesAndGradients.apply(head.weight, head.bias, *flat, self.chunks).view(targets.shape)
        parts = zip(given.flatten(0, -2).chunk(self.chunks), targets.reshape(-1).chunk(self.chunks), strict=True)
        losses = [
            checkpoint(self._part, own, wanted, use_reentrant=False, preserve_rng_state=False) for own, wanted in parts
        ]
        return torch.cat(losses).view(targets.shape)

    def _part(self, given: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.postponed.product(given), targets)

    def _check_targets(self, targets: Tensor, classes: int) -> None:
        """On a CPU, where it costs nothing, `cross_entropy` says what is wrong; a GPU stops by itself."""
        if targets.dtype == torch.int64 and targets.device.type != "cpu":
            return
        wrong = (targets >= classes) | ((targets < 0) & (targets != LEFT_OUT))
        if targets.dtype != torch.int64 or bool(wrong.any()):
            one = targets[wrong][:1] if bool(wrong.any()) else targets.reshape(-1)[:1]
            self.loss(torch.zeros(1, classes), one)


class _LossesAndGradients(torch.autograd.Function):
    """Losses `[tokens]` of `given` `[tokens, width]`, and with them the gradients. See above."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, given: Tensor, targets: Tensor, shares: Tensor, chunks: int
    ) -> Tensor:
        kind = given.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype
        wide = torch.float64 if given.dtype == torch.float64 else torch.float32
        trains, biased = ctx.needs_input_grad[0], bias is not None
        d_given = torch.empty_like(given, dtype=low)
        d_weight = torch.zeros_like(weight, dtype=wide) if trains else None
        d_bias = torch.zeros_like(bias, dtype=wide) if biased and bias is not None else None
        losses, at = [], 0
        counted = shares.to(wide).masked_fill(targets == LEFT_OUT, 0)
        with torch.autocast(kind, enabled=False):
            matrix, offset = weight.to(low), bias.to(low) if bias is not None else None
            for own, wanted, share in zip(
                given.chunk(chunks), targets.chunk(chunks), counted.chunk(chunks), strict=True
            ):
                own = own.to(low)
                loss, d_logits = _loss_and_gradient(F.linear(own, matrix, offset), wanted, share)
                losses.append(loss)
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
                d_logits = d_logits.to(low)
                torch.mm(d_logits, matrix, out=d_given[at : at + len(own)])
                if d_weight is not None and low == wide:
                    d_weight.addmm_(d_logits.t(), own)
                elif d_weight is not None:
                    d_weight += d_logits.t() @ own
                at += len(own)
        ctx.save_for_backward(d_given, d_weight, d_bias, counted)
        ctx.types = weight.dtype, given.dtype
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_given, d_weight, d_bias, counted = ctx.saved_tensors
        factor = _factor(gradients[0], counted)
        of_weight, of_given = ctx.types
        return (
            None if d_weight is None else (d_weight * factor).to(of_weight),
            None if d_bias is None else (d_bias * factor).to(of_weight),
            (d_given * factor).to(of_given),
            *[None] * 3,
        )


def _loss_and_gradient(logits: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Losses `[tokens]`, and `shares` times their gradients by the logits, in the memory of the widened logits."""
    z = at_least_float32(logits)
    places = targets.clamp(min=0).unsqueeze(1)
    z.sub_(z.amax(1, keepdim=True))
    found = z.gather(1, places).squeeze(1)
    total = z.exp_().sum(1, keepdim=True)
    losses = (total.squeeze(1).log() - found).masked_fill(targets == LEFT_OUT, 0)
    z.div_(total).scatter_add_(1, places, torch.full_like(total, -1.0))
    return losses, z.mul_(shares.unsqueeze(1))


def _factor(brought: Tensor, counted: Tensor) -> Tensor:
    """The c of `brought` = c `counted`, where positions that are left out do not count. Raises `UserCodeError` where
    there is none, which a GPU is not asked.
    """
    square = counted.square().sum()
    factor = torch.where(square > 0, (brought * counted).sum() / square, torch.zeros_like(square))
    if brought.device.type == "cpu":
        off = (brought - factor * counted).masked_fill(counted == 0, 0).abs().max()
        if off > PROPORTIONAL * brought.abs().max():
            raise UserCodeError(
                "the losses were weighed otherwise than was announced before the forward, so the gradients that were "
                "computed with them are of no use; set memory.loss_chunks = 1"
            )
    return factor


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
