"""Top-k: the k numbers of largest magnitude, and where they stand.

(Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021.) It leaves
|x - y|^2 <= (1 - k/n) |x|^2 (Stich et al., arXiv:1809.07599, definition 2.1). Biased: it needs error feedback.

Note: three passes
------------------
Sorting out the k largest of n is slow. A sample tells a threshold that somewhat more than k numbers will exceed (Lin et
al., "Deep Gradient Compression", arXiv:1712.01887, section 3.1); the exact k largest of those few are the k largest of
all. If fewer than k exceed it, all numbers are looked at. So the threshold never changes the result.

Note: indices in two bytes
--------------------------
Indices are sent in ascending order, as their low 16 bits, with the number of indices in each run of 65,536 elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import TopKConfig

RUN = 1 << 16
SAMPLE = 1 << 16
"""Numbers that the threshold is estimated from, at least; vectors of 8 times as many are worth an estimate."""
MARGIN = 1.5
"""How many times k the threshold should let through: the sample may be off, and too few cost a search of all."""


class TopK(Codec):
    """`TopKConfig`, on the wire."""

    def __init__(self, config: TopKConfig) -> None:
        self._fraction = config.fraction

    def kept(self, numel: int) -> int:
        """Numbers that are sent of a vector of `numel`: one at least, if there is any."""
        return min(numel, max(1, round(self._fraction * numel)))

    def fields(self, numel: int) -> tuple[Field, ...]:
        kept = self.kept(numel)
        runs, low = Field(torch.int32, -(-numel // RUN)), Field(torch.int16, kept)
        return Field(torch.float32, kept), runs, low

    def _encode(self, x: Tensor, key: int) -> Payload:
        indices = largest(x.abs(), self.kept(x.numel()))
        runs = torch.bincount(indices >> 16, minlength=-(-x.numel() // RUN)).to(torch.int32)
        return x[indices].float(), runs, (indices & (RUN - 1)).to(torch.int16)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        values, runs, low = payload
        run = torch.repeat_interleave(
            torch.arange(runs.numel(), device=runs.device), runs.long(), output_size=low.numel()
        )
        result = torch.zeros(numel, dtype=dtype, device=values.device)
        result[(run << 16) | (low.long() & (RUN - 1))] = values.to(dtype)
        return result


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """The places, int64 `[count]` ascending, of the largest numbers of `magnitudes` `[numel]`. NaN is largest of all.

    Among equal ones at the border any are taken, the same in every call with equal input.
    """
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=magnitudes.device)
    candidates = _above_estimate(magnitudes, count)
    if candidates is None or candidates.numel() < count:
        return magnitudes.topk(count, sorted=False).indices.sort().values
    best = magnitudes[candidates].topk(count, sorted=False).indices
    return candidates[best].sort().values


def _above_estimate(magnitudes: Tensor, count: int) -> Tensor | None:
    """The places that exceed an estimated threshold; None if an estimate does not pay."""
    numel = magnitudes.numel()
    wanted = round(MARGIN * count / numel * SAMPLE)
    if numel < 8 * SAMPLE or wanted > SAMPLE // 4:
        return None
    sample = magnitudes[:: numel // SAMPLE]
    threshold = sample.topk(max(8, wanted), sorted=True).values[-1]
    return torch.nonzero(magnitudes >= threshold).view(-1)
