"""`Exchange`: what ranks do with one flat buffer. Where numbers lie in the buffer is another question (`gradients`).

    all-reduce       every rank ends with the sum of the whole buffer
    reduce-scatter   each rank ends with its piece of the sum, which another exchange may then take further
    credited         an all-reduce in parts, which leave in a given order, a credit of bytes at a time
    coded            a sum of which less is sent, by a codec
    between hosts    a sum inside each host, and another exchange between them
    canonical        a sum in one fixed order, whatever the number of ranks

A step is `start`, `send` (once, or once a microbatch), `settle` and `wait`; then `result` holds the agreed numbers, and
`commit` says that an update was made from them. All ranks of a group call these in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.codec.codec import Codec, TensorPlace, pack, unpack
from shoal.comm.collective import Collective, Handle


class Exchange(Protocol):
    """The exchange of one buffer, again and again."""

    @property
    def result(self) -> Tensor:
        """Flat, the same memory in every step: the whole buffer, or this rank's piece. Agreed after `wait`."""
        ...

    def start(self) -> None:
        """A step begins: forgets the one before."""
        ...

    def send(self, buffer: Tensor) -> None:
        """`buffer` `[numel]` holds this rank's terms. Does not block, and may overwrite it."""
        ...

    def land(self) -> None:
        """Returns when the buffer that was sent last may be used again."""
        ...

    def settle(self) -> None:
        """Nothing more is sent in this step: starts what follows. All buffers settle before the first one waits."""
        ...

    def wait(self) -> None:
        """Returns when `result` is agreed."""
        ...

    def commit(self) -> None:
        """The update was made: what the exchange carries from this step to the next one counts."""
        ...


class Segment(NamedTuple):
    """What lies in a flat buffer from `start` on: a part of the parameter `name` of the unsplit model, in `shape`.

    `skipped`: how many elements of this rank's part of the parameter, in row order, lie in earlier buffers.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    skipped: int = 0

    @property
    def numel(self) -> int:
        """Elements in it."""
        return prod(self.shape)

    @property
    def slice(self) -> slice:
        """Where it lies in the buffer."""
        return slice(self.start, self.start + self.numel)

    @property
    def place(self) -> TensorPlace:
        """What a codec is told of it."""
        return TensorPlace(self.name, self.start, self.shape)


def segments_within(segments: Iterable[Segment], part: slice) -> list[Segment]:
    """What of `segments` lies in `part` of their buffer, counted from where `part` begins. What is cut is flat."""
    found = []
    for segment in segments:
        begin, end = max(segment.slice.start, part.start), min(segment.slice.stop, part.stop)
        if begin < end:
            shape = segment.shape if end - begin == segment.numel else (end - begin,)
            skipped = segment.skipped + begin - segment.start
            found.append(Segment(segment.name, begin - part.start, shape, skipped))
    return found


class NewExchange(Protocol):
    """From a group, the flat buffer that its ranks agree on in place, and what lies in it, to their exchange.

    `by_microbatch`: the gradient of each microbatch is to be sent apart, and the sum must not depend on how many ranks
    there are; so neither may its norm.
    """

    by_microbatch: bool

    def __call__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment], /) -> Exchange: ...


class AllReduce:
    """The sum over `group`, in place, whatever lies in the buffer."""

    by_microbatch: ClassVar[bool] = False

    def __init__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment] = ()) -> None:
        self.group, self.result = group, buffer
        self._handle: Handle | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of what a rank has to say."""
        return self.result.nbytes

    def start(self) -> None:
        self._handle = None

    def send(self, buffer: Tensor) -> None:
        self._handle = self.group.all_reduce(buffer) if self.group.size > 1 else None

    def land(self) -> None:
        self.wait()

    def settle(self) -> None:
        """Nothing follows the sum."""

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()
            self._handle = None

    def commit(self) -> None:
        """Nothing is carried over."""


