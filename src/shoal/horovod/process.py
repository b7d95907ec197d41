"""This process among Horovod's: `init`, `rank`, `size`, ..., and the engine that carries its calls out."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.nccl import open_nccl
from shoal.errors import CollectiveError, UsageError
from shoal.fleet.processes import REPLICA
from shoal.horovod.engine import STALL_CHECK, STALL_DISABLE, STALL_SHUTDOWN, Engine, number_of
from shoal.horovod.timeline import Timeline
from shoal.launcher.environment import Place
from shoal.launcher.rendezvous import STORE_TIMEOUT_S
from shoal.launcher.store.client import AuthenticatedStore
from shoal.resilience.participant import FencedOut
from shoal.wire.connect import Met, group_of, met_here

if TYPE_CHECKING:
    from shoal.horovod.members import Members

TIMEOUT_S = 24 * 3600.0
"""A rank may evaluate for long while the others wait."""
_FUSION, _TIMELINE, _MARK = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES"
_FUSION_BYTES = 64 << 20
_READ = frozenset({
    _FUSION, _TIMELINE, _MARK, STALL_CHECK, STALL_SHUTDOWN, STALL_DISABLE, "HOROVOD_ELASTIC_TIMEOUT",
})  # fmt: skip
"""All of Horovod's variables that mean something here; docs/horovod.md has them."""


