"""The vote on a step, taken on the device.

Whether norm and loss are finite decides whether there is an update, and how far it is clipped. A GPU computes both some
time after the host has launched the backward. A host that waits for them lets the GPU run dry. So the kernels of the
update get the outcome as tensors, and are launched at once; norm and loss travel to pinned memory meanwhile, and are
read while the update runs: the host is back before the GPU has ended.

    divisor = scale max(1, |g| / limit),   found_inf = 1 where |g| or the loss is not finite, else 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceVote:
    """Of `norm`, the 2-norm of the agreed gradient, and `loss`, that of the global batch: scalars."""

    def __init__(self, norm: Tensor, loss: Tensor) -> None:
        both = torch.stack([norm.double(), loss.double().to(norm.device)])
        self._norm = both[0]
        self._on_host, self._copied = _to_host(both)
        self.found_inf = 1 - torch.isfinite(both).all().float()
        """1.0: nothing is updated."""

    def divisor(self, scale: float, limits: Sequence[float]) -> Tensor | None:
        """What the gradients, which hold `scale`, are divided by, so that their norm is at most each of `limits`; None:
        they are as they are to be. A float32 scalar.
        """
        if not limits:
            return None if scale == 1.0 else torch.full((), scale, device=self._norm.device)
        over = self._norm / min(limits)
        return (torch.where(over > 1, over, torch.ones_like(over)) * scale).float()

    def read(self) -> tuple[float, float]:
        """Norm and loss, when they are there. What was launched after them may still run."""
        if self._copied is not None:
            self._copied.synchronize()
        norm, loss = self._on_host.tolist()
        return norm, loss

    @staticmethod
    def finite(norm: float, loss: float) -> bool:
        """What `found_inf` says, on the host."""
        return math.isfinite(norm) and math.isfinite(loss)


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The numbers in memory of the host, and the event after which they are there."""
    if numbers.device.type != "cuda":
        return numbers, None
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return there, copied
