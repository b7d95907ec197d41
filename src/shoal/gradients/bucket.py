"""`Bucket`: where the gradients of some parameters lie in one flat buffer. What ranks do with it is its exchange's.

The buffer of a bucket is either kept from step to step, or lent: it is made when the first gradient comes, and given
back when the exchange has taken it in (ZeRO-2). Gradients of 16 bits are summed in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.exchanges.exchange import Exchange, Segment
from shoal.maths.norm import two_norm
from shoal.state import Trained
from shoal.topology.holding import Holding, Ranks

# Where tensors lie in one flat buffer that is divided evenly over ranks. Pure.
#
#     buffer   | w0 ..... | w1 .. | w2 ........... | padding |
#     pieces   | rank 0      | rank 1      | rank 2          |
#
# All pieces are equally long, so that one reduce-scatter sums gradients and one all-gather brings parameters back. A
# piece may begin inside a tensor and hold several; a rank whose piece is all padding owns nothing. An optimizer that
# has scales for blocks of a tensor wants these whole, and the same on any number of ranks: tensors and pieces then
# start at a multiple of `undivided`. One that works on whole matrices (Muon, Shampoo) needs each of them on one rank:
# `undivided` of None packs tensors into pieces without cutting any,
#
#     buffer   | w2 ........... | w0 ..... | w1 .. | padding |
#     pieces   | rank 0         | rank 1                     |
#
# largest first, each onto the rank with the least so far (Graham's LPT rule: the longest piece is at most 4/3 of the
# best). Of equal ranks it is another one in each bucket: else the first would have the largest tensor of all of them.


ALIGNMENT = 16
"""Elements: tensors start on a cache line."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples spread evenly over 0 to 1, and so do those of every second or third bucket."""


