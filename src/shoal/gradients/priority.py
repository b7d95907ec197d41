"""Gradients summed in every step, those first that the next forward needs first, with no barrier between two steps.

The sums go on while the next forward runs: a module waits for its own parameters alone, and they are updated when their
sums are there, just before it computes (Peng et al., ByteScheduler, SOSP 2019).

    backward  8 7 6 5 4 3 2 1 | forward  1 2 3 4 5 6 7 8
    wire        8 8 6 4 2 1 . | . 3 5 7 ...                 each leaves when it is the most urgent that is ready

It computes the same update as `ReplicatedGradients`. What needs the whole gradient before any update is impossible:
clipping by its norm, and skipping a step whose gradient is not finite.

With a codec each partition is a coded sum, with a residual of its own. What is encoded depends on where partitions are
cut, not on when they leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.comm.exchanges.credited import Credited, CreditQueue, NewPartitionSum
from shoal.comm.exchanges.exchange import AllReduce, Segment, segments_within
from shoal.comm.ledger import Ledger
from shoal.errors import ConfigError
from shoal.gradients.bucket import Bucket
from shoal.gradients.config import GradientsConfig
from shoal.gradients.first_use import FirstUse
from shoal.gradients.partition import BucketParameters, parts_by_size
from shoal.gradients.reducer import OwnGradient, Reducer
from shoal.gradients.rehearsal import Rehearsal
from shoal.gradients.replicated import replicated_bucket
from shoal.maths.norm import two_norm
from shoal.state.ownership import Owned, Trained, owned_whole

Update = Callable[[int, Tensor], None]
"""Called with the number of a part of `PriorityGradients.parts` whose sums are there, and their norm."""


class PriorityGradients:
    """`Gradients` of replicas of one rank. `lane` is a group of all of them for this traffic alone.

    Without an `update`, `reduce` returns what was agreed, as all `Gradients` do. With one, parameters are updated as
    their sums arrive, from `release` on, and before the next backward at the latest. `partition` makes the sum of a
    partition; `whole`: no parameter is cut, however large. Raises `ConfigError` for parameters on GPUs.
    """

    tuned = None

    def __init__(
        self,
        config: GradientsConfig,
        trained: Sequence[Trained],
        *,
        model: nn.Module,
        lane: Collective,
        ledger: Ledger,
        partition: NewPartitionSum = AllReduce,
        whole: bool = False,
    ) -> None:
        _require_cpu(trained)
        self.owned: Sequence[Owned] = [owned_whole(t) for t in trained]
        self._update: Update | None = None
        self._credit_bytes, partition_bytes = config.credit_bytes, config.partition_bytes
        self._queue = CreditQueue(credit_bytes=config.credit_bytes, ledger=ledger)
        self._exchanges: list[Credited] = []

        def credited(group: Collective, buffer: Tensor, segments: Sequence[Segment]) -> Credited:
            longest = buffer.numel() if whole else partition_bytes // buffer.element_size()
            sums = [
                partition(group, buffer[part], segments_within(segments, part))
                for part in _cuts(buffer.numel(), max(1, longest))
            ]
            self._exchanges.append(Credited(self._queue, buffer, sums))
            return self._exchanges[-1]

        parts = parts_by_size(
            trained, lambda holding: holding.sums, bytes_limit=partition_bytes, first_bytes=partition_bytes,
            divided=False,
        )  # fmt: skip
        self._buckets = [replicated_bucket(trained, part, lane, credited) for part in parts]
        parameters = [(t.holding.name, t.parameter) for t in trained]
        self.parts: list[list[Parameter]] = [[parameters[i][1] for i in bucket.indices] for bucket in self._buckets]
        self._home = _homes(parts)
        self._reducer = Reducer(parameters, self._buckets)
        self._first_use = FirstUse(model, parameters, self._ask)
        self._rehearsal = Rehearsal([list(part.indices) for part in parts], self._exchanges, lane)
        self._order: list[int] = []
        self._pending: dict[int, None] = {}
        self._updated: list[Bucket] = []
        """Those whose exchanges do not know yet that an update was made."""
        self._norms: list[Tensor] = []
        self._norm = torch.zeros(())
        self._filling = self._commits = False
        self._backward_s = 0.0

    @property
    def own(self) -> OwnGradient:
        return self._reducer.own

    @property
    def rehearses(self) -> bool:
        """Whether this is one of the first steps, which have a barrier at their end."""
        return self._first_use.learning

    @property
    def norm(self) -> Tensor:
        """Of the newest gradient that is whole: a later step's may be under way."""
        return self._norm

    def on_arrival(self, update: Update) -> None:
        """From now on `update` is called for each part whose sums have arrived."""
        self._update = update

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
        """Updates may follow; without `commit` none does, and the gradient of this step is dropped."""
        self._commits = commit

    def reduce(self) -> Tensor:
        if self.rehearses:
            self._rehearse()
        self._agree_on_rest()
        return self._norm

    def settle(self) -> None:
        self._agree_on_rest()
        for bucket in self._updated:
            bucket.commit()
        self._updated.clear()

    def scale(self, factor: float | Tensor) -> None:
        for bucket in self._buckets:
            bucket.scale(factor)

    def gather(self) -> None:
        """Equal gradients have met equal states."""
        if self._update is None:
            for bucket in self._buckets:
                bucket.commit()

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        self.settle()
        yield

    def close(self) -> None:
        self._first_use.close()
        self._reducer.close()
        self._queue.close()
        self._update = None  # who updates holds these gradients: what a circle holds would keep the group's threads

    def _begin(self) -> None:
        """The first backward of a step: the step before ends here."""
        self.settle()
        self._reducer.start()
        self._queue.begin()
        self._queue.follow(self._order)
        self._filling = True

    def _rehearse(self) -> None:
        """Sends everything at once, after the backward."""
        everything = [number for exchange in self._exchanges for number in exchange.partitions]
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

    def _agree_on_rest(self) -> None:
        for number in list(self._pending):
            self._agree(number)

    def _agree(self, number: int) -> None:
        """Waits for the sums of one bucket, and updates its parameters."""
        bucket: Bucket = self._buckets[number]
        bucket.wait()
        del self._pending[number]
        self._norms.append(bucket.norm())
        if self._update is not None and self._commits:
            self._update(number, self._norms[-1])
            self._updated.append(bucket)
        if not self._pending:
            self._norm = two_norm(torch.stack(self._norms))
            self._norms.clear()


def _cuts(numel: int, longest: int) -> list[slice]:
    """`numel` numbers in parts of `longest` or, the last one, less."""
    return [slice(start, min(start + longest, numel)) for start in range(0, numel, longest)]


def _homes(parts: Sequence[BucketParameters]) -> dict[int, int]:
    return {index: number for number, part in enumerate(parts) for index in part.indices}


def _require_cpu(trained: Sequence[Trained]) -> None:
    devices = {t.parameter.device.type for t in trained} - {"cpu"}
    if devices:
        raise ConfigError(
            f'gradients.schedule = "priority" with parameters on {devices.pop()}: it works between CPU ranks only so '
            'far; set gradients.schedule to "order"'
        )
