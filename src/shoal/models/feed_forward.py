"""The layers between attentions: gated with SiLU (SwiGLU, Shazeer, arXiv:2002.05202) or plain with GELU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), over the last dimension of `[..., width]`."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden_width, bias=False)
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    """down(gelu(up(x))), over the last dimension of `[..., width]`."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))
