"""`import shoal.c10d` makes a backend of PyTorch's distributed package: shared memory between CPU ranks of one host.

    import shoal.c10d
    torch.distributed.init_process_group("shoal")

Everything that stands on process groups uses it: DDP, FSDP2, tensor parallelism, pipelining. Ranks on several hosts use
shared memory inside each, and Gloo between. Groups that cannot do either are Gloo's, with a word in the log: with one
rank on each host, or where the core in C was not built.

Tensors lie on the CPU. Where a program also has GPUs, the group stands beside theirs: `init_process_group("nccl")`,
then `new_group(backend="shoal")`. Of "cpu:shoal,cuda:nccl" c10d would make this group alone: it takes one that is
written in Python for the whole.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.c10d_forms import open_gloo
from shoal.comm.hierarchical.group import share_hosts
from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.group import share_core
from shoal.comm.shm.host import Apart
from shoal.comm.untraced import untraced

BACKEND = "shoal"


@untraced
def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The group of one rank; blocks until all its ranks have called this. In the form that c10d asks of a backend."""
    timeout_s = timeout.total_seconds()
    if size == 1:
        return open_gloo(store, rank, size, timeout_s=timeout_s)
    try:
        return _shared(store, rank, size, timeout_s)
    except (Apart, CoreMissing) as reason:
        logging.getLogger(__name__).warning("a group of %d ranks uses Gloo: %s", size, reason)
        return open_gloo(PrefixStore("apart", store), rank, size, timeout_s=timeout_s)


def _shared(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Raises `Apart` or `CoreMissing` on all ranks alike."""
    try:
        gloo = open_gloo(store, rank, size, timeout_s=timeout_s, lazy=True)  # for what the core does not do, if ever
        return share_core(gloo, store, timeout_s=timeout_s, prompt=True)
    except Apart as reason:
        if not 1 < len(set(reason.hosts)) < size:
            raise
        gloo = open_gloo(PrefixStore("flat", store), rank, size, timeout_s=timeout_s)
        return share_hosts(gloo, store, hosts=reason.hosts, timeout_s=timeout_s)


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, create_group, devices=["cpu"])
