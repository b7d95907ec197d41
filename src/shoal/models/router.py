"""The router of a mixture (Shazeer et al., arXiv:1701.06538): which experts a token goes to, and with what weight.

    scores = softmax(W x)  or  sigmoid(W x)
    chosen = the top_k largest of scores + b, equal ones by the lower index
    gates  = scores[chosen],  divided by their sum where normalised

The bias b takes part in the choice alone. Loss-free balancing (arXiv:2408.15664) moves it once a step, from the loads
of the whole global batch:  b_e <- b_e + rate * sign(mean load - load_e).

Capacity: how many tokens of one sequence an expert takes (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961).

    capacity = ceil(capacity_factor * top_k * length / experts)

It is counted in each sequence by itself, and the first tokens are the ones that stay. So what is dropped depends
neither on the batch a sequence is in, nor on how it is split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
