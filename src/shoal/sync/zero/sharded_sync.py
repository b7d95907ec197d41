"""The `Sync` of ZeRO-1 and -2, on the bucket reducer; ZeRO-3 builds on it.

    stage   whole on every rank        a piece on every rank         a step sends
    1       parameters, gradients      optimizer state               a reduce-scatter, an all-gather
    2       parameters                 gradients, optimizer state    a reduce-scatter a microbatch, an all-gather
    3       one unit at a time         all three                     a reduce-scatter and two all-gathers a microbatch

The optimizer runs on this rank's pieces: one-dimensional views of the parameters' buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.buckets.own_gradient import OwnGradient
from shoal.comm.buckets.reducer import Reducer
from shoal.comm.collective import Collective, Handle
from shoal.sync.norm import global_norm
from shoal.sync.owned import Owned, Trained, owned_run, same_piece
from shoal.sync.zero.chunk import Chunk
from shoal.sync.zero.flat_layout import FlatLayout, flat_layout
from shoal.sync.zero.flat_parameters import FlatParameters
from shoal.sync.zero.scattered_bucket import Flight, ScatteredBucket
from shoal.topology.holding import Ranks

Groups = Callable[[Ranks], Collective]


class HasPiece(Protocol):
    """Parameters of a chunk, wherever they are: this rank's piece of them."""

    piece: Tensor


class ShardedSync:
    """What the stages have in common: buckets, pieces and their gradients. `replica`: all ranks of the replica."""

    def __init__(
        self,
        trained: Sequence[Trained],
        chunks: Sequence[Chunk],
        stores: Sequence[HasPiece],
        *,
        stage: int,
        groups: Groups,
        replica: Collective,
    ) -> None:
        flight = Flight()
        self._buckets = [_bucket(trained, chunk, groups, stays=stage == 1, flight=flight) for chunk in chunks]
        self._reducer = Reducer([(t.holding.name, t.parameter) for t in trained], self._buckets, eager=stage > 1)
        self._trained, self._replica = trained, replica
        self._device = trained[0].parameter.device if trained else torch.device("cpu")
        found = [
            (index, bucket, piece)
            for chunk, store, bucket in zip(chunks, stores, self._buckets, strict=True)
            for index, piece in _owned(trained, chunk, store, bucket.layout, groups(chunk.shard).rank)
        ]
        found.sort(key=lambda entry: entry[0])
        self.owned: list[Owned] = [owned for _, _, owned in found]
        self._gradients = [(owned.parameter, bucket, index) for index, bucket, owned in found]

    remembered = None

    @property
    def own(self) -> OwnGradient:
        return self._reducer.own

    def start(self) -> None:
        self._reducer.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._reducer.backward(last=last)

    def schedule(self) -> AbstractContextManager[None]:
        return self._reducer.schedule()

    def gradients(self) -> Tensor:
        own = self._reducer.finish()
        for trained in self._trained:
            trained.parameter.grad = None  # a part of it is this rank's own term, and no sum
        self._show()
        return global_norm(own, self._replica, device=self._device)

    def scale(self, factor: float | Tensor) -> None:
        for bucket in self._buckets:
            bucket.piece.mul_(factor)
        self._show()

    def settle(self) -> None:
        """Nothing is under way between two steps, but what the next use waits for."""

    def close(self) -> None:
        self._reducer.close()

    def _show(self) -> None:
        """Makes the pieces of the sum the gradients that the optimizer sees."""
        for parameter, bucket, index in self._gradients:
            parameter.grad = bucket.runs[index].to(parameter.dtype)


class ZeroSync(ShardedSync):
    """Stages 1 and 2."""

    def __init__(
        self, trained: Sequence[Trained], chunks: Sequence[Chunk], *, stage: int, groups: Groups, replica: Collective
    ) -> None:
        self._stores = [
            FlatParameters(*flat(trained, chunk, groups), groups(chunk.shard)) for chunk in chunks
        ]  # fmt: skip
        super().__init__(trained, chunks, self._stores, stage=stage, groups=groups, replica=replica)

    def parameters(self) -> None:
        handles: list[Handle] = [store.start_gather() for store in reversed(self._stores)]
        for handle in handles:
            handle.wait()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()


def flat(trained: Sequence[Trained], chunk: Chunk, groups: Groups) -> tuple[list[Parameter], FlatLayout]:
    """The parameters of a chunk, and how they lie."""
    parameters = [trained[index].parameter for index in chunk.indices]
    return parameters, flat_layout([p.numel() for p in parameters], groups(chunk.shard).size)


def _bucket(
    trained: Sequence[Trained], chunk: Chunk, groups: Groups, *, stays: bool, flight: Flight
) -> ScatteredBucket:
    holdings = {index: trained[index].holding for index in chunk.indices}
    return ScatteredBucket(
        {index: trained[index].parameter for index in chunk.indices},
        flat(trained, chunk, groups)[1],
        shard=groups(chunk.shard),
        others=groups(chunk.others),
        counted=[i for i, h in holdings.items() if h.rank == min(same_piece(h, h.holders))],
        stays=stays,
        flight=flight,
    )


def _owned(
    trained: Sequence[Trained], chunk: Chunk, store: HasPiece, layout: FlatLayout, rank: int
) -> list[tuple[int, Owned]]:
    """What the optimizer of this rank runs on, by the index of the parameter."""
    found = []
    for number, index in enumerate(chunk.indices):
        run = layout.run(number, rank)
        if run is not None:
            piece = Parameter(store.piece[run.at : run.at + run.numel])
            found.append((index, owned_run(trained[index].holding, piece, run.start, run.stop)))
    return found
