"""ZeRO-1 and -2 (arXiv:1910.02054): optimizer state, and gradients, divided over the ranks of `shard`.

Gradients are summed by one reduce-scatter a bucket, and the optimizer runs on this rank's pieces, which are views of
the parameters' flat buffers; after its step one all-gather a bucket brings the others' pieces. ZeRO-1 keeps whole
gradients and reduces them once a step; ZeRO-2 lends buffers, and adds up pieces microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Allocate, Collective, Handle, home_of, ordinary
from shoal.comm.exchanges.exchange import AllReduce, NewExchange, PieceCodecs
from shoal.gradients.bucket import (
    ALIGNMENT,
    Bucket,
    BucketParameters,
    FlatLayout,
    Flight,
    flat_layout,
    segments_of,
)
from shoal.gradients.gradients import FlatGradients, Groups, OverReplica, global_norm
from shoal.gradients.masters import write_piece
from shoal.gradients.partial_gradient import PartialGradient
from shoal.gradients.reducer import OwnGradient, Reducer
from shoal.gradients.script_writes import Placed, WrittenAlike, check_read_back, read_back_data, read_back_masters
from shoal.state import Owned, Trained, counts_piece, owned_run, owned_whole, same_piece


class HasPiece(Protocol):
    """The parameters of one bucket, wherever they are: this rank's piece of them, flat."""

    piece: Tensor


@dataclass
class _Place:
    """A trained parameter and what this rank updates of it: `piece`, from element `start` on; None where nothing is
    this rank's. `group` are the ranks over which the model is divided, of which some may have the same numbers.
    """

    number: int
    trained: Trained
    piece: Parameter | None
    start: int
    group: Collective
    _own: Tensor | None = None
    _shown: PartialGradient | None = None

    def expose(self, names: Collection[str]) -> PartialGradient | None:
        """Makes `.grad` of the parameter stand for that of all pieces; None where it is not in `names`."""
        if self.trained.holding.name in names:
            return self._show()
        self.trained.parameter.grad = None
        if self.piece is not None:
            self.piece.grad = None
        return None

    def accept(self, exposed: PartialGradient | None) -> PartialGradient | None:
        """Makes the gradient of the piece what `.grad` of the parameter is now, where that was replaced."""
        now, piece = self.trained.parameter.grad, self.piece
        if now is exposed:
            return exposed
        if now is None:
            return self.expose(())
        if piece is not None:
            flat = now.local if isinstance(now, PartialGradient) else now.reshape(-1)[self.start :][: piece.numel()]
            piece.grad = flat.view_as(piece).to(piece.dtype)
        return self._show()

    def _show(self) -> PartialGradient:
        parameter, own = self.trained.parameter, None if self.piece is None else self.piece.grad
        shown = self._shown
        if shown is None or own is not self._own:  # a step's gradient mostly lies where the last one did
            nothing = torch.empty(0, dtype=parameter.grad_dtype, device=parameter.device)
            holding = self.trained.holding
            what = f"the gradient of {holding.name} is divided over {len(holding.shard)} ranks by ZeRO"
            local = nothing if own is None else own.view(-1)
            shown = PartialGradient(
                local, self.start, parameter.shape, group=self.group, what=what, counts=counts_piece(holding)
            )
            self._own, self._shown = own, shown
        parameter.grad = shown
        return shown


def _start_in(bucket: Bucket, number: int, rank: int) -> int:
    run = bucket.layout.run(number, rank)
    return 0 if run is None else run.start


