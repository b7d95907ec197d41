"""Top-k: the k numbers of largest magnitude, and where they stand.

(Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021.) It leaves
|x - y|^2 <= (1 - k/n) |x|^2 (Stich et al., arXiv:1809.07599, definition 2.1). Biased: it needs error feedback.
4 bytes a number and 2 a place (`indices`).

Note: sampled threshold
-----------------------
Sorting out the k largest of n is slow. A sample tells a threshold that about k numbers exceed (Lin et al., "Deep
Gradient Compression", arXiv:1712.01887, section 3.1). With `selection = "exact"` somewhat more than k are let through,
and the exact k largest of those few are the k largest of all; if fewer than k exceed it, all numbers are looked at. So
the threshold never changes the result. With "sampled" those above the threshold are sent, k at most: of more than k,
evenly spaced ones; for fewer, zeros fill the payload up. That takes two passes over memory: one finds what is not
finite, one selects.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import TopKConfig
from shoal.codec.indices import index_fields, pack_indices, unpack_indices
from shoal.codec.kernels import kernels_for
from shoal.codec.stated import kept

SAMPLE = 1 << 16
"""Numbers that the threshold is estimated from, at least; vectors of 8 times as many are worth an estimate."""
MARGIN = 1.5
"""How many times k an exact search should be left with: the sample may be off, and too few cost a search of all."""
ROOM = 4
"""How many times k may exceed an estimated threshold before all numbers are looked at."""


class TopK(Codec):
    """`TopKConfig`, on the wire."""

    shows_nonfinite = True  # NaN and infinity are larger than all finite numbers, so that some of them is sent

    def __init__(self, config: TopKConfig) -> None:
        self._fraction, self._sampled = config.fraction, config.selection == "sampled"

    def kept(self, numel: int) -> int:
        """Numbers that are sent of a vector of `numel`: one at least, if there is any."""
        return kept(self._fraction, numel)

    def fields(self, numel: int) -> tuple[Field, ...]:
        count = self.kept(numel)
        return Field(torch.float32, count), *index_fields(numel, count)

    def _encode(self, x: Tensor, key: int) -> Payload:
        count = self.kept(x.numel())
        places = (above_sampled if self._sampled else largest)(x, count)
        missing = count - places.numel()
        values = torch.nn.functional.pad(x[places].float(), (0, missing))
        return values, *pack_indices(torch.nn.functional.pad(places, (0, missing), value=x.numel() - 1), x.numel())

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        values, *packed = payload
        result = torch.zeros(numel, dtype=dtype, device=values.device)
        # added, as zeros may fill up the payload: a place that comes twice comes with one number that is not zero
        return result.scatter_add_(0, unpack_indices(*packed), values.to(dtype))


def largest(x: Tensor, count: int) -> Tensor:
    """The places, int64 `[count]` ascending, of the largest magnitudes in `x` `[numel]`. NaN is largest of all.

    Among equal ones at the border any are taken, the same in every call with equal input.
    """
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=x.device)
    threshold = _estimate(x, MARGIN * count)
    if threshold is not None:
        candidates, found = _select(x, threshold, room=ROOM * count)
        if count <= found <= ROOM * count:
            best = x[candidates].abs().topk(count, sorted=False).indices
            return candidates[best].sort().values
    return x.abs().topk(count, sorted=False).indices.sort().values


def above_sampled(x: Tensor, count: int) -> Tensor:
    """The places, int64 ascending and `count` at most, of magnitudes in `x` `[numel]` above an estimated threshold.

    Where an estimate does not pay, lets through more than four times `count`, or more than `count` of which some are
    not finite, those of the largest.
    """
    threshold = _estimate(x, count)
    if threshold is None or not math.isfinite(threshold):  # nothing is above NaN, and it has to be seen
        return largest(x, count)
    candidates, found = _select(x, threshold, room=ROOM * count)
    if found > ROOM * count:
        return largest(x, count)
    if found > count:
        if not bool(torch.isfinite(x[candidates]).all()):  # the choice below might leave all of these out
            return largest(x, count)
        return candidates[torch.arange(count, device=x.device) * found // count]
    return candidates


def _estimate(x: Tensor, count: float) -> float | None:
    """The magnitude that about `count` numbers exceed; None if an estimate does not pay."""
    numel = x.numel()
    wanted = round(count / numel * SAMPLE) if numel else 0
    if numel < 8 * SAMPLE or wanted > SAMPLE // 4:
        return None
    sample = x[:: numel // SAMPLE].abs()
    return float(sample.topk(max(8, wanted), sorted=True).values[-1])


def _select(x: Tensor, least: float, *, room: int) -> tuple[Tensor, int]:
    """The places of magnitude `least` or more, int64 ascending, and how many; in part if more than `room`.

    NaN is larger than any other number.
    """
    kernels = kernels_for(x)
    if kernels is not None:
        return kernels.select(x, least, room=room)
    places = torch.nonzero(~(x.abs() < least)).view(-1)
    return places, places.numel()
