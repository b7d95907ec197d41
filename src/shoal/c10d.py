"""`import shoal.c10d` makes a backend of PyTorch's distributed package: shared memory between CPU ranks of one host.

    import shoal.c10d
    torch.distributed.init_process_group("shoal")

Everything that stands on process groups uses it: DDP, FSDP2, tensor parallelism, pipelining. Groups that cannot use
it are Gloo's, with a word in the log: where ranks are on several hosts, or the core in C was not built.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.group import share_core
from shoal.comm.shm.host import Apart

BACKEND = "shoal"


def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The group of one rank; blocks until all its ranks have called this. In the form that c10d asks of a backend."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    if size == 1:
        return gloo
    try:
        return share_core(gloo, store, timeout_s=timeout.total_seconds())
    except (Apart, CoreMissing) as reason:
        logging.getLogger(__name__).warning("a group of %d ranks uses Gloo: %s", size, reason)
        return gloo


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, create_group, devices=["cpu"])
