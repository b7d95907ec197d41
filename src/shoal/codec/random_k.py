"""Random-k: numbers at places that all ranks draw alike, so that nobody sends a place and sums can be made on the way.

(Stich et al., "Sparsified SGD with Memory", arXiv:1809.07599, section 2.) The vector is cut into k runs, and one place
is drawn in each: distinct places without a sort. With error feedback numbers are sent as they are; without it each is
multiplied by the length of its run, which makes it unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import RandomKConfig
from shoal.maths.counter import uniform


class RandomK(Codec):
    """`RandomKConfig`, on the wire. `key` gives the places: all ranks must have the same."""

    linear = True

    def __init__(self, config: RandomKConfig) -> None:
        self._run, self.unbiased = max(1, round(1 / config.fraction)), not config.feedback

    def fields(self, numel: int) -> tuple[Field, ...]:
        return (Field(torch.float32, -(-numel // self._run)),)

    def _encode(self, x: Tensor, key: int) -> Payload:
        places, lengths = self._drawn(x.numel(), key, x.device)
        values = x[places]
        return ((values * lengths if self.unbiased else values).float(),)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        result = torch.zeros(numel, dtype=dtype, device=payload[0].device)
        result[self._drawn(numel, key, result.device)[0]] = payload[0].to(dtype)
        return result

    def _drawn(self, numel: int, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A place in each run, and the lengths of the runs."""
        starts = torch.arange(0, numel, self._run, dtype=torch.int64, device=device)
        lengths = (numel - starts).clamp_(max=self._run)
        return starts + (uniform(key, starts, dtype=torch.float64) * lengths).long(), lengths
