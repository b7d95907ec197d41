"""Lock-free updates of shared parameters by the processes of one host: Hogwild (Niu et al. 2011, arXiv:1106.5730).

The parameters of all replicas are one row in shared memory. Each process computes the gradient of its share of a batch
at whatever it finds there, and subtracts it in place, without a lock:

    x_j = x_j - (lr / replicas) g_j     for every j, while the others do the same

Two processes that write x_j at the same time may lose one of the two; where gradients are sparse this is rare. The
gradient of an `EmbeddingTable` is: a process reads and writes the rows that its samples look up, and no others, so
that a step costs what the rows cost, not the table. Only SGD without momentum works so: any other state would be
shared too. Nothing is sent but the counts at an agreement, where all processes wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError
from shoal.state import Section
from shoal.sync.config import HogwildConfig
from shoal.sync.strategy import Agreed, OwnOptimizer, OwnSteps, Replica, Taken

# Memory that the ranks of one host share: one row of numbers, which all of them read and write.
#
# Rank 0 makes an anonymous file (memfd), which no other process can open by a name; the others map it through rank 0's
# descriptor. It is gone with the last process that maps it.


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


class HogwildSync(OwnSteps):
    """`Sync` of kind "hogwild"."""

    def __init__(self, config: HogwildConfig, mesh: Mesh) -> None:
        """Raises `ConfigError` on a device that is no processor."""
        if mesh.device.type != "cpu":
            raise ConfigError(
                f'sync.kind = "hogwild" on {mesh.device.type}: it shares the memory of processors; '
                'set run.device = "cpu"'
            )
        self._config, self._replicas = config, mesh.axis("replicate", lane="sync")

    def agreement(self, replica: Replica) -> HogwildAgreement:
        """Moves the parameters into shared memory. Raises `ConfigError` where ranks do not share a host."""
        return HogwildAgreement(self._config, replica, self._replicas)


class HogwildAgreement(OwnOptimizer):
    """`Agreement` of processes that write the same parameters; they agree when nobody writes."""

    sections: Sequence[Section] = ()

    def __init__(self, config: HogwildConfig, replica: Replica, replicas: Collective) -> None:
        self.equal = True
        self._config, self._replica, self._replicas = config, replica, replicas
        self._stop, self._tokens = False, 0
        parameters = [owned.parameter for owned in replica.owned]
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            alike = [parameter for parameter in parameters if parameter.dtype == dtype]
            row = share_row(replicas, torch.cat([parameter.detach().flatten() for parameter in alike]))
            for parameter, part in zip(alike, row.split([p.numel() for p in alike]), strict=True):
                parameter.data = part.view(parameter.shape)

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """SGD at a rate that makes each process move the parameters by its share."""
        return ShareOfStep(optimizer, self._replicas.size)

    def before_step(self, weight: float = 1.0) -> None:
        if self.equal:  # nobody writes before all have loaded, saved or evaluated
            self._replicas.barrier().wait()
            self.equal = False

    def after_update(self, step: int, taken: Taken) -> Agreed | None:
        self._stop, self._tokens = self._stop or taken.stop, self._tokens + taken.tokens
        if step % self._config.period and step != self._replica.steps:
            return None
        shared = torch.tensor([float(self._stop), float(self._tokens)], dtype=torch.float64)
        self._replicas.all_reduce(shared).wait()
        self._average_buffers()
        stopped, used = shared.tolist()
        self.equal, self._stop, self._tokens = True, False, 0
        return Agreed(stopped > 0, int(used))

    def _average_buffers(self) -> None:
        for buffer in self._replica.buffers:
            mean: Tensor = buffer.double()
            self._replicas.all_reduce(mean).wait()
            buffer.copy_(mean / self._replicas.size)


class ShareOfStep(torch.optim.Optimizer):
    """The steps of `optimizer`, at its rate divided by `replicas`. It has no state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, replicas: int) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {"lr": 0.0})
        self._optimizer, self._replicas = optimizer, replicas

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step in shared memory."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.param_groups[0]["lr"] * group.get("rate", 1.0) / self._replicas
        self._optimizer.step()