class ProcessSet:
    """Some of the ranks, for calls among them alone: `ranks` of all, ascending. The set without any is all of them."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        self.ranks: tuple[int, ...] = tuple(sorted({int(rank) for rank in ranks}))

    def included(self) -> bool:
        """Whether this process is in it."""
        return process().there().rank in self._all()

    def rank(self) -> int:
        """This process among those of the set. Raises `UsageError` where it is in none of them."""
        if not self.included():
            raise UsageError(f"rank {process().there().rank} is not in the process set {list(self._all())}")
        return self._all().index(process().there().rank)

    def size(self) -> int:
        """How many processes it has."""
        return len(self._all())

    def _all(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(process().there().world_size))


class Process:
    """What `init` makes and `shutdown` ends."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.met: Met | None = None
        self.place: Place | None = None
        self.members: Members | None = None
        self._engine: Engine | None = None
        self.generation = 0
        self._added: set[tuple[int, ...]] = set()
        self._sets: dict[tuple[int, ...], Engine] = {}
        self._made = self._times = 0

    def init(self) -> None:
        """Meets the other ranks of the launcher. A second call does nothing."""
        if self._engine is not None:
            return
        if os.environ.get(REPLICA):
            from shoal.horovod.members import Members  # what coordinates ranks takes 0.4 s to import

            self.members = self.members or Members()
            self._meet_members(failed=False)
        else:
            self._begin(self._times, met_here())
            self._times += 1
        assert self.met is not None
        if os.environ.get(_TIMELINE) and self.met.place.rank == 0:
            self.timeline.start(Path(os.environ[_TIMELINE]), mark_cycles=os.environ.get(_MARK, "0") == "1")
        unread = sorted(name for name in os.environ if name.startswith("HOROVOD_") and name not in _READ)
        if unread and self.met.place.rank == 0:
            print(f"{', '.join(unread)}: set, and without effect in shoal.horovod", file=sys.stderr, flush=True)
        atexit.register(self.shutdown)

    def add_set(self, ranks: ProcessSet | Sequence[int]) -> ProcessSet:
        """All ranks call it, those of the set and the others, in the same order. Raises `UsageError` for ranks that
        are not there, or for a set that is.
        """
        added = ranks if isinstance(ranks, ProcessSet) else ProcessSet(ranks)
        place = self.there()
        if not added.ranks or added.ranks[-1] >= place.world_size or added.ranks[0] < 0:
            raise UsageError(
                f"a process set of the ranks {list(added.ranks)}: give some of 0 to {place.world_size - 1}"
            )
        if added.ranks in self._added:
            raise UsageError(f"there is a process set of the ranks {list(added.ranks)} already: use that one")
        self._added.add(added.ranks)
        self._made += 1
        if place.rank in added.ranks:
            assert self.met is not None, "ranks have met"
            inside = replace(place, rank=added.ranks.index(place.rank), world_size=len(added.ranks))
            met = self.met._replace(place=inside, connection=self.met.connection if inside.world_size > 1 else None)
            prefix = f"horovod/{self.generation}/set/{self._made}"
            group = group_of(met, timeout_s=TIMEOUT_S, prefix=prefix, start_timeout_s=TIMEOUT_S)
            self._sets[added.ranks] = self._engine_over(group)
        return added

    def remove_set(self, removed: ProcessSet) -> bool:
        """All ranks call it. Whether there was such a set; that of all ranks stays."""
        if removed.ranks not in self._added:
            return False
        self._added.discard(removed.ranks)
        if (engine := self._sets.pop(removed.ranks, None)) is not None:
            engine.close()
        return True

    def engine_of(self, given: ProcessSet | None) -> Engine:
        """What carries out the calls of a set that was added, or of all ranks. Raises `UsageError` outside of it."""
        if given is None or not given.ranks:
            return self.engine
        if given.ranks not in self._added:
            raise UsageError(f"there is no process set of the ranks {list(given.ranks)}: hvd.add_process_set first")
        given.rank()
        return self._sets[given.ranks]

    def reset(self, *, failed: bool) -> None:
        """Leaves the ranks of now, of which a call has `failed` or not, for those of the next generation. Process sets
        do not outlive it. Raises as `Members.next`, but for members that are lost meanwhile.
        """
        self._end_engines()
        self._meet_members(failed=failed)

    def ready(self) -> None:
        """This rank has the state that the ranks of now have in common."""
        if self.members is not None:
            self.members.ready()

    def _meet_members(self, *, failed: bool) -> None:
        assert self.members is not None
        while True:
            try:
                self._begin(*self.members.next(failed=failed))
                return
            except FencedOut:
                raise
            except CollectiveError:
                failed = True

    def _begin(self, generation: int, met: Met) -> None:
        """Works with these ranks from now on."""
        self.generation, self.met, self.place = generation, met, met.place
        self._engine = self._engine_over(group_of(met, timeout_s=TIMEOUT_S, prefix=f"horovod/{generation}"))

    def _engine_over(self, group: Any) -> Engine:
        fusion_bytes = int(number_of(_FUSION, _FUSION_BYTES, unit="bytes"))
        return Engine(group, fusion_bytes=fusion_bytes, gpu=cache(self._gpu), timeline=self.timeline)

    def shutdown(self) -> None:
        """Ends the engine, if there is one, and the membership."""
        self._end_engines()
        if self.members is not None:
            self.members.close()
            self.members = None
        self.timeline.stop()

    def _end_engines(self) -> None:
        for engine in self._sets.values():
            engine.close()
        if self._engine is not None:
            self._engine.close()
            self._engine, self.place = None, None
        self._sets.clear()
        self._added.clear()

    @property
    def engine(self) -> Engine:
        """Raises `UsageError` before `init`."""
        if self._engine is None:
            raise UsageError("hvd.init() has not been called: call it before anything else of Horovod's")
        return self._engine

    @property
    def initialized(self) -> bool:
        """Between `init` and `shutdown`."""
        return self._engine is not None

    def there(self) -> Place:
        """This process's place. Raises `UsageError` before `init`."""
        _ = self.engine
        assert self.place is not None
        return self.place

    def _gpu(self) -> _Gpu:
        """All ranks open it before the first tensor on a GPU."""
        assert self.met is not None
        if self.met.connection is None:
            return _Gpu(None)
        store = AuthenticatedStore(self.met.connection, timeout_s=STORE_TIMEOUT_S)
        place, prefix = self.there(), f"horovod/nccl/{self.generation}"
        return _Gpu(open_nccl(PrefixStore(prefix, store), place.rank, place.world_size, timeout_s=TIMEOUT_S))


class _Gpu:
    """Sums of tensors on GPUs, by NCCL."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        if self._group is None:
            return
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        options.timeout = timedelta(seconds=TIMEOUT_S)
        self._group.allreduce([tensor], options).wait()
        torch.accelerator.current_stream(tensor.device).synchronize()


@cache
def process() -> Process:
    """This process's."""
    return Process()