@dataclass(frozen=True)
class ElementRun:
    """The elements `start` .. `stop` of a tensor, which lie in a piece from `at` on."""

    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """`lengths` of the tensors and where each begins; `piece` elements for each of `ranks`."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    piece: int
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.piece * self.ranks

    def slice(self, number: int) -> slice:
        """Where tensor `number` lies in the buffer."""
        return slice(self.starts[number], self.starts[number] + self.lengths[number])

    def mine(self, rank: int) -> slice:
        """Where the piece of `rank` lies in the buffer."""
        return slice(self.piece * rank, self.piece * (rank + 1))

    def run(self, number: int, rank: int) -> ElementRun | None:
        """What of tensor `number` lies in the piece of `rank`; None if nothing does."""
        whole, mine = self.slice(number), self.mine(rank)
        start, stop = max(whole.start, mine.start), min(whole.stop, mine.stop)
        return ElementRun(start - whole.start, stop - whole.start, start - mine.start) if start < stop else None

    @property
    def gaps(self) -> list[slice]:
        """What belongs to no tensor, ascending."""
        held = sorted((self.slice(number) for number in range(len(self.lengths))), key=lambda part: part.start)
        ends = [0, *(part.stop for part in held)]
        begins = [*(part.start for part in held), self.numel]
        return [slice(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def flat_layout(
    lengths: Sequence[int], ranks: int, *, undivided: int | None = ALIGNMENT, number: int = 0
) -> FlatLayout:
    """The layout of tensors of these lengths. `undivided`, a multiple of `ALIGNMENT`: so many numbers of a tensor, from
    its first on, stay on one rank; None: all of them. `number`: which bucket of the model it is.
    """
    if undivided is None:
        return _packed(lengths, ranks, first=int(number * GOLDEN % 1 * ranks))
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // undivided) * undivided
    return FlatLayout(tuple(lengths), tuple(starts), -(-end // (ranks * undivided)) * undivided, ranks)


def share_of(length: int, rank: int, size: int) -> slice:
    """One rank's part of a buffer that all of `size` ranks hold whole, in whole cache lines."""
    lines = _lines(length)
    start, stop = (min(length, lines * r // size * ALIGNMENT) for r in (rank, rank + 1))
    return slice(start, stop)


def _packed(lengths: Sequence[int], ranks: int, *, first: int) -> FlatLayout:
    ends, places = [0] * ranks, [(0, 0)] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        rank = min(range(ranks), key=lambda rank: (ends[rank], (rank - first) % ranks))
        places[number] = (rank, ends[rank])
        ends[rank] += _lines(lengths[number]) * ALIGNMENT
    piece = max(ends)
    return FlatLayout(tuple(lengths), tuple(rank * piece + at for rank, at in places), piece, ranks)


def _lines(length: int) -> int:
    """Cache lines that hold `length` elements."""
    return -(-length // ALIGNMENT)


IN_FLIGHT = 2
"""Lent buffers on their way at the same time; one more is being filled."""


@dataclass
class Flight:
    """The lent buffers on their way, over the whole model: beyond `limit`, the oldest is waited for."""

    limit: int = IN_FLIGHT
    _flying: deque[Bucket] = field(default_factory=deque)

    def take_off(self, bucket: Bucket) -> None:
        """`bucket` has just been sent."""
        self._flying.append(bucket)
        while len(self._flying) > self.limit:
            self._flying.popleft().land()

    def end(self) -> None:
        """All that are on their way arrive."""
        while self._flying:
            self._flying.popleft().land()


class Bucket:
    """The gradients of `parameters` (by index), laid out as `layout`; this rank's piece is that of `rank`.

    `buffer` is kept; None: it is lent, and `flight` counts those on their way. `counted` are the parameters whose
    numbers in the result this rank counts in the norm. `norm_share`: if all ranks of a group count the same result,
    the part of it whose norm this rank computes. `missing` counts gradients that are not final yet; the reducer writes
    it. `kept` is told the bytes of a result that a lent buffer was taken into.
    """

    def __init__(
        self,
        parameters: Mapping[int, Parameter],
        layout: FlatLayout,
        exchange: Exchange,
        *,
        rank: int = 0,
        buffer: Tensor | None = None,
        counted: Collection[int] = (),
        norm_share: slice | None = None,
        flight: Flight | None = None,
        kept: Callable[[int], None] | None = None,
    ) -> None:
        first = next(iter(parameters.values()))
        self.parameters, self.layout, self.exchange, self.counted = parameters, layout, exchange, counted
        self.dtype, self.device = exchange.result.dtype, first.device
        self.keeps, self.missing = buffer is not None and self.dtype == first.grad_dtype, 0
        self._kept, self._buffer, self._norm_share = buffer is not None, buffer, norm_share
        self._flight, self._flying = flight or Flight(), False
        self._told = kept
        self._views = {} if buffer is None else self._views_of(buffer)
        self.pieces = self._pieces(rank)

    @property
    def indices(self) -> Collection[int]:
        """The parameters whose gradients are in it."""
        return self.parameters.keys()

    def slice(self, index: int) -> Tensor:
        """Where this rank's gradient of parameter `index` belongs, in the shape of the parameter."""
        if not self._kept:
            self.land()  # of the microbatch before
            if self._buffer is None:
                self._lend()
        return self._views[index]

    def start(self) -> None:
        """Forgets the step before."""
        self.exchange.start()

    def send(self) -> None:
        """Every slice is filled: starts the exchange. Does not block."""
        buffer = self._lend() if self._buffer is None else self._buffer
        self.exchange.send(buffer)
        if not self._kept:
            self._flying = True
            self._flight.take_off(self)

    def land(self) -> None:
        """Returns when a lent buffer has been taken in, and gives it back."""
        if self._flying:
            self.exchange.land()
            if self._told is not None:
                self._told(self.exchange.result.nbytes)
            self._buffer, self._views, self._flying = None, {}, False

    def settle(self) -> None:
        """No more is sent in this step: starts what follows. All buckets settle before the first one waits."""
        self._flight.end()
        self.exchange.settle()

    def wait(self) -> None:
        """Returns when the result is agreed."""
        self.exchange.wait()

    def commit(self) -> None:
        """The update was made from the result."""
        self.exchange.commit()

    def norm(self) -> Tensor:
        """The 2-norm of those numbers of the result that this rank counts: a float64 scalar."""
        result = self.exchange.result
        if self._norm_share is not None:
            return two_norm(result[self._norm_share])
        counted = [index for index in self.counted if index in self.pieces]
        if len(counted) == len(self.pieces):  # in one pass: what belongs to no parameter is zero
            return two_norm(result)
        if not counted:
            return two_norm(result[:0])
        return two_norm(torch.stack([two_norm(self.pieces[index]) for index in counted]))

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the result."""
        self.exchange.result.mul_(factor)

    def _lend(self) -> Tensor:
        """A buffer for this rank's gradients. What belongs to no parameter is zero, as the norm counts it."""
        self._buffer = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        for gap in self.layout.gaps:
            self._buffer[gap].zero_()
        self._views = self._views_of(self._buffer)
        return self._buffer

    def _views_of(self, buffer: Tensor) -> dict[int, Tensor]:
        return {
            index: buffer[self.layout.slice(number)].view(parameter.shape)
            for number, (index, parameter) in enumerate(self.parameters.items())
        }

    def _pieces(self, rank: int) -> dict[int, Tensor]:
        """What of each parameter's agreed gradient lies in the result; whole ones in the shape of the parameter."""
        found: dict[int, Tensor] = {}
        for number, (index, parameter) in enumerate(self.parameters.items()):
            run = self.layout.run(number, rank)
            if run is not None:
                piece = self.exchange.result[run.at : run.at + run.numel]
                found[index] = piece.view(parameter.shape) if run.numel == parameter.numel() else piece
        return found


# Which gradients share a bucket. Pure, but for the names of the ranks.
#
# Gradients become ready roughly in the reverse order in which parameters were registered. So buckets are filled from
# the reversed list; the first of each kind is small, so that the wire is busy early (Li et al., PyTorch Distributed,
# VLDB 2020, section 3.2.3). The members of a bucket depend on the parameters of its own kind and on the limits alone:
# ranks that share a kind (its group is a part of it) fill it alike, whatever else each of them holds, and so does a
# resumed run.
#
# ZeRO-3 has one bucket for each unit, which is a block of the model, or everything outside of blocks.


GradientRanks = Callable[[Holding], Ranks]
"""Which ranks sum the gradient of a part in every step; the choice of `[sync]`."""


@dataclass(frozen=True)
class Member:
    """A gradient: its index in the parameter list, its length, and what it can share a buffer with.

    `kind` is everything that must be equal within one bucket: dtype, device, the ranks over which it is summed.
    """

    index: int
    numel: int
    bytes: int
    kind: Hashable


@dataclass(frozen=True)
class BucketParameters:
    """The parameters of one bucket, by index, in the order in which they lie in it.

    `sums` are the ranks that sum it, `shard` those of them that divide it; `unit` counts blocks, -1 for the rest;
    `number` counts buckets.
    """

    indices: tuple[int, ...]
    sums: Ranks
    shard: Ranks
    unit: int = -1
    number: int = 0


def fill_buckets(members: Sequence[Member], *, first_bytes: int, bytes_limit: int) -> list[list[Member]]:
    """The buckets, in the order in which they are sent. A gradient larger than the limit has a bucket of its own.

    A bucket is sent after those whose last gradient is ready before its own: a kind with few gradients, spread over the
    whole model, delays no other.
    """
    buckets: list[list[Member]] = []
    of_kind: dict[Hashable, list[list[Member]]] = {}
    for member in reversed(members):
        mine = of_kind.setdefault(member.kind, [])
        limit = first_bytes if len(mine) == 1 else bytes_limit
        if not mine or sum(m.bytes for m in mine[-1]) + member.bytes > limit:
            mine.append([])
            buckets.append(mine[-1])
        mine[-1].append(member)
    return sorted(buckets, key=lambda bucket: -bucket[-1].index)


def parts_by_size(
    trained: Sequence[Trained], ranks: GradientRanks, *, bytes_limit: int, first_bytes: int, divided: bool
) -> list[BucketParameters]:
    """Buckets of at most `bytes_limit`, in the order in which they are sent.

    `divided`: ZeRO divides them over `shard`, so that parameters divided over other ranks cannot share a bucket.
    """
    units, first_bytes = [-1] * len(trained), min(first_bytes, bytes_limit)
    return _parts(trained, units, ranks, first_bytes=first_bytes, bytes_limit=bytes_limit, divided=divided)


def parts_by_unit(trained: Sequence[Trained], units: Sequence[int], ranks: GradientRanks) -> list[BucketParameters]:
    """A bucket for each unit and kind, in the order in which they are sent; `units` has each parameter's unit."""
    no_limit = 1 + sum(t.parameter.nbytes for t in trained)
    return _parts(trained, units, ranks, first_bytes=no_limit, bytes_limit=no_limit, divided=True)


def segments_of(trained: Sequence[Trained], part: BucketParameters, layout: FlatLayout, *, rank: int) -> list[Segment]:
    """What lies where in the piece of `rank`: whole parameters in their own shape, others flat."""
    found = []
    for number, index in enumerate(part.indices):
        run, t = layout.run(number, rank), trained[index]
        if run is not None:
            is_whole = run.numel == t.parameter.numel()
            found.append(Segment(t.holding.name, run.at, tuple(t.parameter.shape) if is_whole else (run.numel,)))
    return found


def units_of(trained: Sequence[Trained], blocks: Sequence[nn.Module], model: nn.Module) -> list[int]:
    """The block that each parameter belongs to; -1 if none or several, or if a module of `model` outside of the block
    has it, too, as a head that is tied to an embedding.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    homes: dict[int, set[int]] = {
        id(p): {-1} for module in outside for p in nn.Module.parameters(module, recurse=False)
    }
    for number, block in enumerate(blocks):
        for parameter in nn.Module.parameters(block):  # which a class may have replaced
            homes.setdefault(id(parameter), set()).add(number)
    found = [homes.get(id(t.parameter), set()) for t in trained]
    return [next(iter(home)) if len(home) == 1 else -1 for home in found]


def _parts(
    trained: Sequence[Trained],
    units: Sequence[int],
    ranks: GradientRanks,
    *,
    first_bytes: int,
    bytes_limit: int,
    divided: bool,
) -> list[BucketParameters]:
    members = []
    for index, t in enumerate(trained):
        shard = t.holding.shard if divided else ()
        kind = (t.parameter.dtype, t.master is None, t.parameter.device, ranks(t.holding), shard, units[index])
        members.append(Member(index, t.parameter.numel(), t.parameter.nbytes, kind))
    found = []
    for number, bucket in enumerate(fill_buckets(members, first_bytes=first_bytes, bytes_limit=bytes_limit)):
        indices = tuple(member.index for member in bucket)
        holding = trained[indices[0]].holding
        found.append(BucketParameters(indices, ranks(holding), holding.shard, units[indices[0]], number))
    return found
