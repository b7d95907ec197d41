"""Codecs that send few numbers and their places: top-k of numbers and of blocks, Deep Gradient Compression, random-k.

Top-k: the k numbers of largest magnitude, and where they stand.

(Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021.) It leaves
|x - y|^2 <= (1 - k/n) |x|^2 (Stich et al., arXiv:1809.07599, definition 2.1). Biased: it needs error feedback.
4 bytes a number and 2 a place.

Note: sampled threshold
-----------------------
Sorting out the k largest of n is slow. A sample tells a threshold that about k numbers exceed (Lin et al., "Deep
Gradient Compression", arXiv:1712.01887, section 3.1). With `selection = "exact"` somewhat more than k are let through,
and the exact k largest of those few are the k largest of all; if fewer than k exceed it, all numbers are looked at. So
the threshold never changes the result. With "sampled" those above the threshold are sent, k at most: of more than k,
evenly spaced ones; for fewer, zeros fill the payload up. That takes two passes over memory: one finds what is not
finite, one selects.

Places in a vector, packed: ascending, the low 16 bits of each, and how many lie in each run of 65,536 numbers.

2 bytes a place, and 4 bytes a run, instead of the 8 bytes of an int64.

Block-structured top-k: the blocks of largest 2-norm, whole, and which they are.

    y = x in the k blocks of largest |x_b|_2, and zero elsewhere

Top-k, of blocks on a fixed grid instead of numbers. It leaves |x - y|^2 <= (1 - k/b) |x|^2 of b blocks:
biased, it needs error feedback. A place costs 4 bytes a block instead of 2 a number, memory is read and written in
runs, and only the norms of blocks are compared.

Deep Gradient Compression: top-k of velocities, with more numbers at first.

    sent at sum t = max(fraction, 0.25^(1 + floor((t - 1) s / T))),    s powers of four to the fraction, T warm-up sums

(Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 3.3: 25 %, 6.25 %, 1.6 %, 0.4 %, 0.1 % in turn; here
in as many equal parts of the warm-up as it takes powers of four.) Velocities, momentum correction, local clipping and
factor masking are those of the exchange that is made for it. Biased: it needs error feedback.

Random-k: numbers at places that all ranks draw alike, so that nobody sends a place and sums can be made on the way.

(Stich et al., "Sparsified SGD with Memory", arXiv:1809.07599, section 2.) The vector is cut into k runs, and one place
is drawn in each: distinct places without a sort. With error feedback numbers are sent as they are; without it each is
multiplied by the length of its run, which makes it unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks
from shoal.codec.codec import Codec, Field, Payload, TensorPlace
from shoal.codec.config import BlockTopKConfig, DGCConfig, RandomKConfig, TopKConfig
from shoal.codec.kernels import kernels_for
from shoal.codec.stated import RUN, kept
from shoal.maths.counter import uniform


def index_fields(numel: int, count: int) -> tuple[Field, Field]:
    """The tensors that `pack_indices` makes of `count` places in a vector of `numel`."""
    return Field(torch.int32, -(-numel // RUN)), Field(torch.int16, count)


def pack_indices(places: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """(numbers of places in each run, low bits) of `places`, int64 `[count]`, ascending, all below `numel`."""
    runs = torch.bincount(places >> 16, minlength=-(-numel // RUN)).to(torch.int32)
    return runs, (places & (RUN - 1)).to(torch.int16)


def unpack_indices(runs: Tensor, low: Tensor) -> Tensor:
    """int64 `[count]`, the inverse of `pack_indices`."""
    numbers = torch.arange(runs.numel(), device=runs.device)
    run = torch.repeat_interleave(numbers, runs.long(), output_size=low.numel())
    return (run << 16) | (low.long() & (RUN - 1))


class BlockTopK(Codec):
    """`BlockTopKConfig`, on the wire."""

    def __init__(self, config: BlockTopKConfig) -> None:
        self._fraction, self._block = config.fraction, config.block

    def fields(self, numel: int) -> tuple[Field, ...]:
        count = kept(self._fraction, block_count(numel, self._block))
        return Field(torch.float32, count * self._block), Field(torch.int32, count)

    def _encode(self, x: Tensor, key: int) -> Payload:
        rows = in_blocks(x, self._block)
        count = kept(self._fraction, len(rows))
        blocks = torch.linalg.vector_norm(rows, dim=1).topk(count, sorted=False).indices.sort().values
        return rows[blocks].view(-1).float(), blocks.to(torch.int32)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        values, blocks = payload
        rows = torch.zeros(block_count(numel, self._block), self._block, dtype=dtype, device=values.device)
        rows[blocks.long()] = values.to(dtype).view(-1, self._block)
        return rows.view(-1)[:numel]


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


FIRST = 0.25


class DGC(TopK):
    """`DGCConfig`, on the wire. Until it is bound, and its first sum begins, it keeps what it keeps in the end."""

    def __init__(self, config: DGCConfig) -> None:
        super().__init__(TopKConfig(fraction=config.fraction, selection=config.selection))
        self._config = config

    def bound(self, places: Sequence[TensorPlace], *, key: int, rank: int, ranks: int) -> DGC:
        return DGC(self._config)

    def begin(self, number: int) -> None:
        self._fraction = fraction_at(number, self._config.fraction, warmup=self._config.warmup_steps)


def fraction_at(number: int, fraction: float, *, warmup: int) -> float:
    """The part of the numbers that is sent in sum `number`, from 1 on."""
    stages = math.ceil(math.log(fraction, FIRST) - 1e-9)  # powers of four that are larger than the fraction, and one
    if number > warmup or stages < 1:
        return fraction
    return max(fraction, FIRST ** (1 + (number - 1) * stages // warmup))
