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

import heapq
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from shoal.comm.collective import Collective
from shoal.comm.exchanges.credited import Credited, CreditQueue, NewPartitionSum
from shoal.comm.exchanges.exchange import AllReduce, Segment, segments_within
from shoal.comm.ledger import Ledger
from shoal.errors import ConfigError, UserCodeError
from shoal.gradients.bucket import Bucket, BucketParameters, parts_by_size
from shoal.gradients.config import GradientsConfig
from shoal.gradients.reducer import OwnGradient, Reducer
from shoal.gradients.replicated import replicated_bucket
from shoal.maths.norm import two_norm
from shoal.state import Owned, Trained, owned_whole

# When the forward first uses each parameter: hooks before the modules that own it.
#
# A parameter may be used without calling its module (`linear.weight` instead of `linear(x)`). No hook announces that
# use, but the parameter gets a gradient. While `learning`, such parameters are found, and from then on they count as
# used as soon as the model itself is called. A gradient of a parameter that was used unannounced later on is refused:
# it was computed with a weight that may not have been updated yet.


class FirstUse:
    """Calls `ask` with the indices of those `parameters` that belong to the module that is about to run."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[tuple[str, Parameter]],
        ask: Callable[[Collection[int]], None],
    ) -> None:
        self.learning = True
        self._ask, self._unannounced = ask, set[int]()
        self._used: dict[int, None] = {}
        index_of = {id(parameter): index for index, (_, parameter) in enumerate(parameters)}
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._before(self._unannounced))]
        for module in model.modules():
            own = [index_of[id(p)] for p in nn.Module.parameters(module, recurse=False) if id(p) in index_of]
            if own:
                self._handles.append(module.register_forward_pre_hook(self._before(own)))
        self._handles += [p.register_hook(self._guard(index, name)) for index, (name, p) in enumerate(parameters)]

    @property
    def order(self) -> Sequence[int]:
        """The parameters used in this step, in the order of their first use."""
        return list(self._used)

    def start(self) -> None:
        """A step begins."""
        self._used.clear()

    def close(self) -> None:
        """Takes the hooks off, and forgets whom it asks, who holds this."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ask = lambda parameters: None

    def _before(self, own: Collection[int]) -> Callable[[nn.Module, Any], None]:
        def about_to_run(module: nn.Module, inputs: Any) -> None:
            self._used.update(dict.fromkeys(own))
            self._ask(own)

        return about_to_run

    def _guard(self, index: int, name: str) -> Callable[[Tensor], None]:
        watching = weakref.ref(self)  # whoever has it has the parameter: see `Reducer`

        def arrived(gradient: Tensor) -> None:
            alive = watching()
            if alive is None or index in alive._used:
                return
            if not alive.learning:
                raise UserCodeError(
                    f"the parameter {name} was used without calling the module that has it, and was not in the first "
                    'steps: under gradients.schedule = "priority" it may be older than the others. Call the module, '
                    'or set gradients.schedule to "order"'
                )
            alive._unannounced.add(index)

        return arrived


# The first steps of `gradients.schedule = "priority"`: when gradients are ready, how fast the wire is, and the order
# in which partitions of gradients leave that follows from both.
#
# What the next forward needs first overtakes what was ready earlier, and no more than a credit of bytes is on the wire,
# because what is there cannot be overtaken (Peng et al., ByteScheduler, SOSP 2019, section 4). All ranks have to start
# their all-reduces in one order, though, and none knows what the others have ready. So the order is not found while
# sending: it is simulated beforehand, from times that all ranks agree on, and is then the same table for all.
#
# In the first steps nothing leaves before the backward is over. So the backward is timed on a quiet wire, and the wire
# while nobody computes. The slowest rank's times count.


STEPS = 3
"""The first is slow, for many reasons; the median of three is not."""
SHORTEST_S = 1e-9
"""One rank has no wire."""


class Rehearsal:
    """`buckets` are the parameters of each bucket, by index, and `exchanges` what sums them over `group`."""

    def __init__(self, buckets: Sequence[Sequence[int]], exchanges: Sequence[Credited], group: Collective) -> None:
        self._buckets, self._exchanges, self._group = buckets, exchanges, group
        self._ready_s: list[list[float]] = []
        self._wire_s: list[float] = []
        self._used: Sequence[int] = ()

    @property
    def over(self) -> bool:
        """Enough was seen."""
        return len(self._wire_s) == STEPS

    def note(self, *, used: Sequence[int], begin_s: float, wire_s: float) -> None:
        """A step is over: parameters as the forward came to them, the time its last backward began, seconds of the
        wire for all of the gradients.
        """
        self._used = self._used or used
        self._ready_s.append([exchange.filled_s - begin_s for exchange in self._exchanges])
        self._wire_s.append(wire_s)

    def order(self, sizes: Sequence[int], *, credit_bytes: int) -> list[int]:
        """The order of all partitions, the same on every rank; `sizes` are the bytes of each."""
        place = {index: float(place) for place, index in enumerate(self._used)}
        needed = [min(place.get(index, float(len(place))) for index in bucket) for bucket in self._buckets]
        ready_s = [statistics.median(times) for times in zip(*self._ready_s, strict=True)]
        *agreed, wire_s = self._slowest([*needed, *ready_s, statistics.median(self._wire_s)])
        partitions = {
            number: Partition(sizes[number], agreed[len(needed) + index], agreed[index])
            for index, exchange in enumerate(self._exchanges)
            for number in exchange.partitions
        }
        rate = sum(sizes) / max(wire_s, SHORTEST_S)
        return leaving_order([partitions[n] for n in range(len(sizes))], bytes_s=rate, credit_bytes=credit_bytes)

    def _slowest(self, own: Sequence[float]) -> list[float]:
        agreed = torch.tensor(own, dtype=torch.float64)
        self._group.all_reduce(agreed, "max").wait()
        return agreed.tolist()


@dataclass(frozen=True)
class Partition:
    """`ready_s`: after the start of the backward; `needed`: when the forward asks for it, as a rank, 0 first."""

    bytes: int
    ready_s: float
    needed: float


def leaving_order(partitions: Sequence[Partition], *, bytes_s: float, credit_bytes: int) -> list[int]:
    """The indices of `partitions` as they leave on a wire of `bytes_s`; equal needs leave by index.

    One that is larger than the credit leaves alone.
    """
    coming = deque(sorted(range(len(partitions)), key=lambda index: (partitions[index].ready_s, index)))
    ready: list[tuple[float, int]] = []
    on_wire: deque[tuple[float, int]] = deque()
    now_s, order = 0.0, []
    while coming or ready:
        while coming and partitions[coming[0]].ready_s <= now_s:
            index = coming.popleft()
            heapq.heappush(ready, (partitions[index].needed, index))
        while on_wire and on_wire[0][0] <= now_s:
            on_wire.popleft()
        if not ready:
            now_s = partitions[coming[0]].ready_s
            continue
        index = ready[0][1]
        size = partitions[index].bytes
        if on_wire and sum(other for _, other in on_wire) + size > credit_bytes:
            now_s = on_wire[0][0]
            continue
        heapq.heappop(ready)
        begin_s = max(now_s, on_wire[-1][0]) if on_wire else now_s
        on_wire.append((begin_s + size / bytes_s, size))
        order.append(index)
    return order


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
    def full_parameters(self, *, compares: bool = True) -> Iterator[None]:
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
