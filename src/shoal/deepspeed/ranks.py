"""Which rank this is, between `init_distributed` and `initialize`, which connects the ranks.

Scripts ask it there to let one rank speak, or to find what is theirs. The default group of that time knows the rank and
how many there are, as the launcher says, and carries nothing.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from shoal.errors import UserCodeError
from shoal.launcher.environment import ALONE, place_from
from shoal.own_loop.other_libraries import refusing

BACKEND = "shoal_unconnected"
COLLECTIVES = (
    "barrier", "broadcast", "allreduce", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall",
    "all_gather_single", "reduce_scatter_single", "all_to_all_single", "_allgather_base", "_reduce_scatter_base",
    "alltoall_base", "send", "recv", "recv_anysource",
)  # fmt: skip


class Unconnected(dist.ProcessGroup):
    """Has a rank and a size. A collective is refused: a sentence on standard error, and exit code 2."""

    def getBackendName(self) -> str:
        """As c10d calls it."""
        return BACKEND


def _refuse(self: Unconnected, *args: Any, **kwargs: Any) -> NoReturn:
    with refusing():
        raise UserCodeError(
            "ranks are connected by initialize(), and a barrier or another collective was called before it: call it "
            "behind initialize(), or leave it out (what one rank is to download is there before the ranks start)"
        )


for _name in COLLECTIVES:
    setattr(Unconnected, _name, _refuse)


def know_rank() -> None:
    """From now on `torch.distributed.get_rank()` and `get_world_size()` answer. A second call does nothing."""
    if dist.is_initialized():
        return
    place, excepthook = place_from(os.environ) or ALONE, sys.excepthook
    dist.init_process_group(BACKEND, store=HashStore(), rank=place.rank, world_size=place.world_size)
    sys.excepthook = excepthook  # that of c10d numbers the lines of an error


def let_go() -> None:
    """The run's own default group takes the place."""
    if dist.is_initialized() and isinstance(dist.group.WORLD, Unconnected):
        dist.destroy_process_group()


def _group(options: Any, _: Any) -> Unconnected:
    """As c10d asks a backend for it."""
    return Unconnected(options.group_rank, options.group_size)  # pyright: ignore[reportCallIssue]


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(
        BACKEND, _group, extended_api=True, devices=["cpu", "cuda"],
    )  # fmt: skip