class ReduceScatter:
    """This rank's piece of the sum over `shard`, in `piece`; then `follow` agrees on it with the ranks beyond `shard`.

        piece_r = follow( reduce_scatter over shard (buffer)[r] )

    A second `send` of a step adds to the piece: a microbatch at a time, without room for the sum of whole buffers.
    """

    def __init__(self, shard: Collective, piece: Tensor, follow: Exchange) -> None:
        self.shard, self.result, self.follow = shard, piece, follow
        self._handle: Handle | None = None
        self._later: Tensor | None = None
        self._sent = False

    def start(self) -> None:
        self._sent, self._handle = False, None
        self.follow.start()

    def send(self, buffer: Tensor) -> None:
        self._later = torch.empty_like(self.result) if self._sent else None
        self._handle = self.shard.reduce_scatter(self.result if self._later is None else self._later, buffer)
        self._sent = True

    def land(self) -> None:
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        if self._later is not None:
            self.result.add_(self._later)
            self._later = None

    def settle(self) -> None:
        self.land()
        self.follow.send(self.result)
        self.follow.settle()

    def wait(self) -> None:
        self.follow.wait()

    def commit(self) -> None:
        self.follow.commit()


# What ranks that divide a model send each other, with fewer bits: pieces of gradients and of parameters under ZeRO.
#
#     gradients    rank r gets part r of every other rank's buffer, encoded, and adds it to its own:
#                  piece_r = g_r[r] + sum over s != r of decode(encode(g_s[r]))
#     parameters   every rank gets decode(encode(piece_r)) of every rank r, its own too, so that all compute with the
#                  same bits; what the optimizer updates keeps its full precision
#
# (Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv:2306.10209,
# sections 3.1 and 3.3: quantised weights, and quantised gradients by one all-to-all.) Each number is rounded once, not
# once a hop as on a ring. There is no error feedback: a residual would be as large as the whole gradient, which ZeRO
# divides to save memory.


class PieceHome(Protocol):
    """Where a rank's pieces of parameters and gradients live under ZeRO-3, if not on the device."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, one-dimensional."""
        ...

    def fetched(self, piece: Tensor) -> None:
        """A piece of parameters came to the device."""
        ...

    def kept(self, size_bytes: int) -> None:
        """A piece of gradients left it."""
        ...


@dataclass(frozen=True)
class PieceCodecs:
    """The codecs of pieces of `weights` and of `gradients`, not linear; None: as they are. `home`: where pieces live
    under ZeRO-3; None: on the device.
    """

    weights: Codec | None = None
    gradients: Codec | None = None
    home: PieceHome | None = None

    def exact(self) -> PieceCodecs:
        """The same without codecs."""
        return PieceCodecs(home=self.home)

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A piece."""
        if self.home is None:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self.home.allocate(numel, dtype)

    def scatter(self, shard: Collective, piece: Tensor, follow: Exchange) -> Exchange:
        """The exchange that ends with this rank's part of a sum over `shard` in `piece`; see `ReduceScatter`."""
        if self.gradients is None or shard.size == 1:
            return ReduceScatter(shard, piece, follow)
        return CodedReduceScatter(self.gradients, shard, piece, follow)

    def gather(self, shard: Collective, whole: Tensor, piece: Tensor) -> Handle:
        """Begins to write every rank's `piece` `[numel]`, as all ranks of `shard` decode it, into `whole`
        `[size * numel]`. Pieces that are not coded travel in the type of `whole`.
        """
        if self.home is not None:
            self.home.fetched(piece)
        if self.weights is None or shard.size == 1:
            return shard.all_gather(whole, piece.to(whole.dtype))
        packed = pack(self.weights, self.weights.encode(piece))
        rows = packed.new_empty(shard.size, packed.numel())
        return _Decoding(self.weights, shard.all_gather(rows.view(-1), packed), rows, whole, piece.numel())


class CodedReduceScatter(ReduceScatter):
    """`ReduceScatter` of terms that `codec` has encoded; the term of the rank that keeps the sum is exact."""

    def __init__(self, codec: Codec, shard: Collective, piece: Tensor, follow: Exchange) -> None:
        super().__init__(shard, piece, follow)
        self._codec, self._adds = codec, False

    def send(self, buffer: Tensor) -> None:
        size, rank, numel = self.shard.size, self.shard.rank, self.result.numel()
        self._adds, self._sent = self._sent, True
        parts = buffer.view(size, numel)
        width = self._codec.wire_bytes(numel)
        packed = torch.zeros(size, width, dtype=torch.uint8, device=buffer.device)
        for to in _others(size, rank):
            packed[to] = pack(self._codec, self._codec.encode(parts[to]))
        self._rows = torch.empty_like(packed)
        self._own = parts[rank].clone()
        self._handle = self.shard.all_to_all(self._rows.view(-1), packed.view(-1))

    def land(self) -> None:
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        numel, total = self.result.numel(), self._own
        for source in _others(self.shard.size, self.shard.rank):
            total.add_(_decoded(self._codec, self._rows[source], numel).to(total.dtype))
        if self._adds:
            self.result.add_(total)
        else:
            self.result.copy_(total)
        del self._rows, self._own


