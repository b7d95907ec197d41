"""Losses that a router has beside the loss of the model, each of one sequence of S tokens over E experts:

    balance = E sum_e f_e P_e    f_e: share of the choices that fell on e, P_e: mean share of its scores
                                 (Switch Transformers, arXiv:2101.03961, eq. 4 to 6)
    z       = 1/S sum_t logsumexp(logits_t)^2    (ST-MoE, arXiv:2202.08906, eq. 5)

What is minimised is the sum over sequences of weight * (coefficients * these), divided by the denominator of the global
batch as the loss itself is. It enters the gradient in the layer where it arises: the activations pass an identity whose
backward adds the loss's own gradient times `scale`. So nothing has to travel along a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Auxiliary:
    """What the mixtures must know of the microbatch that goes through them.

    `weights` `[batch]` are the sequences' weights in the loss, whole sequences', and `scale` the loss scale over the
    global denominator: it may be set as late as before the backward. `real` bool `[batch, seq]` is false for padding
    (None: there is none), and `samples` int64 `[batch]` are the samples' places in the run, for recorded routes. What
    was set in training is ignored in evaluation, and the other way round: a batch that nobody announced finds nothing.
    `terms` collects each layer's weighted loss over the tokens that this rank routes, `counted` the layers that have
    counted this microbatch's loads, so that a recomputation does not count them again.
    """

    weights: Tensor
    scale: float | None = None
    real: Tensor | None = None
    samples: Tensor | None = None
    training: bool = True
    terms: dict[str, Tensor] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)


class TakesAuxiliary(nn.Module):
    """The base of a module that has losses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary: Auxiliary | None = None

    @property
    def announced(self) -> Auxiliary | None:
        """What was set for batches of this mode, training or evaluation."""
        auxiliary = self.auxiliary
        return auxiliary if auxiliary is not None and auxiliary.training == self.training else None


def set_auxiliary(
    model: nn.Module,
    weights: Tensor,
    scale: float | None = None,
    *,
    real: Tensor | None = None,
    samples: Tensor | None = None,
) -> Auxiliary:
    """Tells every mixture of `model` of the microbatch that comes next. Returns what they share; see `Auxiliary`.

    A recomputation needs the same object: give it back with `use_auxiliary` if another microbatch came in between.
    """
    auxiliary = Auxiliary(weights, scale, real, samples, training=model.training)
    use_auxiliary(model, auxiliary)
    return auxiliary


def use_auxiliary(model: nn.Module, auxiliary: Auxiliary | None) -> None:
    """Gives every mixture of `model` this object again; None takes it away."""
    for module in model.modules():
        if isinstance(module, TakesAuxiliary):
            module.auxiliary = auxiliary


def counted_tokens(weights: Tensor, seq: int) -> Tensor:
    """Which tokens are no padding, bool `[batch, seq]`, from the weights `[batch]` or `[batch, seq]` of whole samples.

    A sample without weight is filler, and so are the tokens of a sample behind its last one with a weight: nothing
    that is counted depends on them.
    """
    if weights.ndim == 1:
        return (weights != 0)[:, None].expand(-1, seq)
    return (weights != 0).flip(1).cummax(1).values.flip(1)


def auxiliary_total(model: nn.Module) -> Tensor:
    """The last microbatch's weighted sum of the auxiliary losses, float64, of this rank's tokens and layers.

    To be summed over the ranks and divided by the denominator, as the loss is. 0 where there are none.
    """
    terms = {
        id(a): a.terms for m in model.modules() if isinstance(m, TakesAuxiliary) and (a := m.auxiliary) is not None
    }
    return sum((term for of in terms.values() for term in of.values()), start=torch.zeros((), dtype=torch.float64))


def balance_terms(shares: Tensor, *, counts: Tensor, lengths: Tensor, top_k: int) -> Tensor:
    """Each sequence's balance loss as far as these tokens go, `[batch]`; the terms of all its tokens add up to it.

    `shares` `[batch, seq, experts]` (0 for padding), `counts` int64 `[batch, experts]` and `lengths` int64 `[batch]`
    those of the whole sequence.
    """
    lengths = lengths.clamp(min=1)[:, None].to(shares.dtype)
    fallen = counts.to(shares.dtype) / (lengths * top_k)
    return counts.shape[-1] * (fallen * shares.sum(1) / lengths).sum(-1)


def z_terms(logits: Tensor, *, real: Tensor, lengths: Tensor) -> Tensor:
    """Each sequence's z-loss as far as these tokens go, `[batch]`; `logits` `[batch, seq, experts]`."""
    squares = logits.logsumexp(-1).square().masked_fill(~real, 0)
    return squares.sum(1) / lengths.clamp(min=1).to(logits.dtype)


class _Inject(torch.autograd.Function):
    """The identity on `x`; in the backward the scalar `loss` has the gradient `auxiliary.scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, auxiliary: Auxiliary) -> Tensor:
        ctx.auxiliary, ctx.like = auxiliary, loss.new_empty(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.auxiliary.scale is None:
            raise RuntimeError(
                "a router's auxiliary loss has no scale; set auxiliary.scale to the loss scale over the global "
                "denominator before the backward"
            )
        return gradients[0], torch.full_like(ctx.like, ctx.auxiliary.scale), None


def injected(x: Tensor, losses: Tensor, auxiliary: Auxiliary, *, name: str) -> Tensor:
    """`x`, through which the gradient of `weights . losses * scale` enters. `losses` `[batch]` are of the layer `name`.

    Raises `RuntimeError` where the weights are not one for each sequence.
    """
    if auxiliary.weights.shape != losses.shape:
        raise RuntimeError(
            f"{name} found weights {list(auxiliary.weights.shape)} for {losses.shape[0]} sequences; an auxiliary loss "
            f"weighs whole sequences: give one number for each"
        )
    loss = (losses * auxiliary.weights.to(losses.dtype)).sum()
    auxiliary.terms[name] = loss.detach().double()
    return _Inject.apply(x, loss, auxiliary)
