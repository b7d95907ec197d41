"""A parameter server: workers compute gradients, servers hold the parameters and update them.

    worker   reads parameters | computes the gradient of its share of a batch | pushes it | pulls parameters ...
    server   collects gradients of its part as `admission` says | updates the part with its optimizer | answers

`roles_of` says who is what: every rank both, or some ranks servers alone. The optimizer's state of a part lies at
its server alone, as under ZeRO-1. Workers differ between two agreements; at an agreement all of them have made equally
many steps, and all ranks take every part from its server. Under synchronous admission all workers have the same
parameters after every step, and the steps are those of all-reduce with a mean over the workers.

Under backup admission, a worker that is late skips the steps that were made without it, and so goes on with the others.
Its gradient was of the version before: each part drops it by that. A rank that only serves skips every step.

A worker whose gradient is not finite takes part in the update and adds nothing. Clipping is of each worker's own
gradient. Persistent buffers, such as running statistics, are averaged over the workers at agreements. Those that
count forwards are each worker's own; dedicated servers and backup workers, which run fewer, take the first worker's.

With a codec what workers push is coded (`comm.exchanges.coded_sum`); pulls bring parameters as they are.

Embedding tables live on the servers alone (`server_tables`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError, GenerationOver, UserCodeError
from shoal.state import Owned, Section
from shoal.sync.admission import Asynchronous, Bounded, FirstComers, Rule
from shoal.sync.config import ServerConfig
from shoal.sync.server_part import Merge, ServedPart, Standing
from shoal.sync.server_partition import owned_pieces, partition
from shoal.sync.server_roles import Roles, roles_of
from shoal.sync.server_tables import RowsFromServers, ServedTable, places_of, serve_table
from shoal.sync.server_wire import FlatParts, Lanes, Push, Serving, Worker, share_rows
from shoal.sync.strategy import Agreed, Carried, OwnSteps, Replica, Taken

# Ranks that contribute to a parameter server as one worker: they sum their gradients first, and share what is read.
#
# With gradients g_i, each a mean over samples of weight w_i, the party contributes
#
#     g = sum(w_i g_i) / W,    W = sum(w_i)
#
# A rank whose gradient is not finite adds nothing, with no weight. One rank of a host so pushes and pulls for all of
# it, over the host's fast memory, and only one row of parameters crosses the link between hosts each way.


class Party:
    """The `ranks` of a party; the first of them pushes and pulls."""

    def __init__(self, ranks: Collective) -> None:
        self._ranks = ranks

    def sum(self, gradient: Tensor, weight: float, lr: float | None) -> tuple[float, float | None]:
        """`gradient` [numel] becomes that of the party; its weight, and its learning rate (None: nobody's is finite).

        `lr` None: this rank's gradient is not finite.
        """
        told = torch.tensor([0.0 if lr is None else weight, 0.0 if lr is None else 1.0], dtype=torch.float64)
        rate = torch.tensor([-1.0 if lr is None else lr], dtype=torch.float64)
        handles = [self._ranks.all_reduce(told), self._ranks.all_reduce(rate, op="max")]
        if lr is None:
            gradient.zero_()
        else:
            gradient.mul_(weight)
        handles.append(self._ranks.all_reduce(gradient))
        for handle in handles:
            handle.wait()
        total, finite = told.tolist()
        if not finite:
            return 0.0, None
        if total:
            gradient.div_(total)
        return total, float(rate)

    def share(self, row: Tensor, standings: dict[int, Standing]) -> dict[int, Standing]:
        """What the first rank has read becomes that of all: the parameters `row` [numel], and its standings."""
        numbers = torch.tensor([list(standing) for standing in standings.values()], dtype=torch.float64)
        handles = [self._ranks.broadcast(numbers, root=0), self._ranks.broadcast(row, root=0)]
        for handle in handles:
            handle.wait()
        return {server: Standing(*map(int, found)) for server, found in zip(standings, numbers.tolist(), strict=True)}


class ServerSync(OwnSteps):
    """`Sync` of kind "server"."""

    def __init__(self, config: ServerConfig, mesh: Mesh) -> None:
        """Raises `ConfigError` on a device that is no processor, and where the roles leave nobody to work or count."""
        if mesh.device.type != "cpu":
            raise ConfigError(
                f'sync.kind = "server" on {mesh.device.type}: servers run on processors so far; set run.device = "cpu"'
            )
        self._config = config
        self._replicas = mesh.axis("replicate", lane="sync")
        push, pull = (mesh.axis("replicate", lane=lane) for lane in ("push", "pull"))
        self._lanes = Lanes(push, pull, mesh.ledger)
        hosts = self._replicas.hosts if isinstance(self._replicas, GroupCollective) else ()
        self._roles = roles_of(config, self._replicas.size, hosts)
        own = self._roles.party_of(mesh.rank)
        self._party = Party(mesh.ranks(own, lane="party")) if len(own) > 1 else None
        alone = config.servers and mesh.rank in self._roles.servers
        self._servers = mesh.ranks(self._roles.servers, lane="servers") if alone else None

    def agreement(self, replica: Replica) -> ServerAgreement:
        """Raises `UserCodeError` for parameters of several dtypes, `ConfigError` for tables that cannot be served."""
        return ServerAgreement(
            self._config, replica, self._replicas, self._lanes, self._roles, party=self._party, servers=self._servers
        )


def rule_of(config: ServerConfig, workers: Sequence[int]) -> Rule:
    """The rule of admission for `workers`, none of which has contributed yet."""
    if config.admission == "async":
        return Asynchronous(workers, cap=config.staleness_cap)
    if config.admission == "bounded":
        return Bounded(workers, bound=config.bound or 0)
    return FirstComers(workers, counted=len(workers) - config.backup if config.backup else None)


class ServerAgreement:
    """`Agreement` of workers and servers: `replicas` are all ranks, `lanes` carry pushes and pulls.

    `party`: the ranks that contribute as one with this one, if there are others; `servers`: the ranks that only serve,
    if this is one of them.
    """

    sections: Sequence[Section] = ()

    def __init__(
        self,
        config: ServerConfig,
        replica: Replica,
        replicas: Collective,
        lanes: Lanes,
        roles: Roles,
        *,
        party: Party | None = None,
        servers: Collective | None = None,
    ) -> None:
        self.equal = True
        self.carried: Carried = _carried(config)
        self._config, self._replica, self._replicas, self._lanes = config, replica, replicas, lanes
        self._roles, self._party, self._servers = roles, party, servers
        self._works = bool(roles.party_of(replicas.rank))
        self._pushes = replicas.rank in roles.workers
        dense = [owned for owned in replica.owned if owned.name not in replica.tables]
        self._parameters = [owned.parameter for owned in dense]
        dtype = _dtype_of(replica.owned)
        own_runs = iter(partition([p.numel() for p in self._parameters], len(roles.servers), whole=replica.whole))
        runs = [next(own_runs) if rank in roles.servers else () for rank in range(replicas.size)]
        self._flat = FlatParts(runs)
        own = runs[replicas.rank]
        numel = sum(run.numel for run in own)
        values = torch.zeros(numel, dtype=dtype)
        self._pieces = owned_pieces(dense, own, values)
        self.served: list[Owned] = [*self._pieces]
        self._tables: list[Parameter] = []
        tables = self._serve_tables()
        self._divisor = len(roles.parties) if config.admission == "async" else 1
        strength = config.compensation * self._divisor
        merge = Merge(adds=config.admission == "async", staleness=config.staleness, strength=strength)
        self._lanes = lanes = share_rows(lanes, self._flat, dtype=dtype)
        place = self._flat.spans[replicas.rank]
        rows = () if lanes.shared is None else [row[place] for row in lanes.shared.parameters]
        self._part = ServedPart(values, merge=merge, tables=tables, rows=rows)
        if replica.pushes is not None:
            segments = self._flat.segments([owned.name for owned in dense])
            coding = replica.pushes(replicas.rank, roles.workers, segments, dtype)
            self._lanes = lanes = replace(lanes, coding=coding)
        places = [places_of(module, roles.servers) for module in replica.tables.values()]
        self._worker = Worker(self._flat, lanes, self._part, dtype=dtype, tables=places)
        if lanes.shared is None:
            self._gradient = torch.zeros(self._flat.numel if self._works else 0, dtype=dtype)
        else:
            self._gradient = lanes.shared.gradients[replicas.rank]
        self._serving: Serving | None = None
        self._number, self._contributed, self._weight = -1, True, 1.0
        self._stop, self._tokens, self._waited_s = False, 0, 0.0

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer of a worker: it pushes the gradients of its parameters and pulls what servers made of all."""

        pieces = [piece.parameter for piece in self._pieces]

        def step(lr: float, gradient: Tensor) -> None:
            for piece, part in zip(pieces, gradient.split([piece.numel() for piece in pieces]), strict=True):
                piece.grad = part.view(piece.shape)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("rate", 1.0)
            optimizer.step()

        self._part.step = step
        return ServedOptimizer([*self._parameters, *self._tables], self)

    def before_step(self, weight: float = 1.0) -> None:
        if self.equal:
            self._flat.pack(self._parameters, self._worker.row)
            rule = rule_of(self._config, self._roles.workers)
            values, rounds = self._worker.row[self._flat.spans[self._replicas.rank]], self._replica.rounds
            order = None if rounds is None else rounds.begin()
            self._part.begin(rule, values, weights=self._weights_of_all(weight), order=order)
            self._worker.begin()
            self._number = -1
            self._serving = self._serve(self._roles.workers)
            self.equal = False
        self._contributed, self._weight = self.skips_step, weight
        self._number += 1

    @property
    def skips_step(self) -> bool:
        """Ranks that only serve; and late backup workers: the updates that this step would contribute to have been made
        without it.
        """
        late = self._config.admission == "backup" and not self.equal
        return not self._works or (late and not self._worker.awaited(self._number + 1))

    @contextmanager
    def looking_up(self) -> Iterator[None]:
        if not self._tables:
            yield
            return
        serving = self._serve(range(self._replicas.size), in_round=False)
        yield
        self._worker.leave(in_round=False)
        serving.wait()
        self._part.check()

    def stand_still(self) -> int:
        self._part.fail(GenerationOver("a rank was lost"))
        return self._part.reached

    def push_pull(self, lr: float | None) -> None:
        """Contributes the gradients of the parameters, or nothing if `lr` is None, and reads the newest parameters."""
        if lr is not None:
            gradients = [_gradient_of(parameter) for parameter in self._parameters]
            self._flat.pack(gradients, self._gradient, divisor=self._divisor)
        begin_s = time.perf_counter()
        weight = self._weight
        if self._party is not None:
            weight, lr = self._party.sum(self._gradient, weight, lr)
        if self._pushes:
            rows = [_gradient_of(table) / self._divisor for table in self._tables] if lr is not None else []
            gradient = None if lr is None else self._gradient
            servers = None if self._config.admission != "backup" else self._worker.awaited(self._number)
            self._worker.push_pull(Push(self._number, gradient, lr or 0.0, weight, rows), servers)
        if self._party is not None:
            self._worker.standings = self._party.share(self._worker.row, self._worker.standings)
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

    def _serve_tables(self) -> list[ServedTable]:
        """Takes the tables out of the model: what this rank serves of each. Raises `ConfigError` for what they cannot
        work with.
        """
        found, modules = [], self._replica.tables
        if modules:
            _check_tables(self._config, next(iter(modules)))
        for number, (name, module) in enumerate(modules.items()):
            owned = next(owned for owned in self._replica.owned if owned.name == name)
            table, piece = serve_table(owned, module, places_of(module, self._roles.servers), self._replicas.rank)
            module.lookup = RowsFromServers(number, lambda table, ids: self._worker.look_up(table, ids))
            self._tables.append(owned.parameter)
            if piece.parameter.numel():  # else the optimizer would count steps of nothing
                self.served.append(piece)
            found.append(table)
        return found

    def _serve(self, workers: Sequence[int], *, in_round: bool = True) -> Serving:
        """Nobody comes to a rank that has nothing."""
        comers = workers if self._replicas.rank in self._worker.servers else ()
        return Serving(self._part, self._flat, self._lanes, comers, in_round=in_round)

    def _weights_of_all(self, own: float) -> dict[int, float]:
        """What the samples of the round's first step weigh, by the worker that contributes them, where an update holds
        those of one alone; `own`: those of this rank.
        """
        if self._config.admission != "async":
            return {}
        weights = torch.zeros(self._replicas.size, dtype=torch.float64)
        weights[self._replicas.rank] = own
        self._replicas.all_reduce(weights).wait()
        return {party[0]: float(weights[list(party)].sum()) for party in self._roles.parties}

    def _end_round(self) -> None:
        """Returns when all workers have left all parts, and this rank has what they came to."""
        assert self._serving is not None, "a step was begun"
        if self._pushes:
            self._worker.leave()
        self._serving.wait()
        final, row = self._part.end(), self._worker.row
        row[self._flat.spans[self._replicas.rank]].copy_(final)
        if self._config.admission != "sync":
            for server in self._flat.servers:
                self._replicas.broadcast(row[self._flat.spans[server]], root=server).wait()
        elif self._servers is not None:  # a worker's last pull was of the last version
            for server in self._flat.servers:
                self._servers.broadcast(row[self._flat.spans[server]], root=self._roles.servers.index(server)).wait()
        self._flat.unpack(row, self._parameters)
        for buffer in self._replica.buffers:
            mean = buffer.double() if self._works else torch.zeros_like(buffer, dtype=torch.float64)
            self._replicas.all_reduce(mean).wait()
            buffer.copy_(mean / (self._replicas.size - self._config.servers))
        if self._config.servers or self._config.admission == "backup":
            self._take_counts()

    def _take_counts(self) -> None:
        """Ranks that only serve, and late backup workers, run fewer forwards: they take what the first worker has."""
        for buffer in self._replica.counts:
            takes = not self._works or self._config.admission == "backup"
            first = buffer if takes else buffer.clone()  # workers that differ otherwise are found by the fingerprints
            self._replicas.broadcast(first, root=self._roles.workers[0]).wait()

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


def _carried(config: ServerConfig) -> Carried:
    """Where workers serve too, each loss takes a part along. Where all updates are of one step, the parts of different
    servers may be one update apart when a worker is lost; elsewhere they may be so at any time.
    """
    if not config.servers:
        return "nothing"
    return "agreed" if config.admission == "sync" or config.bound == 0 else "newest"


def _gradient_of(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None, "gradients were reduced"
    return parameter.grad


def _check_tables(config: ServerConfig, name: str) -> None:
    if config.topology == "hybrid":
        raise ConfigError(
            f'sync.topology = "hybrid", and {name} is the weight of an EmbeddingTable: each worker looks rows up '
            'alone; set sync.topology to "direct"'
        )
    if config.staleness == "compensated":
        raise ConfigError(
            f'sync.staleness = "compensated", and {name} is the weight of an EmbeddingTable, of which workers keep no '
            'old rows to compare with; set sync.staleness to "plain" or "scaled"'
        )


def _dtype_of(owned: Sequence[Owned]) -> torch.dtype:
    dtypes = list(dict.fromkeys(own.parameter.dtype for own in owned))
    if len(dtypes) > 1:
        raise UserCodeError(
            f"the model has parameters of {dtypes[0]} and of {dtypes[1]}, and servers hold them in one row: "
            "give them one dtype"
        )
    return dtypes[0]
