"""This process among Horovod's: `init`, `rank`, `size`, ..., and the engine that carries its calls out."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.mesh import open_nccl
from shoal.errors import UsageError
from shoal.horovod.engine import Engine, Timeline
from shoal.launcher.environment import Place
from shoal.launcher.rendezvous import STORE_TIMEOUT_S
from shoal.launcher.store.client import AuthenticatedStore
from shoal.wire.connect import Met, group_of, meet

TIMEOUT_S = 24 * 3600.0
"""A rank may evaluate for long while the others wait."""
_FUSION, _TIMELINE, _MARK = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES"
_FUSION_BYTES = 64 << 20


class Process:
    """What `init` makes and `shutdown` ends. `generation` counts how often ranks have met again (`elastic`)."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.met: Met | None = None
        self.place: Place | None = None
        self._engine: Engine | None = None
        self.generation = 0

    def init(self) -> None:
        """Meets the other ranks of the launcher. A second call does nothing."""
        if self._engine is not None:
            return
        self.met = meet()
        self.begin(self.met.place, group_of(self.met, timeout_s=TIMEOUT_S, prefix="horovod/0"))
        if os.environ.get(_TIMELINE) and self.met.place.rank == 0:
            self.timeline.start(Path(os.environ[_TIMELINE]), mark_cycles=os.environ.get(_MARK, "0") == "1")
        atexit.register(self.shutdown)

    def begin(self, place: Place, group: Any) -> None:
        """Works over `group` from now on, at `place`."""
        self.place = place
        fusion_bytes = int(os.environ.get(_FUSION) or _FUSION_BYTES)
        self._engine = Engine(group, fusion_bytes=fusion_bytes, gpu=cache(self._gpu), timeline=self.timeline)

    def shutdown(self) -> None:
        """Ends the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
            self._engine, self.place = None, None
        self.timeline.stop()

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
        torch.cuda.current_stream().synchronize()


@cache
def process() -> Process:
    """This process's."""
    return Process()
