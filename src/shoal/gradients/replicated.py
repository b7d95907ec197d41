"""Gradients that stay whole on every rank: each bucket is summed over the ranks that share its parameters.

The losses were divided by the global denominator before the backward, so the sum is the gradient of the global loss;
nothing is averaged. Parameters then stay equal because equal gradients meet equal optimizer states.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective, home_of
from shoal.comm.exchanges.exchange import AllReduce, Exchange, NewExchange, Segment
from shoal.gradients.bucket import (
    Bucket,
    BucketParameters,
    GradientRanks,
    flat_layout,
    parts_by_size,
    segments_of,
    share_of,
)
from shoal.gradients.config import GradientsConfig
from shoal.gradients.gradients import FlatGradients, Groups, OfWholeParameters, global_norm
from shoal.gradients.reducer import OwnGradient, Reducer
from shoal.state import Owned, Trained, owned_whole

# The bucket size, found by trying: every size in turn, several times; the fastest stays, until the link changes.
#
# Small buckets leave early, large ones use the wire better; which matters more depends on the machine. The sizes take
# turns, so that a slow minute slows all of them, and a median ignores the slow first step. A size that was never within
# `WORSE` of the best median is left out after its second turn. Times are those of the slowest rank, equal on all ranks,
# so all of them choose alike. Where a whole turn takes `OTHER` times as long as the turns before it, or as short, the
# link has changed meanwhile (or the run has warmed up), and that turn is the first of a new search.
#
# The choice is saved, because over Gloo the order in which three or more ranks sum depends on a number's place in its
# message. (Shared memory sums in the order of ranks; two ranks have only one order.) A resumed run keeps the size, or
# continues the search. Two separate runs may choose different sizes; a replay takes those that were recorded.


SMALLEST_BYTES, LARGEST_BYTES = 1 << 20, 64 << 20
ROUNDS, WORSE, OTHER = 5, 1.1, 2.0


def candidates(gradient_bytes: int) -> list[int]:
    """Powers of two from 1 MiB to the first that holds the whole gradient, 64 MiB at most."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < min(gradient_bytes, LARGEST_BYTES):
        sizes.append(2 * sizes[-1])
    return sizes


class BucketSearch:
    """Which of `sizes`, in bytes. `note` what each step took; `size` is that of the next.

    On three or more ranks over Gloo a ring sums an element in an order that depends on its place in the bucket: runs
    that choose other sizes, also one that is resumed and searches `again`, differ in the last bits.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self.again()

    def again(self) -> None:
        """Every size is tried anew."""
        self._seconds: dict[int, list[float]] = {size: [] for size in self._sizes}
        self._chosen: int | None = self._sizes[0] if len(self._sizes) == 1 else None

    def use(self, size: int) -> None:
        """`size` is chosen."""
        self._chosen = size

    @property
    def searching(self) -> bool:
        """Whether the next step is one that is tried."""
        return self._chosen is None

    @property
    def chosen(self) -> int | None:
        """None as long as it searches."""
        return self._chosen

    @property
    def size(self) -> int:
        """Bytes of a bucket in the next step."""
        return self._chosen or min(self._seconds, key=lambda size: (len(self._seconds[size]), size))

    def note(self, seconds: float) -> None:
        """The step with `size` took so long. Ties go to the smaller size."""
        self._seconds[self.size].append(seconds)
        if len({len(times) for times in self._seconds.values()}) == 1:
            self._turn_over()

    def _turn_over(self) -> None:
        """All that are left have been tried equally often."""
        typical = {size: statistics.median(times) for size, times in self._seconds.items()}
        best, turns = min(typical, key=lambda size: typical[size]), len(self._seconds[self.size])
        if turns > 1 and self._is_another_link():
            self._seconds = {size: self._seconds.get(size, [])[-1:] for size in self._sizes}
            return
        if turns > 1:
            self._seconds = {s: times for s, times in self._seconds.items() if min(times) <= WORSE * typical[best]}
        if turns == ROUNDS or len(self._seconds) == 1:
            self._chosen = best

    def _is_another_link(self) -> bool:
        """Whether the last turn is no turn like those before."""
        last = sum(times[-1] for times in self._seconds.values())
        before = sum(statistics.median(times[:-1]) for times in self._seconds.values())
        return not 1 / OTHER < last / max(before, 1e-9) < OTHER

    def to_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"sizes": self._sizes, "tried": [[*each] for each in self._seconds.items()], "chosen": self._chosen}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `to_state` gave, with its sizes; also from what earlier versions gave."""
        self._sizes, self._chosen = list(state["sizes"]), state["chosen"]
        turn = len(self._sizes)
        tried = state.get("tried") or [[s, state["seconds"][i::turn]] for i, s in enumerate(self._sizes)]
        self._seconds = {size: list(times) for size, times in tried}


MakeExchange = Callable[[Collective, Tensor, Sequence[Segment]], Exchange]
"""From a group, a flat buffer and what lies in it, to their exchange."""