class _Decoding:
    """A gather under way, whose `rows` `[ranks, bytes]` are decoded into `whole` when they have come."""

    def __init__(self, codec: Codec, handle: Handle, rows: Tensor, whole: Tensor, numel: int) -> None:
        self._codec, self._handle, self._rows, self._whole, self._numel = codec, handle, rows, whole, numel

    def wait(self) -> None:
        """Returns when `whole` is written."""
        self._handle.wait()
        for row, part in zip(self._rows, self._whole.view(-1, self._numel), strict=True):
            part.copy_(_decoded(self._codec, row, self._numel))


def _others(size: int, rank: int) -> Iterable[int]:
    return (other for other in range(size) if other != rank)


def _decoded(codec: Codec, packed: Tensor, numel: int) -> Tensor:
    return codec.decode(unpack(codec, packed, numel), numel)


# `Canonical`: a sum in one fixed tree of pairs, whatever the number of ranks.
#
#     ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7))          8 shards
#
# Sums of floating-point numbers depend on their order. Here the leaves are the gradients of logical shards of the
# batch, which stay the same. A rank sends its shards one after the other, and adds equally large branches as soon as
# there are two. Ranks then exchange parts of their branches: rank r gets part r of each, adds them in the same tree,
# and tells all the sum. So 1, 2, 4 and 8 ranks get the same bits, for the bytes of an all-reduce.
#
# Every rank has a whole branch: as many shards as any other, a power of two of them, or it is alone.


class Canonical:
    """The sum of all that is sent in a step, over the ranks of `group`, in `buffer` `[numel]`; a shard a `send`."""

    by_microbatch: ClassVar[bool] = True

    def __init__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment] = ()) -> None:
        self.group, self.result = group, buffer
        self._tree = _Tree()
        self._handle: Handle | None = None
        part = -(-buffer.numel() // group.size)
        self._filled = torch.zeros(part * group.size, dtype=buffer.dtype, device=buffer.device)
        self._rows = torch.empty_like(self._filled)

    def start(self) -> None:
        self._tree, self._handle = _Tree(), None

    def send(self, buffer: Tensor) -> None:
        self._tree.add(buffer.clone())

    def land(self) -> None:
        """The buffer was read when it was sent."""

    def settle(self) -> None:
        branch = self._tree.root()
        if self.group.size == 1:
            self.result.copy_(branch)
            return
        self._filled[: branch.numel()] = branch
        self._handle = self.group.all_to_all(self._rows, self._filled)

    def wait(self) -> None:
        if self._handle is None:
            return
        self._handle.wait()
        tree = _Tree()
        for row in self._rows.view(self.group.size, -1):
            tree.add(row.clone())
        self.group.all_gather(self._filled, tree.root()).wait()
        self.result.copy_(self._filled[: self.result.numel()])
        self._handle = None

    def commit(self) -> None:
        """Nothing is carried over."""


class _Tree:
    """Sums of branches that are not complete: at most one of each power of two leaves, the largest first."""

    def __init__(self) -> None:
        self._branches: list[tuple[int, Tensor]] = []

    def add(self, leaf: Tensor) -> None:
        """One more leaf, which is written to."""
        leaves, branch = 1, leaf
        while self._branches and self._branches[-1][0] == leaves:
            branch = self._branches.pop()[1].add_(branch)
            leaves *= 2
        self._branches.append((leaves, branch))

    def root(self) -> Tensor:
        """The sum of all leaves: what is left over joins from the smallest branch on."""
        branch = self._branches[-1][1]
        for _, larger in reversed(self._branches[:-1]):
            branch = larger.add_(branch)
        return branch
