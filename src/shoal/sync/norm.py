"""The norm of the whole model's gradient, each number counted once.

    |g| = sqrt(sum over the ranks of a replica of |g_r|^2),   g_r the numbers that rank r counts

Squares are added in float64: that of a float32 gradient may not fit into a float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.collective import Collective


def global_norm(own: Tensor | None, replica: Collective, *, device: torch.device) -> Tensor:
    """The norm from this rank's `own` one (None where it counts nothing): a scalar, the same bits on every rank."""
    if replica.size == 1:
        return torch.zeros((), device=device) if own is None else own
    square = torch.zeros((), dtype=torch.float64, device=device) if own is None else own.double().square()
    replica.all_reduce(square).wait()
    return square.sqrt()
