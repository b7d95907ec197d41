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

from shoal.comm.board import Board
from shoal.comm.c10d_forms import open_gloo
from shoal.comm.hierarchical.group import share_hosts
from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.group import share_core
from shoal.comm.shm.host import Apart, host_identity

BACKEND = "shoal"


def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The group of one rank; blocks until all its ranks have called this. In the form that c10d asks of a backend."""
    gloo = open_gloo(store, rank, size, timeout_s=timeout.total_seconds())
    if size == 1:
        return gloo
    try:
        return _shared(gloo, store, rank, size, timeout.total_seconds())
    except (Apart, CoreMissing) as reason:
        logging.getLogger(__name__).warning("a group of %d ranks uses Gloo: %s", size, reason)
        return gloo


def _shared(gloo: Any, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Raises `Apart` or `CoreMissing` on all ranks alike."""
    try:
        mine = host_identity()
    except OSError as error:
        mine = f"rank {rank}: {error}"  # a host of its own; `share_core` says why
    board = Board(PrefixStore("hosts", store), timeout_s=timeout_s)
    hosts = board.all_gather("identity", mine, rank=rank, ranks=range(size))
    if 1 < len(set(hosts)) < size:
        return share_hosts(gloo, store, hosts=hosts, timeout_s=timeout_s)
    return share_core(gloo, store, timeout_s=timeout_s, prompt=True)


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, create_group, devices=["cpu"])
