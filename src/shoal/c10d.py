"""`import shoal.c10d` makes a backend of PyTorch's distributed package: shared memory between CPU ranks of one host.

    import shoal.c10d
    torch.distributed.init_process_group("shoal")

Everything that stands on process groups uses it: DDP, FSDP2, tensor parallelism, pipelining. Groups whose ranks are on
several hosts, and groups of one rank, are Gloo's.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.comm.shm.group import share_memory

BACKEND = "shoal"


def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The group of one rank; blocks until all its ranks have called this. In the form that c10d asks of a backend."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    group, _ = share_memory(gloo, store, timeout_s=timeout.total_seconds())
    return group


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, create_group, devices=["cpu"])