class ShardedBase(OverReplica):
    """What the stages have in common: buckets, pieces and their gradients. The norm adds up over `replica`.

    `stores` hold the parameters of `parts`. `undivided`: so many numbers of a parameter stay together on a rank; None:
    all of them. `pieces` code what the ranks of `shard` send each other; their home is that of sums of lent buckets.
    """

    tuned = None

    def __init__(
        self,
        trained: Sequence[Trained],
        parts: Sequence[BucketParameters],
        stores: Sequence[HasPiece],
        *,
        stage: int,
        groups: Groups,
        replica: Collective,
        exchange: NewExchange = AllReduce,
        undivided: int | None = ALIGNMENT,
        pieces: PieceCodecs = PieceCodecs(),
    ) -> None:
        flight = Flight()
        self._buckets = [
            _bucket(
                trained,
                part,
                groups,
                exchange,
                flight=None if stage == 1 else flight,
                undivided=undivided,
                pieces=pieces,
            )
            for part in parts
        ]
        self._reducer = Reducer([(t.holding.name, t.parameter) for t in trained], self._buckets, eager=stage > 1)
        trained = [replace(t, master=None) for t in trained]  # it is in the pieces now
        self._trained, self._replica = trained, replica
        self._device = home_of([each.parameter for each in trained[:1]], replica)
        found = [
            (index, bucket, owned)
            for part, store, bucket in zip(parts, stores, self._buckets, strict=True)
            for index, owned in _owned(trained, part, store, bucket.layout, groups(part.shard).rank)
        ]
        found.sort(key=lambda entry: entry[0])
        self.owned: Sequence[Owned] = [owned for _, _, owned in found]
        self._gradients = [(owned.parameter, bucket, index) for index, bucket, owned in found]
        self._flat = FlatGradients(
            [bucket.exchange.result for bucket in self._buckets],
            [bucket.pieces[index].data_ptr() for index, bucket, _ in found],
        )
        own = {index: owned.parameter for index, _, owned in found}
        places = [
            _Place(index, trained[index], own.get(index), _start_in(bucket, number, groups(part.shard).rank), replica)
            for part, bucket in zip(parts, self._buckets, strict=True)
            for number, index in enumerate(part.indices)
        ]  # fmt: skip
        self._places = sorted(places, key=lambda place: place.number)
        self._exposed: list[PartialGradient | None] = []

    @property
    def own(self) -> OwnGradient:
        return self._reducer.own

    def start(self) -> None:
        for piece, _, _ in self._gradients:
            piece.grad = None  # it lies in a bucket that is filled now
        self._reducer.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._reducer.backward(last=last)

    def schedule(self) -> AbstractContextManager[None]:
        return self._reducer.schedule()

    def reduce(self) -> Tensor:
        own = self._reducer.finish()
        for trained in self._trained:
            trained.parameter.grad = None  # a part of it is this rank's own term, not the sum
        self._show()
        return global_norm(own, self._replica, device=self._device)

    @property
    def used(self) -> frozenset[str]:
        return self._reducer.used_names

    def expose(self, names: Collection[str]) -> None:
        self._exposed = [place.expose(names) for place in self._places]

    def accept(self) -> None:
        self._exposed = [place.accept(old) for place, old in zip(self._places, self._exposed, strict=True)]

    def accept_weights(self) -> None:
        """Pieces are written where the weights are whole; see `script_writes`."""

    def settle(self) -> None:
        """Nothing is under way between two steps but what the next use waits for."""

    def gather(self) -> None:
        """The update was made."""
        for bucket in self._buckets:
            bucket.commit()

    def close(self) -> None:
        self._reducer.close()

    def _show(self) -> None:
        """Makes the pieces of the sum the gradients that the optimizer sees."""
        for parameter, bucket, index in self._gradients:
            parameter.grad = bucket.pieces[index].to(parameter.dtype).detach()  # whose .data a script may replace


class ShardedGradients(ShardedBase):
    """`Gradients` under ZeRO-1 and -2: every rank holds all parameters."""

    def __init__(
        self,
        trained: Sequence[Trained],
        parts: Sequence[BucketParameters],
        *,
        stage: int,
        groups: Groups,
        replica: Collective,
        exchange: NewExchange = AllReduce,
        undivided: int | None = ALIGNMENT,
        pieces: PieceCodecs = PieceCodecs(),
    ) -> None:
        self._stores = [
            FlatParameters(
                *flat(trained, part, groups, undivided=undivided),
                groups(part.shard),
                names=[trained[index].holding.name for index in part.indices],
                masters=masters_of(trained, part),
            )
            for part in parts
        ]
        self._placed = [each for store in self._stores for each in store.placed]
        super().__init__(
            trained, parts, self._stores, stage=stage, groups=groups, replica=replica, exchange=exchange,
            undivided=undivided, pieces=pieces,
        )  # fmt: skip

    def gather(self) -> None:
        check_read_back(self._placed)
        super().gather()
        handles: list[Handle] = [store.start_gather() for store in reversed(self._stores)]
        for handle in handles:
            handle.wait()

    def start(self) -> None:
        self._read_back()
        super().start()

    def accept_weights(self) -> None:
        self._read_back()
        for store in self._stores:
            store.compare()

    def settle(self) -> None:
        self._read_back()

    def full_parameters(self, *, compares: bool = True) -> AbstractContextManager[None]:
        """They are whole."""
        return nullcontext()

    def _read_back(self) -> None:
        """See `script_writes`."""
        read_back_data(self._placed)
        for store in self._stores:
            store.read_back_masters()


