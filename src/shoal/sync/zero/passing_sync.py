"""The `Sync` of ZeRO-3: parameters, too, are whole only where and while they are used.

Its gradients are those of ZeRO-2: one reduce-scatter of each unit's buffer, as soon as its backward has filled it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from shoal.comm.collective import Collective
from shoal.sync.owned import Trained
from shoal.sync.zero.chunk import Chunk
from shoal.sync.zero.passing_parameters import PassingParameters
from shoal.sync.zero.sharded_sync import Groups, ShardedSync, flat
from shoal.sync.zero.unit import Unit, chained


class PassingSync(ShardedSync):
    """Stage 3. `blocks` are called one after the other, as modules; what is in none of them is one more unit."""

    def __init__(
        self,
        trained: Sequence[Trained],
        chunks: Sequence[Chunk],
        *,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        groups: Groups,
        replica: Collective,
    ) -> None:
        rest_modules = _direct_owners(model, [trained[i] for c in chunks if c.unit < 0 for i in c.indices])
        stores = [PassingParameters(*flat(trained, chunk, groups), groups(chunk.shard)) for chunk in chunks]
        super().__init__(trained, chunks, stores, stage=3, groups=groups, replica=replica)
        self._rest = Unit(_of_unit(chunks, stores, -1), passes=False)
        passing = [Unit(_of_unit(chunks, stores, number), passes=True) for number in range(len(blocks))]
        chained(passing)
        self._units = [self._rest, *passing]
        self._watches = [handle for module in rest_modules for handle in self._rest.watch(module)]
        for unit, block in zip(passing, blocks, strict=True):
            self._watches += unit.watch(block)
        for chunk in chunks:
            if chunk.unit >= 0:
                members = (trained[index] for index in chunk.indices)
                self._watches += [passing[chunk.unit].guard(t.holding.name, t.parameter) for t in members]

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        with super().backward(last=last):
            yield
        self._release()

    @contextmanager
    def schedule(self) -> Iterator[None]:
        self._stay(True)
        try:
            with super().schedule():
                yield
        finally:
            self._stay(False)
        self._release()

    def parameters(self) -> None:
        """What was gathered before the optimizer's step is old."""
        self._release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        for unit in self._units:
            unit.gather()
        try:
            yield
            for unit in self._units:
                unit.keep()
        finally:
            self._release()

    def close(self) -> None:
        super().close()
        for handle in self._watches:
            handle.remove()

    def _stay(self, stays: bool) -> None:
        for unit in self._units:
            unit.stays = stays

    def _release(self) -> None:
        for unit in self._units:
            unit.release()


def _of_unit(chunks: Sequence[Chunk], stores: Sequence[PassingParameters], unit: int) -> list[PassingParameters]:
    return [store for chunk, store in zip(chunks, stores, strict=True) if chunk.unit == unit]


def _direct_owners(model: nn.Module, trained: Sequence[Trained]) -> list[nn.Module]:
    """The model itself, and every module that has one of these parameters for its own."""
    wanted = {id(t.parameter) for t in trained}
    owners = [m for m in model.modules() if any(id(p) in wanted for p in m.parameters(recurse=False))]
    return [model, *(owner for owner in owners if owner is not model)]
