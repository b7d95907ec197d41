"""A parameter server whose every rank is a worker, and serves a part of the parameters to all.

    worker   reads parameters | computes the gradient of its share of a batch | pushes it | pulls parameters ...
    server   collects gradients of its part as `admission` says | updates the part with its optimizer | answers

The optimizer's state of a part lies at its server alone, as under ZeRO-1. Workers differ between two agreements; at an
agreement all of them have made equally many steps, and take every part from its server. Under synchronous admission all
have the same parameters after every step, and the steps are those of all-reduce with a mean over the workers.

Under backup admission, a worker that is late skips the steps that were made without it, and so goes on with the others.
Its gradient was of the version before: each part drops it by that.

A worker whose gradient is not finite takes part in the update and adds nothing. Clipping is of each worker's own
gradient. Persistent buffers, such as running statistics, are averaged at agreements.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError, UserCodeError
from shoal.state.ownership import Owned, Trained, owned_run, owned_whole
from shoal.state.section import Section
from shoal.sync.admission import Asynchronous, Bounded, FirstComers, Rule
from shoal.sync.config import ServerConfig
from shoal.sync.server_part import Merge, ServedPart
from shoal.sync.server_partition import Run, partition
from shoal.sync.server_wire import FlatParts, Lanes, Push, Serving, Worker
from shoal.sync.strategy import Agreed, OwnSteps, Replica, Taken


class ServerSync(OwnSteps):
    """`Sync` of kind "server"."""

    def __init__(self, config: ServerConfig, mesh: Mesh) -> None:
        """Raises `ConfigError` on a device that is no processor."""
        if mesh.device.type != "cpu":
            raise ConfigError(
                f'sync.kind = "server" on {mesh.device.type}: servers run on processors so far; set run.device = "cpu"'
            )
        self._config = config
        self._replicas = mesh.axis("replicate", lane="sync")
        push, pull = (mesh.axis("replicate", lane=lane) for lane in ("push", "pull"))
        self._lanes = Lanes(push, pull, mesh.ledger)

    def agreement(self, replica: Replica) -> ServerAgreement:
        """Raises `UserCodeError` for parameters of several dtypes."""
        return ServerAgreement(self._config, replica, self._replicas, self._lanes)


def rule_of(config: ServerConfig, workers: int) -> Rule:
    """The rule of admission for workers 0 .. `workers` - 1, none of which has contributed yet."""
    if config.admission == "async":
        return Asynchronous(range(workers), cap=config.staleness_cap)
    if config.admission == "bounded":
        return Bounded(range(workers), bound=config.bound or 0)
    return FirstComers(range(workers), counted=workers - config.backup if config.backup else None)


class ServerAgreement:
    """`Agreement` of workers that all serve: `replicas` are all ranks, `lanes` carry pushes and pulls."""

    sections: Sequence[Section] = ()

    def __init__(self, config: ServerConfig, replica: Replica, replicas: Collective, lanes: Lanes) -> None:
        self.equal = True
        self._config, self._replica, self._replicas, self._lanes = config, replica, replicas, lanes
        self._parameters = [owned.parameter for owned in replica.owned]
        dtype = _dtype_of(replica.owned)
        runs = partition([p.numel() for p in self._parameters], replicas.size, whole=replica.whole)
        self._flat = FlatParts(runs)
        own = runs[replicas.rank]
        numel = sum(run.numel for run in own)
        values, gradient = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
        merge = Merge(
            divisor=replicas.size if config.admission == "async" else None,
            staleness=config.staleness,
            strength=config.compensation,
        )
        self._part = ServedPart(values, gradient, merge=merge)
        self.served: Sequence[Owned] = _pieces(replica.owned, own, values, gradient)
        self._worker = Worker(self._flat, lanes, self._part, dtype=dtype)
        self._gradient = torch.zeros(self._flat.numel, dtype=dtype)
        self._serving: Serving | None = None
        self._number, self._contributed, self._weight = -1, True, 1.0
        self._stop, self._tokens, self._waited_s = False, 0, 0.0

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer of a worker: it pushes the gradients of its parameters and pulls what servers made of all."""

        def step(lr: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

        self._part.step = step
        return ServedOptimizer(self._parameters, self)

    def before_step(self, weight: float = 1.0) -> None:
        if self.equal:
            self._flat.pack(self._parameters, self._worker.row)
            rule = rule_of(self._config, self._replicas.size)
            values, rounds = self._worker.row[self._flat.spans[self._replicas.rank]], self._replica.rounds
            self._part.begin(rule, values, order=None if rounds is None else rounds.begin())
            self._worker.begin()
            self._number = -1
            self._serving = Serving(self._part, self._lanes)
            self.equal = False
        self._contributed, self._weight = self.skips_step, weight
        self._number += 1

    @property
    def skips_step(self) -> bool:
        """Backup workers: the updates that this step would contribute to have been made without it."""
        late = self._config.admission == "backup" and not self.equal
        return late and not self._worker.awaited(self._number + 1)

    def push_pull(self, lr: float | None) -> None:
        """Contributes the gradients of the parameters, or nothing if `lr` is None, and reads the newest parameters."""
        gradient = None
        if lr is not None:
            self._flat.pack([_gradient_of(parameter) for parameter in self._parameters], self._gradient)
            gradient = self._gradient
        begin_s = time.perf_counter()
        servers = None if self._config.admission != "backup" else self._worker.awaited(self._number)
        self._worker.push_pull(Push(self._number, gradient, lr or 0.0, self._weight), servers)
        self._waited_s = time.perf_counter() - begin_s
        self._contributed = True
        self._flat.unpack(self._worker.row, self._parameters)

    def after_update(self, step: int, taken: Taken) -> Agreed | None:
        if not self._contributed:  # the step was not finite
            self.push_pull(None)
        self._stop, self._tokens = self._stop or taken.stop, self._tokens + taken.tokens
        if step % self._config.steps_between and step != self._replica.steps:
            return None
        self._end_round()
        if self._replica.rounds is not None:
            self._replica.rounds.end(step)
        agreed = self._share()
        self.equal, self._stop, self._tokens = True, False, 0
        return agreed

    def take_figures(self) -> dict[str, float]:
        """Of this round, of this worker: the `version` that it read last, its gradients that `counted` and those that
        were `dropped` (all three means over the parts), the mean `staleness` of those that counted, in updates, and the
        seconds from the last push to the end of its pull. `updates`: those of the part that this rank serves.
        """
        standings = self._worker.standings.values()
        counted = sum(standing.counted for standing in standings)
        return {
            "server/version": sum(standing.version for standing in standings) / len(standings),
            "server/updates": float(self._part.version),
            "server/counted": counted / len(standings),
            "server/dropped": sum(standing.dropped for standing in standings) / len(standings),
            "server/staleness": sum(standing.staleness for standing in standings) / max(1, counted),
            "server/wait_s": self._waited_s,
        }

    def _end_round(self) -> None:
        """Returns when all workers have left all parts, and this one has what they came to."""
        assert self._serving is not None, "a step was begun"
        self._worker.leave()
        self._serving.wait()
        final, row = self._part.final(), self._worker.row
        if self._config.admission != "sync":  # there the last pull was of the last version
            row[self._flat.spans[self._replicas.rank]].copy_(final)
            for server in self._flat.servers:
                self._replicas.broadcast(row[self._flat.spans[server]], root=server).wait()
            self._flat.unpack(row, self._parameters)
        for buffer in self._replica.buffers:
            mean = buffer.double()
            self._replicas.all_reduce(mean).wait()
            buffer.copy_(mean / self._replicas.size)

    def _share(self) -> Agreed:
        shared = torch.tensor([float(self._stop), float(self._tokens)], dtype=torch.float64)
        self._replicas.all_reduce(shared).wait()
        stop, tokens = shared.tolist()
        return Agreed(stop > 0, int(tokens))


class ServedOptimizer(torch.optim.Optimizer):
    """The optimizer of parameters whose updates servers make. It has no state; its learning rate goes along."""

    def __init__(self, parameters: Sequence[Parameter], agreement: ServerAgreement) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._agreement = agreement

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Pushes gradients and pulls parameters."""
        self._agreement.push_pull(self.param_groups[0]["lr"])


def _pieces(owned: Sequence[Owned], runs: Sequence[Run], values: torch.Tensor, gradient: torch.Tensor) -> list[Owned]:
    """What a server updates, as parts of the unsplit parameters: views of `values`, their gradients of `gradient`."""
    pieces, at = [], 0
    for run in runs:
        of, place = owned[run.tensor], slice(at, at + run.numel)
        at += run.numel
        whole = run.numel == of.parameter.numel()
        shape = of.parameter.shape if whole else (run.numel,)
        piece = Parameter(values[place].view(shape))
        piece.grad = gradient[place].view(shape)
        if whole:
            pieces.append(owned_whole(Trained(of.holding, of.parameter), piece))
        else:
            pieces.append(owned_run(of.holding, piece, run.start, run.stop))
    return pieces


def _gradient_of(parameter: Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "gradients were reduced"
    return parameter.grad


def _dtype_of(owned: Sequence[Owned]) -> torch.dtype:
    dtypes = list(dict.fromkeys(own.parameter.dtype for own in owned))
    if len(dtypes) > 1:
        raise UserCodeError(
            f"the model has parameters of {dtypes[0]} and of {dtypes[1]}, and servers hold them in one row: "
            "give them one dtype"
        )
    return dtypes[0]
