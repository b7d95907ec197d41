"""Codecs that send few numbers and their places: top-k of numbers, of blocks and of cosine coefficients, Deep Gradient
Compression, ScaleCom, random-k.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Field, Payload, TensorPlace, all_or_nothing, block_count, in_blocks
from shoal.codec.config import BlockTopKConfig, DCTTopKConfig, DGCConfig, RandomKConfig, ScaleComConfig, TopKConfig
from shoal.codec.costs import RUN, kept
from shoal.codec.kernels import compiled, compiles_for, kernels_for
from shoal.maths.counter import key_of, uniform

# Places in a vector, packed: ascending, the low 16 bits of each, and how many lie in each run of 65,536 numbers.
#
# 2 bytes a place, and 4 bytes a run, instead of the 8 bytes of an int64.


def index_fields(numel: int, count: int) -> tuple[Field, Field]:
    """The tensors that `pack_indices` makes of `count` places in a vector of `numel`."""
    return Field(torch.int32, -(-numel // RUN)), Field(torch.int16, count)


def pack_indices(places: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """(numbers of places in each run, low bits) of `places`, int64 `[count]`, ascending, all below `numel`."""
    edges = RUN * torch.arange(-(-numel // RUN) + 1, device=places.device)
    return torch.searchsorted(places, edges).diff().to(torch.int32), (places & (RUN - 1)).to(torch.int16)


def unpack_indices(runs: Tensor, low: Tensor) -> Tensor:
    """int64 `[count]`, the inverse of `pack_indices`."""
    numbers = torch.arange(runs.numel(), device=runs.device)
    run = torch.repeat_interleave(numbers, runs.long(), output_size=low.numel())
    return (run << 16) | (low.long() & (RUN - 1))


# Block-structured top-k: the blocks of largest 2-norm, whole, and which they are.
#
#     y = x in the k blocks of largest |x_b|_2, and zero elsewhere
#
# Top-k, of blocks on a fixed grid instead of numbers. It leaves |x - y|^2 <= (1 - k/b) |x|^2 of b blocks:
# biased, it needs error feedback. A place costs 4 bytes a block instead of 2 a number, memory is read and written in
# runs, and only the norms of blocks are compared.


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


# Random-k: numbers at places that all ranks draw alike, so that nobody sends a place and sums can be made on the way.
#
# (Stich et al., "Sparsified SGD with Memory", arXiv:1809.07599, section 2.) The vector is cut into k runs, and one
# place is drawn in each: distinct places without a sort. With error feedback numbers are sent as they are; without it
# each is multiplied by the length of its run, which makes it unbiased.


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


# Top-k: the k numbers of largest magnitude, and where they stand.
#
# (Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021.) It leaves
# |x - y|^2 <= (1 - k/n) |x|^2 (Stich et al., arXiv:1809.07599, definition 2.1). Biased: it needs error feedback.
# 4 bytes a number and 2 a place.
#
# Note: sampled threshold
# -----------------------
# Sorting out the k largest of n is slow. A sample tells a threshold that about k numbers exceed (Lin et al., "Deep
# Gradient Compression", arXiv:1712.01887, section 3.1). With `selection = "exact"` somewhat more than k are let
# through, and the exact k largest of those few are the k largest of all; if fewer than k exceed it, all numbers are
# looked at. So the threshold never changes the result. With "sampled" those above the threshold are sent, k at most: of
# more than k, evenly spaced ones; for fewer, zeros fill the payload up. That takes two passes over memory: one finds
# what is not finite, one selects.


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
    exceed = compiled(exceeding) if compiles_for(x) else exceeding
    places = torch.nonzero(exceed(x, torch.full((), least, dtype=x.dtype, device=x.device))).view(-1)
    return places, places.numel()


def exceeding(x: Tensor, least: Tensor) -> Tensor:
    """Which of the magnitudes are `least` or more, bool `[numel]`. A scalar tensor, as programs are made anew for each
    number.
    """
    return ~(x.abs() < least)


# Deep Gradient Compression: top-k of velocities, with more numbers at first.
#
#     sent at sum t = max(fraction, 0.25^(1 + floor((t - 1) s / T))),  s powers of four to the fraction, T warm-up sums
#
# (Lin et al., "Deep Gradient Compression", arXiv:1712.01887, section 3.3: 25 %, 6.25 %, 1.6 %, 0.4 %, 0.1 % in turn;
# here in as many equal parts of the warm-up as it takes powers of four.) Velocities, momentum correction, local
# clipping and factor masking are those of the exchange that is made for it. Biased: it needs error feedback.


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


# DCT top-k: the largest frequencies of every chunk.
#
#     f = D x,   y = D^T (the k largest of f),      D_uv = sqrt(2 / c) cos(pi (2 v + 1) u / 2 c), row 0 over sqrt(2)
#
# (Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870, algorithm 1.) D is orthonormal,
# so |x - y|^2 <= (1 - k/c) |x|^2 in a chunk of c numbers: biased. DeMo takes what was sent out of a decaying momentum,
# and keeps the rest; here error feedback keeps the rest of the gradients, without decay.
#
# Chunks are runs of the flat buffer, not squares of a matrix as in the paper's code: so they do not depend on shapes. A
# number costs 4 bytes, its place 1 (chunks of up to 256).


class DCTTopK(Codec):
    """`DCTTopKConfig`, on the wire."""

    def __init__(self, config: DCTTopKConfig) -> None:
        self._chunk, self._kept = config.chunk, config.kept
        self._bases: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def fields(self, numel: int) -> tuple[Field, ...]:
        count = block_count(numel, self._chunk) * self._kept
        return Field(torch.float32, count), Field(torch.uint8, count)

    def _encode(self, x: Tensor, key: int) -> Payload:
        frequencies = in_blocks(x, self._chunk) @ self._basis(x).T
        places = frequencies.abs().topk(self._kept, dim=1).indices
        return frequencies.gather(1, places).view(-1).float(), places.view(-1).to(torch.uint8)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        values, places = (part.view(-1, self._kept) for part in payload)
        frequencies = torch.zeros(len(values), self._chunk, dtype=dtype, device=values.device)
        frequencies.scatter_(1, places.long(), values.to(dtype))
        grid = _grid(values).to(dtype)[:, None]
        return (frequencies @ self._basis(frequencies)).div_(grid).round_().mul_(grid).view(-1)[:numel]

    def _basis(self, like: Tensor) -> Tensor:
        """D in the type of `like`, where that is: it comes to a GPU once."""
        key = like.dtype, like.device
        if key not in self._bases:
            self._bases[key] = cosines(self._chunk).to(like)
        return self._bases[key]


def _grid(values: Tensor) -> Tensor:
    """For each row, 2^-24 of the power of two above its largest magnitude.

    Decoded numbers are multiples of it: what the transform's rounding adds far below them would make x - y inexact.
    """
    _, exponent = torch.frexp(values.abs().amax(1))
    return torch.ldexp(torch.ones_like(values[:, 0], dtype=torch.float32), exponent.clamp(min=-100) - 24)


def cosines(size: int) -> Tensor:
    """The orthonormal DCT-II, float64 `[frequency, place]`."""
    frequency, place = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    basis = math.sqrt(2 / size) * torch.cos(math.pi * (2 * place + 1) * frequency / (2 * size))
    basis[0] /= math.sqrt(2)
    return basis


# ScaleCom: top-k at places that one rank chooses for all, so that numbers are summed on the way.
#
#     leader           draws its k largest, and tells their places
#     every rank       sends its numbers at these places;  sums of k numbers, however many ranks there are
#
# (Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training",
# arXiv:2104.11125, algorithm 1, with beta = 1.) Residuals of different ranks come to look alike, which is why the
# places of one serve all. Biased: it needs error feedback. In the paper ranks lead in turn; here the key of the sum
# draws the leader, so that no turn has to be saved.
#
# The places travel by the first sum, of bytes to which all but the leader add zeros: 2 bytes a place (`pack_indices`),
# and 4 a number by the second sum. A rank that is not finite sends NaN.


class ScaleCom(Codec):
    """`ScaleComConfig`, on the wire, for rank `rank` of `ranks`."""

    linear = True

    def __init__(self, config: ScaleComConfig, *, rank: int = 0, ranks: int = 1) -> None:
        self._config, self._rank, self._ranks = config, rank, ranks

    def bound(self, places: Sequence[TensorPlace], *, key: int, rank: int, ranks: int) -> ScaleCom:
        return ScaleCom(self._config, rank=rank, ranks=ranks)

    def fields(self, numel: int) -> tuple[Field, ...]:
        count = kept(self._config.fraction, numel)
        return Field(torch.float32, count), *index_fields(numel, count)

    def summing(self, x: Tensor, *, key: int) -> Generator[Payload, None, tuple[Tensor, Tensor]]:
        x = all_or_nothing(x)
        if self.leader(key) == self._rank:
            packed = torch.cat([part.view(torch.uint8) for part in self._chosen(x)])
        else:
            nbytes = sum(field.nbytes for field in self.fields(x.numel())[1:])
            packed = torch.zeros(nbytes, dtype=torch.uint8, device=x.device)
        yield (packed,)
        runs, low = (field.nbytes for field in self.fields(x.numel())[1:])
        places = unpack_indices(packed[:runs].view(torch.int32), packed[runs : runs + low].view(torch.int16))
        values = x[places].float()
        own = values.clone()
        yield (values,)
        return _at(places, own, x), _at(places, values, x)

    def leader(self, key: int) -> int:
        """The rank that chooses the places of the sum that has this key."""
        return key_of(key, "leader") % self._ranks

    def _chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return pack_indices(largest(x, kept(self._config.fraction, x.numel())), x.numel())

    def _encode(self, x: Tensor, key: int) -> Payload:
        """What a rank alone would come to."""
        runs, low = self._chosen(x)
        return x[unpack_indices(runs, low)].float(), runs, low

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        values, runs, low = payload
        return _at(unpack_indices(runs, low), values, torch.empty(numel, dtype=dtype, device=values.device))


def _at(places: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """A vector as long as `like` with `values` at `places`, and zeros elsewhere."""
    result = torch.zeros_like(like)
    result[places] = values.to(like)
    return result
