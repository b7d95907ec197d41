"""The router of a mixture (Shazeer et al., arXiv:1701.06538): which experts a token goes to, and with what weight.

    scores = softmax(W x)  or  sigmoid(W x)
    chosen = the top_k largest of scores + b, equal ones by the lower index
    gates  = scores[chosen],  divided by their sum where normalised

The bias b takes part in the choice alone. Loss-free balancing (arXiv:2408.15664) moves it once a step, from the loads
of the whole global batch:  b_e <- b_e + rate * sign(mean load - load_e).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Gate = Literal["softmax", "sigmoid"]


class Router(nn.Module):
    """Scores of `experts` for each token; a `StepStatistics`, whose sums are the loads of the step.

    `bias_rate` None: no bias. Computed in float32 at least, under autocast too: choices made of rounded scores would
    be ties.
    """

    loads: Tensor
    last_loads: Tensor
    bias: Tensor | None

    def __init__(self, width: int, experts: int, *, gate: Gate, normalised: bool, bias_rate: float | None) -> None:
        super().__init__()
        self.gate, self.normalised, self.bias_rate = gate, normalised, bias_rate
        self.weight = nn.Parameter(torch.zeros(experts, width))
        self.register_buffer("bias", None if bias_rate is None else torch.zeros(experts))
        self.register_buffer("loads", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("last_loads", torch.zeros(experts, dtype=torch.int64), persistent=False)

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
    def count(self, counts: Tensor) -> None:
        """Adds the tokens `[experts]` that a forward gave to each expert."""
        self.loads += counts

    def step_sums(self) -> Tensor:
        """float64 `[experts]`: tokens for each expert since the last commit."""
        return self.loads.double()

    @torch.no_grad()
    def commit_sums(self, total: Tensor) -> None:
        """Takes the loads of the whole step: one move of the bias, where there is one."""
        self.last_loads.copy_(total)
        if self.bias is not None and self.bias_rate is not None:
            self.bias += self.bias_rate * torch.sign(total.mean() - total).to(self.bias.dtype)
        self.discard_sums()

    def discard_sums(self) -> None:
        """Forgets what was counted since the last commit."""
        self.loads.zero_()

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
