"""Opening a `Hierarchical` group: a shared-memory group inside every host, a Gloo group of their leaders."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.diagnosis import introduce
from shoal.comm.hierarchical.division import division_of
from shoal.comm.hierarchical.group import Hierarchical
from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.group import share_core
from shoal.comm.shm.host import Apart

_NO = "no: "


def share_hosts(flat: Any, store: Store, *, hosts: Sequence[str], timeout_s: float) -> Hierarchical:
    """`flat`, a Gloo group, on two levels. `hosts` are the identities of its ranks' hosts, in rank order.

    Blocks until all ranks have called it. Raises `Apart` on all of them where those of one host cannot share memory.
    """
    division, rank = division_of(hosts), flat.rank()
    host, _ = division.places[rank]
    ranks = division.hosts[host]
    mates, refusal = None, "yes"
    if len(ranks) > 1:
        named = PrefixStore(f"host-{host}", store)
        try:
            mates = share_core(_gloo(named, ranks, rank, timeout_s), named, timeout_s=timeout_s)
        except (Apart, CoreMissing) as reason:
            refusal = f"{_NO}{reason}"
    answers = introduce(PrefixStore("hosts/mates", store), rank, division.size, myself=refusal, timeout_s=timeout_s)
    if found := next((answer for answer in answers if answer.startswith(_NO)), None):
        raise Apart(found.removeprefix(_NO))
    first = tuple(ranks[0] for ranks in division.hosts)
    leaders = _gloo(PrefixStore("leaders", store), first, rank, timeout_s) if rank in first else None
    return Hierarchical(flat, division, mates=mates, leaders=leaders)


def _gloo(store: Store, ranks: Sequence[int], rank: int, timeout_s: float) -> Any:
    return dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s))
