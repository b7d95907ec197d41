"""Dropout whose masks belong to samples, not to batches.

The mask of an element is a pure function of (the sample's key, the layer's name, the element's index in the sample):

    keep  <=>  bits(bits(sample key, layer), index) >= p 2^64

So it is the same however a batch is split over ranks and microbatches, whatever the order, and again when a layer is
recomputed in the backward pass. `torch.nn.functional.dropout` can promise none of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal.maths.counter import bits, indices, key_of


class KeyedDropout(nn.Module):
    """Zeroes a share `p` of the features in training and scales the others by 1 / (1 - p); the identity otherwise.

    `name` tells the layers of a model apart: two layers of one name drop the same elements.
    """

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout p = {p}; a share of features is from 0 up to but not 1: choose one, such as 0.1")
        self.p = p
        self.name = name
        self.key = key_of(0, "dropout", name)
        self.threshold = math.floor(p * 2**64) - 2**63  # of bits read as signed integers
        self.sample_keys: Tensor | None = None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Drops from `x` `[batch, ...]`.

        `positions` `[batch, n]` (int64) are the places in their samples of `x`'s slices along dimension 1, for a rank
        that holds a part of each sample; default 0, 1, 2, ...
        Raises `RuntimeError` in training without keys, or with as many keys as `x` has not samples.
        """
        if self.p == 0 or not self.training:
            return x
        mask = bits(self._layer_keys(x), _elements(x, positions)) >= self.threshold
        return x * (mask.to(x.dtype) / (1 - self.p))

    def _layer_keys(self, x: Tensor) -> Tensor:
        """This layer's key for each sample, `[batch, 1, ...]` to broadcast against `x`."""
        keys = self.sample_keys
        if keys is None or keys.shape != x.shape[:1]:
            found = "no sample keys" if keys is None else f"sample keys of shape {list(keys.shape)}"
            raise RuntimeError(
                f"dropout '{self.name}' found {found} for a batch of {x.shape[0]} samples; in training every sample "
                f"has a key: call set_sample_keys(model.modules(), keys) before each forward"
            )
        return bits(keys, torch.full_like(keys, self.key)).view(-1, *[1] * (x.ndim - 1))

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"


def set_sample_keys(modules: Iterable[nn.Module], keys: Tensor | None) -> None:
    """Gives each `KeyedDropout` of `modules` the keys, int64 `[batch]`, of the samples that come next; None takes them.

    A recomputation uses them too: set them again before it if another batch went through the model in between.
    """
    for module in modules:
        if isinstance(module, KeyedDropout):
            module.sample_keys = keys


def _elements(x: Tensor, positions: Tensor | None) -> Tensor:
    """The index within its sample of every element of `x`, `[1 or batch, ...]`."""
    if positions is None:
        return indices(x.shape[1:], [0] * (x.ndim - 1), x.shape[1:], device=x.device)[None]
    within = indices(x.shape[2:], [0] * (x.ndim - 2), x.shape[2:], device=x.device)
    return positions.view(*positions.shape, *[1] * (x.ndim - 2)) * math.prod(x.shape[2:]) + within
