"""DP-SGD at a client: its update hides each of its samples.

    g = (sum over the batch of g_j min(1, C / |g_j|) + N(0, (z C)^2)) / B

g_j is the gradient of sample j, by `torch.func.vmap` of `grad`; the batch takes each sample with chance B / n (Abadi et
al., arXiv:1607.00133, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from shoal.data.sample import Tree, map_tree
from shoal.federated.config import PrivacyConfig
from shoal.federated.privacy.noise import Noise

TOGETHER_BYTES = 1 << 28
"""Gradients of so many bytes are held at a time."""


class PrivateGradient:
    """Takes the place of the plain gradient in local training. `batch` is B."""

    def __init__(self, config: PrivacyConfig, *, batch: int, noise: Noise) -> None:
        self.config, self.batch, self.noise = config, batch, noise

    def __call__(
        self, loss: Callable[..., Any], model: Tensor, inputs: Tree, targets: Tree, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The private gradient [numel], and the mean loss, which never leaves the client."""

        def of_one(inputs: Tree, targets: Tree, weight: Tensor) -> tuple[Tensor, Tensor]:
            one, its_targets = (map_tree(lambda leaf: leaf[None], tree) for tree in (inputs, targets))
            gradient, value = grad_and_value(loss)(model, one, its_targets, weight[None])
            scale = (self.config.clip / gradient.norm().clamp(min=1e-12)).clamp(max=1.0)
            counts = (weight.sum() > 0).to(gradient.dtype)
            return gradient * scale * counts, value * counts

        total, losses = torch.zeros(model.numel(), dtype=torch.float64), torch.zeros(())
        rows = max(1, TOGETHER_BYTES // (model.numel() * model.element_size()))
        for first in range(0, len(weights), rows):
            part = slice(first, first + rows)
            x, y = (map_tree(lambda leaf, p=part: leaf[p], tree) for tree in (inputs, targets))
            gradients, values = vmap(of_one, randomness="different")(x, y, weights[part])
            total += gradients.double().sum(0)
            losses = losses + values.sum()
        total += self.config.noise * self.config.clip * self.noise(model.numel())
        real = (weights.flatten(1).sum(1) if weights.ndim > 1 else weights).count_nonzero().clamp(min=1)
        return (total / self.batch).to(model.dtype), losses / real
