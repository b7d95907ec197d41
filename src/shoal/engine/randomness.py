"""Where a step's random numbers come from: from (seed, step, sample), never from what was drawn before.

Shoal's own dropout is keyed on the sample, so that its masks do not depend on the layout. A user's module may draw from
PyTorch's generator: that is seeded anew in each step from (seed, step, replica), so that a resumed run draws what the
uninterrupted one would have drawn, and no generator state needs saving.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.maths.counter import bits, key_of
from shoal.models.dropout import KeyedDropout, set_sample_keys


class Randomness:
    """Seeds what a step of `model` draws."""

    def __init__(self, model: nn.Module, *, seed: int, replica: int) -> None:
        self._seed, self._replica = seed, replica
        self._sample_key = key_of(seed, "dropout")
        self._keyed = [m for m in model.modules() if isinstance(m, KeyedDropout) and m.p > 0]

    def step(self, step: int) -> None:
        """Before a step."""
        seed = key_of(self._seed, "step", step, self._replica)
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes a millisecond to note it for absent GPUs
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)

    def microbatch(self, positions: Tensor) -> None:
        """Before the forward of a microbatch whose samples stand at `positions` (int64 [samples])."""
        if self._keyed:
            set_sample_keys(self._keyed, bits(self._sample_key, positions))
