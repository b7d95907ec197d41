"""The router of a mixture (Shazeer et al., arXiv:1701.06538): which experts a token goes to, and with what weight.

    scores = softmax(W x)  or  sigmoid(W x)
    chosen = the top_k largest of scores + b, equal ones by the lower index
    gates  = scores[chosen],  divided by their sum where normalised

The bias b takes part in the choice alone. Loss-free balancing (arXiv:2408.15664) moves it once a step, from the loads
of the whole global batch:  b_e <- b_e + rate * sign(mean load - load_e).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Losses that a router has beside the loss of the model, each of one sequence of S tokens over E experts:
#
#     balance = E sum_e f_e P_e    f_e: share of the choices that fell on e, P_e: mean share of its scores
#                                  (Switch Transformers, arXiv:2101.03961, eq. 4 to 6)
#     z       = 1/S sum_t logsumexp(logits_t)^2    (ST-MoE, arXiv:2202.08906, eq. 5)
#
# What is minimised is the sum over sequences of weight * (coefficients * these), divided by the denominator of the
# global batch as the loss itself is. It enters the gradient in the layer where it arises: the activations pass an
# identity whose backward adds the loss's own gradient times `scale`. So nothing has to travel along a pipeline.


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


Gate = Literal["softmax", "sigmoid"]


class Router(nn.Module):
    """Scores of `experts` for each token; a `StepStatistics`, whose sums are the step's loads and what was dropped.

    `bias_rate` None: no bias. Computed in float32 at least, under autocast too: choices made of rounded scores would
    be ties.
    """

    loads: Tensor
    last_loads: Tensor
    dropped: Tensor
    last_dropped: Tensor
    bias: Tensor | None

    def __init__(self, width: int, experts: int, *, gate: Gate, normalised: bool, bias_rate: float | None) -> None:
        super().__init__()
        self.gate, self.normalised, self.bias_rate = gate, normalised, bias_rate
        self.weight = nn.Parameter(torch.zeros(experts, width))
        self.register_buffer("bias", None if bias_rate is None else torch.zeros(experts))
        for name in ("loads", "last_loads"):
            self.register_buffer(name, torch.zeros(experts, dtype=torch.int64), persistent=False)
        for name in ("dropped", "last_dropped"):
            self.register_buffer(name, torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[..., width]` to logits and scores `[..., experts]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide))
            return logits, logits.softmax(-1) if self.gate == "softmax" else logits.sigmoid()

    def preferences(self, scores: Tensor) -> Tensor:
        """What decides: the scores and the bias, without gradient."""
        return scores.detach() if self.bias is None else scores.detach() + self.bias.to(scores.dtype)

    def gates(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """The weights `[..., top_k]` of the chosen experts."""
        gates = scores.gather(-1, chosen)
        return gates / gates.sum(-1, keepdim=True) if self.normalised else gates

    def shares(self, scores: Tensor) -> Tensor:
        """`scores` as shares that add up to 1 over the experts, for the balance loss."""
        return scores if self.gate == "softmax" else scores / scores.sum(-1, keepdim=True)

    @torch.no_grad()
    def count(self, counts: Tensor, *, kept: Tensor | None = None) -> None:
        """Adds the tokens `[experts]` that chose each expert in a forward; `kept`: how many found room, a scalar."""
        self.loads += counts
        if kept is not None:
            self.dropped += counts.sum() - kept

    def step_sums(self) -> Tensor:
        """float64 `[experts + 1]`: tokens for each expert since the last commit, and choices without room."""
        return torch.cat((self.loads, self.dropped)).double()

    @torch.no_grad()
    def commit_sums(self, total: Tensor) -> None:
        """Takes the loads of the whole step: one move of the bias, where there is one."""
        loads = total[:-1]
        self.last_loads.copy_(loads)
        self.last_dropped.copy_(total[-1:])
        if self.bias is not None and self.bias_rate is not None:
            self.bias += self.bias_rate * torch.sign(loads.mean() - loads).to(self.bias.dtype)
        self.discard_sums()

    def discard_sums(self) -> None:
        """Forgets what was counted since the last commit."""
        self.loads.zero_()
        self.dropped.zero_()

    def reset_buffers(self) -> None:
        """The state before the first step."""
        for buffer in self.buffers():
            buffer.zero_()

    def extra_repr(self) -> str:
        experts, width = self.weight.shape
        return f"{width}, {experts}, gate={self.gate}, normalised={self.normalised}, bias_rate={self.bias_rate}"


def top_k(preferences: Tensor, k: int) -> Tensor:
    """The indices `[..., k]` of the largest along the last dimension, largest first; of equal ones the lower first."""
    return torch.sort(preferences, dim=-1, descending=True, stable=True).indices[..., :k]


# Capacity: how many tokens of one sequence an expert takes (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961).
#
#     capacity = ceil(capacity_factor * top_k * length / experts)
#
# It is counted in each sequence by itself, and the first tokens are the ones that stay. So what is dropped depends
# neither on the batch a sequence is in, nor on how it is split over ranks.


SPAN = 1 << 32
"""Positions are below it, so that one integer holds (sequence, expert, position) in this order."""
NEVER = torch.iinfo(torch.int64).max


def capacity_of(lengths: Tensor, *, factor: float, top_k: int, experts: int) -> Tensor:
    """Tokens that an expert takes of sequences of `lengths` int64 `[batch]`; as `lengths`."""
    return torch.ceil(lengths.double() * (factor * top_k) / experts).long()


def within_capacity(
    chosen: Tensor,
    places: Tensor,
    *,
    real: Tensor,
    capacity: Tensor,
    experts: int,
    gather: Callable[[Tensor], Tensor],
) -> Tensor:
    """Which choices are kept, bool `[batch, seq, top_k]`; those of padding are not, and take no room.

    `chosen` `[batch, seq, top_k]`, `places` and `real` `[batch, seq]`, `capacity` `[batch]`. `gather(keys)` brings the
    keys of all ranks that hold parts of the same sequences, and perhaps `NEVER`s. How many of a sequence chose the same
    expert before is the distance between two places in the sorted keys.
    """
    sequence = torch.arange(chosen.shape[0], device=chosen.device)[:, None, None]
    first = (sequence * experts + chosen) * SPAN
    keys = torch.where(real[..., None], first + places[..., None], NEVER)
    everyone = gather(keys).sort().values
    earlier = torch.searchsorted(everyone, keys) - torch.searchsorted(everyone, first)
    return real[..., None] & (earlier < capacity[:, None, None])
