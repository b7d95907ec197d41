"""Memory that the ranks of one host share: one row of numbers, which all of them read and write.

Rank 0 makes an anonymous file (memfd), which no other process can open by a name; the others map it through rank 0's
descriptor. It is gone with the last process that maps it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.errors import ConfigError


def share_row(group: Collective, values: Tensor) -> Tensor:
    """A row of the shape and dtype of rank 0's `values`, [numel], and equal to them, in memory that all ranks share.

    Every rank passes values of one shape and dtype, numel >= 1. Raises `ConfigError` on all ranks where they do not
    share a host.
    """
    where = torch.zeros(2, dtype=torch.int64)
    descriptor = -1
    if group.rank == 0:
        descriptor = os.memfd_create("shoal-parameters", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, values.nbytes)
        where.copy_(torch.tensor([os.getpid(), descriptor]))
    group.broadcast(where, root=0).wait()
    process, number = where.tolist()
    row, missing = None, torch.zeros(1)
    try:
        row = torch.from_file(f"/proc/{process}/fd/{number}", shared=True, size=values.numel(), dtype=values.dtype)
    except RuntimeError:
        missing += 1
    if row is not None and group.rank == 0:
        row.copy_(values)
    group.all_reduce(missing).wait()
    if group.rank == 0:
        os.close(descriptor)
    here = torch.tensor([0.0 if row is None else float(row.double().sum() != values.double().sum())])
    group.all_reduce(here).wait()
    if row is None or float(missing) or float(here):
        raise ConfigError(
            'sync.kind = "hogwild" needs ranks of one host that see each other\'s processes: start them on one, '
            "outside of separate containers, or choose another sync.kind"
        )
    return row
