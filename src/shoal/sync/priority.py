"""Gradients summed in every step, those first that the next forward needs first, with no barrier between two steps.

The sums go on while the next forward runs: a module waits for its own parameters alone, and they are updated when their
sums are there, just before it computes (Peng et al., ByteScheduler, SOSP 2019).

    backward  8 7 6 5 4 3 2 1 | forward  1 2 3 4 5 6 7 8
    wire        8 8 6 4 2 1 . | . 3 5 7 ...                 each leaves when it is the most urgent that is ready

It is the same update as that of `AllReduceSync`. What needs the whole gradient before any update cannot be: clipping by
its norm, and skipping a step whose gradient is not finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.buckets.credit import CreditQueue
from shoal.comm.buckets.own_gradient import OwnGradient
from shoal.comm.buckets.partitioned import partitioned_buckets
from shoal.comm.buckets.reducer import Reducer
from shoal.comm.buckets.summed import Summand
from shoal.comm.collective import Collective
from shoal.comm.ledger import Ledger
from shoal.errors import ConfigError
from shoal.gradients.config import GradientsConfig
from shoal.maths.norm import two_norm
from shoal.sync.first_use import FirstUse
from shoal.sync.owned import Owned
from shoal.sync.rehearsal import Rehearsal

Update = Callable[[int, Tensor], None]
"""Called with the number of a part of `PrioritySync.parts` whose sums are there, and the norm of these."""


class PrioritySync:
    """`Sync` of replicas of one rank. `lane`: a group of all of them for this traffic alone.

    Without an `update`, `gradients` returns what was agreed, as every sync does. With one, parameters are updated as
    their sums come, from `release` on, and until the next backward at the latest. Raises `ConfigError` for parameters
    on GPUs.
    """

    def __init__(
        self,
        config: GradientsConfig,
        summands: Sequence[Summand],
        lane: Collective,
        *,
        model: nn.Module,
        ledger: Ledger,
        owned: Sequence[Owned] = (),
    ) -> None:
        _require_cpu(summands)
        self.owned = owned
        self.update: Update | None = None
        self._credit_bytes = config.credit_bytes
        self._queue = CreditQueue(lane, credit_bytes=config.credit_bytes, ledger=ledger)
        self._buckets = partitioned_buckets(summands, self._queue, partition_bytes=config.partition_bytes)
        parameters = [(s.name, s.parameter) for s in summands]
        self.parts: list[list[Parameter]] = [[parameters[i][1] for i in bucket.slices] for bucket in self._buckets]
        self._home = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.slices}
        self._reducer = Reducer(parameters, self._buckets)
        self._first_use = FirstUse(model, parameters, self._ask)
        self._rehearsal = Rehearsal(self._buckets, lane)
        self._order: list[int] = []
        self._pending: dict[int, None] = {}
        self._norms: list[Tensor] = []
        self._norm = torch.zeros(())
        self._filling = self._commits = False
        self._backward_s = 0.0

    remembered = None

    @property
    def own(self) -> OwnGradient:
        return self._reducer.own

    @property
    def rehearses(self) -> bool:
        """Is this one of the first steps, which have a barrier at their end?"""
        return self._first_use.learning

    @property
    def norm(self) -> Tensor:
        """Of the newest gradient that is whole: under way is, at most, the one of a later step."""
        return self._norm

    def start(self) -> None:
        self._first_use.start()

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        if not self._filling:
            self._begin()
        self._backward_s = time.perf_counter()
        with self._reducer.backward(last=last):
            yield
        if last:
            self._reducer.flush()
            self._filling, self._commits = False, True
            self._pending = dict.fromkeys(self._home.values())

    def schedule(self) -> AbstractContextManager[None]:
        raise ConfigError(
            'gradients.schedule = "priority" with layout.pipeline: a stage has no next forward to prepare'
        )

    def release(self, *, commit: bool) -> None:
        """Updates may follow; not `commit`: none does, and the gradient of this step is dropped."""
        self._commits = commit

    def gradients(self) -> Tensor:
        if self.rehearses:
            self._rehearse()
        self.settle()
        return self._norm

    def settle(self) -> None:
        for number in list(self._pending):
            self._agree(number)

    def scale(self, factor: float | Tensor) -> None:
        for bucket in self._buckets:
            bucket.scale(factor)

    def parameters(self) -> None:
        """Nothing to do: equal gradients have met equal states."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        self.settle()
        yield

    def close(self) -> None:
        self._first_use.close()
        self._reducer.close()
        self._queue.close()

    def _begin(self) -> None:
        """The first backward of a step: the step before ends here."""
        self.settle()
        self._reducer.start()
        self._queue.begin()
        self._queue.follow(self._order)
        self._filling = True

    def _rehearse(self) -> None:
        """Sends all at once, behind the backward."""
        everything = [number for bucket in self._buckets for number in bucket.partitions]
        begin_s = time.perf_counter()
        self._queue.follow(everything)
        self._queue.wait(everything)
        wire_s = time.perf_counter() - begin_s
        self._rehearsal.note(used=self._first_use.order, begin_s=self._backward_s, wire_s=wire_s)
        if self._rehearsal.over:
            self._order = self._rehearsal.order(self._queue.sizes, credit_bytes=self._credit_bytes)
            self._first_use.learning = False

    def _ask(self, parameters: Collection[int]) -> None:
        """The forward comes to these parameters."""
        if self._pending:
            for number in {self._home[index]: None for index in parameters}:
                if number in self._pending:
                    self._agree(number)

    def _agree(self, number: int) -> None:
        """Waits for the sums of one bucket, and updates its parameters."""
        bucket = self._buckets[number]
        bucket.wait()
        del self._pending[number]
        self._norms.append(bucket.norm())
        if self.update is not None and self._commits:
            self.update(number, self._norms[-1])
        if not self._pending:
            self._norm = two_norm(torch.stack(self._norms))
            self._norms.clear()


def _require_cpu(summands: Sequence[Summand]) -> None:
    devices = {summand.parameter.device.type for summand in summands} - {"cpu"}
    if devices:
        raise ConfigError(
            f'gradients.schedule = "priority" with parameters on {devices.pop()}: a credit of bytes on the wire is '
            'kept between processors only so far; set gradients.schedule to "order"'
        )