class FlatParameters:
    """Parameters as views of one flat buffer that every rank holds; `piece` is what this rank updates: a view of it, or
    its part of the `masters`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        layout: FlatLayout,
        shard: Collective,
        *,
        names: Sequence[str],
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        self._shard, self._alike = shard, WrittenAlike(shard)
        self._whole = flattened(parameters, layout, shard.allocate)
        self._own = self.piece = self._whole[layout.mine(shard.rank)]
        if masters is not None:
            self.piece = torch.zeros_like(self._own, dtype=masters[0].dtype)
            write_piece(self.piece, masters, layout, shard.rank)
        self.placed = [
            Placed(name, p, self._whole[layout.slice(n)].view(p.shape))
            for n, (name, p) in enumerate(zip(names, parameters, strict=True))
        ]
        for _, parameter, place in self.placed:
            parameter.data = place

    def start_gather(self) -> Handle:
        """Begins to bring the pieces of the other ranks, in place."""
        if self._own is not self.piece:
            self._own.copy_(self.piece)
        return self._shard.all_gather(self._whole, self._own)

    def compare(self) -> None:
        """Before an update: see `WrittenAlike`."""
        self._alike.compare(self.placed)

    def read_back_masters(self) -> None:
        """What was written into the buffer is in the piece, too."""
        if self._own is not self.piece:
            read_back_masters(self.piece, self._own)


@torch.no_grad()
def flattened(parameters: Sequence[Parameter], layout: FlatLayout, allocate: Allocate = ordinary) -> Tensor:
    """A buffer that holds the parameters; what belongs to none of them is zero."""
    whole = allocate(layout.numel, dtype=parameters[0].dtype, device=parameters[0].device)
    for number, parameter in enumerate(parameters):
        whole[layout.slice(number)].view(parameter.shape).copy_(parameter)
    return whole


def flat(
    trained: Sequence[Trained], part: BucketParameters, groups: Groups, *, undivided: int | None = ALIGNMENT
) -> tuple[list[Parameter], FlatLayout]:
    """The parameters of a bucket, and how they lie."""
    parameters = [trained[index].parameter for index in part.indices]
    lengths, ranks = [p.numel() for p in parameters], groups(part.shard).size
    return parameters, flat_layout(lengths, ranks, undivided=undivided, number=part.number)


def masters_of(trained: Sequence[Trained], part: BucketParameters) -> list[Tensor] | None:
    """Those of the parameters of a bucket, all of which have one or none."""
    masters = [master for index in part.indices if (master := trained[index].master) is not None]
    return masters or None


def _bucket(
    trained: Sequence[Trained],
    part: BucketParameters,
    groups: Groups,
    exchange: NewExchange,
    *,
    flight: Flight | None,
    undivided: int | None,
    pieces: PieceCodecs,
) -> Bucket:
    """A bucket whose pieces are agreed on by `exchange`. With a `flight` it is lent."""
    parameters, layout = flat(trained, part, groups, undivided=undivided)
    shard, beyond = groups(part.shard), groups(beyond_shard(trained, part))
    wide = torch.float32 if parameters[0].dtype.itemsize == 2 else parameters[0].dtype
    dtype = trained[part.indices[0]].reduce_dtype or wide
    device, buffer = parameters[0].device, None
    if flight is None:
        buffer = shard.allocate(layout.numel, dtype=dtype, device=device)
        piece = buffer[layout.mine(shard.rank)]
    else:
        piece = pieces.zeros(layout.piece, dtype=dtype, device=device)
    holdings = {index: trained[index].holding for index in part.indices}
    return Bucket(
        dict(zip(part.indices, parameters, strict=True)),
        layout,
        pieces.scatter(shard, piece, exchange(beyond, piece, segments_of(trained, part, layout, rank=shard.rank))),
        rank=shard.rank,
        buffer=buffer,
        counted=[i for i, h in holdings.items() if counts_piece(h)],
        flight=flight,
        kept=None if flight is None or pieces.home is None else pieces.home.kept,
    )


def beyond_shard(trained: Sequence[Trained], part: BucketParameters) -> tuple[int, ...]:
    """The ranks that sum the same piece of a bucket: those of its `sums` at this rank's place in their `shard`."""
    return same_piece(trained[part.indices[0]].holding, part.sums)


def _owned(
    trained: Sequence[Trained], part: BucketParameters, store: HasPiece, layout: FlatLayout, rank: int
) -> list[tuple[int, Owned]]:
    """What the optimizer of this rank runs on, by the index of the parameter."""
    found = []
    for number, index in enumerate(part.indices):
        run, t = layout.run(number, rank), trained[index]
        if run is None:
            continue
        piece = store.piece[run.at : run.at + run.numel]
        if run.numel == t.parameter.numel():
            found.append((index, owned_whole(t, Parameter(piece.view(t.parameter.shape)))))
        else:
            found.append((index, owned_run(t.holding, Parameter(piece), run.start, run.stop)))
    return found