class ReplicatedGradients(OfWholeParameters):
    """`Gradients` of the `trained` parameters. `ranks` says which ranks sum a gradient, `groups` gives their group.

    The norm adds up over `replica`. If `config.bucket` is "auto", the ranks of `lockstep` search the bucket size
    together. `exchange` makes what a group does with a bucket.
    """

    def __init__(
        self,
        config: GradientsConfig,
        trained: Sequence[Trained],
        *,
        ranks: GradientRanks,
        groups: Groups,
        replica: Collective,
        lockstep: Collective | None = None,
        exchange: NewExchange = AllReduce,
    ) -> None:
        self.owned: Sequence[Owned] = [owned_whole(t) for t in trained]
        self.own = OwnGradient()
        self._trained, self._config, self._ranks, self._groups = trained, config, ranks, groups
        self._replica, self._lockstep, self._exchange = replica, lockstep, exchange
        self._device = home_of([each.parameter for each in trained[:1]], replica)
        self._sharing = self._sharing_norm() if replica.size == 1 and not exchange.by_microbatch else None
        searches = config.bucket == "auto" and lockstep is not None
        self.tuned = self._search(lockstep) if searches and lockstep is not None else None
        self._fill_buckets(config.bucket_size if self.tuned is None else self.tuned.size)
        self._begin_s = 0.0

    def start(self) -> None:
        if self.tuned is not None and self.tuned.size != self._bucket_bytes:
            self._reducer.close()
            self._fill_buckets(self.tuned.size)
        self._begin_s = time.perf_counter()
        self._reducer.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._reducer.backward(last=last)

    def schedule(self) -> AbstractContextManager[None]:
        return self._reducer.schedule()

    def reduce(self) -> Tensor:
        norm = global_norm(self._reducer.finish(), self._sharing or self._replica, device=self._device)
        self._show()
        if self.tuned is not None and self.tuned.chosen is None:
            self.tuned.note(self._slowest(time.perf_counter() - self._begin_s))
        return norm

    @property
    def used(self) -> frozenset[str]:
        return self._reducer.used_names

    def gather(self) -> None:
        """Equal gradients have met equal states: there is nothing to bring."""
        for bucket in self._buckets:
            bucket.commit()

    def close(self) -> None:
        self._reducer.close()

    def _show(self) -> None:
        """Makes sums in another type than that of `.grad` what the optimizer sees."""
        for bucket in (each for each in self._buckets if not each.keeps):
            for index, piece in bucket.pieces.items():
                parameter = self._trained[index].parameter
                parameter.grad = piece.to(parameter.grad_dtype).detach()  # whose .data a script may replace

    def _fill_buckets(self, bucket_bytes: int) -> None:
        """Makes buckets of this size, which is then that of the first one too if it is smaller."""
        self._bucket_bytes = bucket_bytes
        parts = parts_by_size(
            self._trained, self._ranks, bytes_limit=bucket_bytes, first_bytes=self._config.first_bucket_bytes,
            divided=False,
        )  # fmt: skip
        self._buckets = [
            replicated_bucket(
                self._trained, part, self._groups(part.sums), self._exchange, share_norm=self._sharing is not None
            )
            for part in parts
        ]
        addresses = [0] * len(self._trained)  # that of a parameter without numbers
        for bucket in self._buckets:
            for index, piece in bucket.pieces.items():
                addresses[index] = piece.data_ptr()
        self._flat = FlatGradients([bucket.exchange.result for bucket in self._buckets], addresses)
        self._reducer = Reducer(
            [(t.holding.name, t.parameter) for t in self._trained],
            self._buckets,
            eager=self._exchange.by_microbatch,
            own=self.own,
        )

    def _sharing_norm(self) -> Collective | None:
        """The ranks that share the work of the norm: all have the same sums, and count everything in them."""
        sums = {self._ranks(t.holding) for t in self._trained}
        if len(sums) != 1 or not all(t.holding.counts for t in self._trained):
            return None
        group = self._groups(next(iter(sums)))
        return group if group.size > 1 else None

    def _search(self, lockstep: Collective) -> BucketSearch:
        """Among the same sizes on all ranks, whatever part of the model each has."""
        own = sum(t.parameter.nbytes for t in self._trained)
        return BucketSearch(candidates(int(_largest(own, lockstep, self._device))))

    def _slowest(self, own_s: float) -> float:
        assert self._lockstep is not None, "without it there is no search"
        return _largest(own_s, self._lockstep, self._device)


def replicated_bucket(
    trained: Sequence[Trained],
    part: BucketParameters,
    group: Collective,
    exchange: MakeExchange,
    *,
    share_norm: bool = False,
) -> Bucket:
    """A kept bucket of these parameters. `share_norm`: the ranks of `group` share the work of its norm."""
    parameters = {index: trained[index].parameter for index in part.indices}
    first = trained[part.indices[0]].parameter
    layout = flat_layout([p.numel() for p in parameters.values()], 1)
    dtype = trained[part.indices[0]].reduce_dtype or first.dtype
    buffer = group.allocate(layout.numel, dtype=dtype, device=first.device)
    return Bucket(
        parameters,
        layout,
        exchange(group, buffer, segments_of(trained, part, layout, rank=0)),
        buffer=buffer,
        counted=[index for index in part.indices if trained[index].holding.counts],
        norm_share=share_of(layout.numel, group.rank, group.size) if share_norm else None,
    )


def _largest(own: float, group: Collective, device: torch.device) -> float:
    """The largest of all ranks' numbers."""
    found = torch.tensor(own, dtype=torch.float64, device=device)
    group.all_reduce(found, "max").wait()
    return float(found)
