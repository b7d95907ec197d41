"""What a server looks at before an update counts: its form, its numbers, its size. A refusal names the client."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.codec.codec import kernels_for
from shoal.federated.config import FederatedConfig
from shoal.federated.strategy import Update

MOST_SAMPLES = 1 << 40
MOST_STEPS = 1 << 30


def refusal(update: Update, config: FederatedConfig, *, numel: int) -> str | None:
    """One sentence if the update cannot count; None if it can."""
    who = f"client {update.client}"
    if not 1 <= update.samples <= MOST_SAMPLES or not 1 <= update.steps <= MOST_STEPS:
        return f"{who} says that it took {update.steps} steps over {update.samples} samples: both are at least 1"
    if not 0 <= update.momentum < 1:
        return f"{who} says that its momentum is {update.momentum:g}: it is from 0 up to but not 1"
    vectors = {"update": update.delta, "control": update.control}
    if (update.control is not None) != config.sends_control:
        return f"{who} sent {'a' if update.control is not None else 'no'} control: {config.variant} asks otherwise"
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != (numel,) or not vector.is_floating_point():
            return f"{who} sent an {name} of shape {list(vector.shape)}: the model has {numel} numbers"
        if not _is_finite(vector):
            return f"the {name} of {who} is not finite: its training diverged; lower optimizer.lr there"
    if config.largest_norm is not None:
        norm = float(update.delta.double().norm())
        if norm > config.largest_norm:
            return (
                f"the update of {who} has norm {norm:.3g}, and federated.largest_norm is {config.largest_norm:g}: it "
                "is poisoned, or the bound is too low"
            )
    return None


def _is_finite(vector: Tensor) -> bool:
    """One pass over the vector, by a kernel where there is one."""
    kernels = kernels_for(vector)
    if kernels is not None:
        return math.isfinite(kernels.largest(vector))
    return bool(torch.isfinite(torch.linalg.vector_norm(vector, ord=torch.inf)))
