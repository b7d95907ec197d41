"""ZeRO-3 (arXiv:1910.02054; FSDP): parameters, too, are whole only where and while they are used.

Each rank keeps its piece of every unit, a block of the model or everything outside of blocks. `gather` brings all
pieces into one buffer and makes the parameters views of it; `release` gives the buffer's memory back. Gradients are
those of ZeRO-2: one reduce-scatter of a unit's buffer as soon as its backward has filled it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce, NewExchange, PieceCodecs
from shoal.gradients.bucket import ALIGNMENT, BucketParameters
from shoal.gradients.gradients import Groups
from shoal.gradients.sharded import ShardedBase, flat, masters_of
from shoal.gradients.units import ShardedParameters, Unit, chained, read_outside
from shoal.state import Trained


class FullyShardedGradients(ShardedBase):
    """`Gradients` under ZeRO-3. `blocks` are modules that are called one after the other; what is in none of them is
    one more unit.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        parts: Sequence[BucketParameters],
        *,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        groups: Groups,
        replica: Collective,
        exchange: NewExchange = AllReduce,
        undivided: int | None = ALIGNMENT,
        pieces: PieceCodecs = PieceCodecs(),
    ) -> None:
        rest_modules = _direct_owners(model, [trained[i] for c in parts if c.unit < 0 for i in c.indices])
        names = {id(module): name for name, module in model.named_modules()}
        said = [f"{names.get(id(block), '')} (a {type(block).__name__})" for block in blocks]
        stores = [
            ShardedParameters(
                *flat(trained, part, groups, undivided=undivided),
                groups(part.shard),
                names=[trained[index].holding.name for index in part.indices],
                read=[
                    read_outside(trained[index].holding.name, None if part.unit < 0 else said[part.unit])
                    for index in part.indices
                ],
                codecs=pieces,
                masters=masters_of(trained, part),
            )
            for part in parts
        ]
        super().__init__(
            trained, parts, stores, stage=3, groups=groups, replica=replica, exchange=exchange, undivided=undivided,
            pieces=pieces,
        )  # fmt: skip
        self.gathered: Sequence[Tensor] = [store.whole for store in stores]
        """The buffers that units are gathered into; empty while they are released."""
        self._rest = Unit(_of_unit(parts, stores, -1), passes=False)
        passing = [Unit(_of_unit(parts, stores, number), passes=True) for number in range(len(blocks))]
        chained(passing)
        self._units = [self._rest, *passing]
        self._watches = [handle for module in rest_modules for handle in self._rest.watch(module)]
        for unit, block in zip(passing, blocks, strict=True):
            self._watches += unit.watch(block)
        self._full = self._stepping = False

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        with super().backward(last=last):
            yield
        for unit in self._units:  # a block is compared behind its forward, and may be released by now on some ranks
            unit.read_back_forward(compares=not unit.passes)
        self._release()

    @contextmanager
    def schedule(self) -> Iterator[None]:
        self._stay(True)
        try:
            with super().schedule():
                yield
        finally:
            self._stay(False)
        for unit in self._units:
            unit.read_back_forward()
        self._release()

    def start(self) -> None:
        self._stepping = False
        super().start()

    def reduce(self) -> Tensor:
        self._stepping = True  # from now on pieces may be newer than what was gathered
        return super().reduce()

    def gather(self) -> None:
        """What was gathered before the optimizer's step is old."""
        self._stepping = False
        super().gather()
        for unit in self._units:
            unit.updated()
        self._release()

    @contextmanager
    def full_parameters(self, *, compares: bool = True) -> Iterator[None]:
        if self._full:
            yield
            return
        used = [unit for unit in self._units if unit.here]  # by a forward whose backward may follow
        if not self._stepping:
            for unit in used:
                unit.read_back_forward(compares=not unit.passes)
        self._release()  # what is here may have been coded on its way
        for unit in self._units:
            unit.gather(exact=True)
        self._stay(True)
        self._full = True
        try:
            yield
            for unit in self._units:
                unit.read_back(compares=compares)
        finally:
            self._full = False
            self._stay(False)
            self._release()
        for unit in used:
            unit.gather()

    def close(self) -> None:
        super().close()
        for handle in self._watches:
            handle.remove()

    def _stay(self, stays: bool) -> None:
        for unit in self._units:
            unit.stays = stays

    def _release(self) -> None:
        if self._full:
            return
        for unit in self._units:
            unit.release()


def _of_unit(
    parts: Sequence[BucketParameters], stores: Sequence[ShardedParameters], unit: int
) -> list[ShardedParameters]:
    return [store for part, store in zip(parts, stores, strict=True) if part.unit == unit]


def _direct_owners(model: nn.Module, trained: Sequence[Trained]) -> list[nn.Module]:
    """The model itself, and every module that has one of these parameters for its own."""
    wanted = {id(t.parameter) for t in trained}
    owners = [m for m in model.modules() if any(id(p) in wanted for p in nn.Module.parameters(m, recurse=False))]
    return [model, *(owner for owner in owners if owner is not model)]
