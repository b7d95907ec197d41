"""`import shoal.c10d` makes a backend of PyTorch's distributed package: shared memory between CPU ranks of one host.

    import shoal.c10d
    torch.distributed.init_process_group("shoal")

Everything that stands on process groups uses it: DDP, FSDP2, tensor parallelism, pipelining. Ranks on several hosts use
shared memory inside each, and Gloo between. Groups that cannot do either are Gloo's, with a word in the log: with one
rank on each host, or where the core in C was not built.

`shoal.c10d.init_process_group()` makes the default group of it under any launcher, and meets ranks that have no torch
(`shoal.wire`) in it: NumPy, JAX and torch ranks sum to the same bits. There, all ranks share a host.

Tensors lie on the CPU. Where a program also has GPUs, the group stands beside theirs: `init_process_group("nccl")`,
then `new_group(backend="shoal")`. Of "cpu:shoal,cuda:nccl" c10d would make this group alone: it takes one that is
written in Python for the whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from shoal.comm.c10d_forms import open_gloo, untraced
from shoal.comm.hierarchical import share_hosts
from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.group import share_core
from shoal.comm.shm.host import Apart
from shoal.launcher.rendezvous import STORE_TIMEOUT_S
from shoal.launcher.store.client import AuthenticatedStore
from shoal.wire.connect import FIRST, TIMEOUT_S, meet

BACKEND, MET = "shoal", "shoal_wire"


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


def init_process_group(environ: Mapping[str, str] = os.environ, *, timeout_s: float = TIMEOUT_S) -> None:
    """The default process group of all ranks of a launcher, also of those that have no torch and call `wire.init`.

    Raises `EnvironmentFault` and `CollectiveError` where ranks do not find each other, `Apart` where they are on
    several hosts, and `CoreMissing` where the core in C was not built.
    """
    met = meet(environ)
    timeout = timedelta(seconds=timeout_s)
    if met.connection is None:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store = AuthenticatedStore(met.connection, timeout_s=STORE_TIMEOUT_S)
    rank, size = met.place.rank, met.place.world_size
    dist.init_process_group(MET, store=store, rank=rank, world_size=size, timeout=timeout, pg_options=store)


@untraced
def _create_met(options: Any, store: Any) -> Any:
    """In the form that c10d asks of a backend; `store` is None for the groups of `new_group`, all of whose ranks have
    torch."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    if store is None:
        return create_group(options.store, rank, size, timeout)
    store, timeout_s = PrefixStore(FIRST, store), timeout.total_seconds()
    gloo = open_gloo(store, rank, size, timeout_s=timeout_s, lazy=True)
    return share_core(gloo, store, timeout_s=timeout_s, prompt=True)


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(MET, _create_met, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend(BACKEND, create_group, devices=["cpu"])
