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
from math import prod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.codec.codec import TensorPlace
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
