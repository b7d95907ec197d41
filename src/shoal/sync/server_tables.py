"""Embedding tables that live on servers alone: workers look rows up in the forward, and push their gradients.

    forward    ids to the servers that have their rows | rows back
    backward   a sparse gradient, which goes along with the worker's next push

A worker keeps nothing of the table. Its parameter has the table's shape and the memory of one number, and exists for
its gradient. A row that a step looks up several times travels once; rows that no step looks up travel never. So a
step's bytes follow the rows that it touches, and a table may be larger than a worker's memory once it is built; every
rank builds it whole first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.errors import ConfigError
from shoal.models.roles import EmbeddingTable
from shoal.state import Owned, Trained, owned_run, owned_whole
from shoal.sync.config import ServerConfig
from shoal.topology.holding import Box

Fetch = Callable[[int, Tensor], Tensor]
"""From the number of a table and ids [n], ascending and each once, to their rows [n, width]."""


@dataclass(frozen=True)
class TablePlaces:
    """Server `servers[k]` has the rows `starts[k]` .. `starts[k + 1]` of a table of `width` columns."""

    servers: Sequence[int]
    starts: Sequence[int]
    width: int

    def rows_of(self, server: int) -> tuple[int, int]:
        """First row and end of the rows of `server`; none for a rank that does not serve."""
        if server not in self.servers:
            return 0, 0
        place = self.servers.index(server)
        return self.starts[place], self.starts[place + 1]

    def divided(self, ids: Tensor) -> dict[int, slice]:
        """Which of `ids`, ascending, each server has; without servers that have none."""
        bounds = torch.searchsorted(ids, torch.tensor(self.starts)).tolist()
        found = {server: slice(*bounds[k : k + 2]) for k, server in enumerate(self.servers)}
        return {server: part for server, part in found.items() if part.start < part.stop}


def places_of(module: EmbeddingTable, servers: Sequence[int]) -> TablePlaces:
    """As many rows to each server as to any other, give or take one."""
    starts = [module.rows * k // len(servers) for k in range(len(servers) + 1)]
    return TablePlaces(servers, starts, module.width)


@dataclass
class ServedTable:
    """The rows from `start` on that one server has of a table: `weight` [rows here, width]."""

    start: int
    weight: Parameter

    def look_up(self, ids: Tensor) -> Tensor:
        """Their rows, [n, width], in memory of their own."""
        return self.weight.detach()[ids - self.start]

    def gradient(self, ids: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        """The sum of some gradients, each of `rows` [n, width] at `ids` [n], as a sparse tensor like `weight`."""
        where = torch.cat(list(ids)) - self.start
        return torch.sparse_coo_tensor(where[None], torch.cat(list(rows)), self.weight.shape).coalesce()


def serve_table(owned: Owned, module: EmbeddingTable, places: TablePlaces, rank: int) -> tuple[ServedTable, Owned]:
    """Takes the table out of the model of this rank: what the rank serves of it, and what its optimizer updates."""
    start, stop = places.rows_of(rank)
    whole = owned.parameter.detach()
    piece = Parameter(whole[start:stop].clone())
    box = Box((start, 0), (stop - start, module.width))
    owned.parameter.data = whole.new_zeros(1, 1).expand(whole.shape)
    part = owned_whole(Trained(replace(owned.holding, boxes=(box,)), owned.parameter), piece)
    return ServedTable(start, piece), part


class RowsFromServers:
    """`Lookup` in table number `number`, whose rows `fetch` brings."""

    def __init__(self, number: int, fetch: Fetch) -> None:
        self._number, self._fetch = number, fetch

    def __call__(self, weight: Tensor, ids: Tensor) -> Tensor:
        wanted, places = torch.unique(ids, return_inverse=True)
        return _LookUp.apply(weight, wanted, self._number, self._fetch)[places]


class _LookUp(torch.autograd.Function):
    """Rows from servers. Backward: a sparse gradient in the shape of the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, number: int, fetch: Fetch) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return fetch(number, ids)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        rows = gradients[0].contiguous()
        return torch.sparse_coo_tensor(ids[None], rows, ctx.shape, is_coalesced=True), None, None, None


# Which server has which elements of a model's parameters. Pure.
#
# All elements in a row, tensor by tensor, are cut into one part for each server, as even as whole cache lines allow; so
# a large tensor is divided between servers, and a server has the ends of two tensors and whole ones between them.
#
#     elements   | w0 ..... | w1 .. | w2 ........... |
#     parts      | server 0     | server 1           |
#
# An optimizer that works on whole matrices needs each tensor on one server: `whole` gives them out largest first, each
# to the server with the least so far (Graham's LPT rule).


ALIGNMENT = 16
"""Elements: parts begin on a cache line."""


class ParameterRun(NamedTuple):
    """The elements `start` .. `stop` of tensor number `tensor`, row by row."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.stop - self.start


def partition(lengths: Sequence[int], servers: int, *, whole: bool = False) -> tuple[tuple[ParameterRun, ...], ...]:
    """The runs of every server, in the order of tensors; none for servers beyond the elements. `lengths` in elements.

    `whole`: no tensor is divided.
    """
    return _whole(lengths, servers) if whole else _even(lengths, servers)


def _even(lengths: Sequence[int], servers: int) -> tuple[tuple[ParameterRun, ...], ...]:
    total = sum(lengths)
    lines = -(-total // ALIGNMENT)
    cuts = [min(total, lines * server // servers * ALIGNMENT) for server in range(servers + 1)]
    parts: list[list[ParameterRun]] = [[] for _ in range(servers)]
    begin = 0
    for tensor, length in enumerate(lengths):
        for server in range(servers):
            start, stop = max(begin, cuts[server]), min(begin + length, cuts[server + 1])
            if start < stop:
                parts[server].append(ParameterRun(tensor, start - begin, stop - begin))
        begin += length
    return tuple(map(tuple, parts))


def _whole(lengths: Sequence[int], servers: int) -> tuple[tuple[ParameterRun, ...], ...]:
    parts: list[list[ParameterRun]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for tensor in sorted(range(len(lengths)), key=lambda tensor: (-lengths[tensor], tensor)):
        server = min(range(servers), key=lambda server: (loads[server], server))
        parts[server].append(ParameterRun(tensor, 0, lengths[tensor]))
        loads[server] += lengths[tensor]
    return tuple(tuple(sorted(part)) for part in parts)


def owned_pieces(owned: Sequence[Owned], runs: Sequence[ParameterRun], values: Tensor) -> list[Owned]:
    """What a server updates, as parts of the unsplit parameters `owned`: views of `values` [numel], the elements of
    `runs`, one behind the other.
    """
    pieces, at = [], 0
    for run in runs:
        of, place = owned[run.tensor], slice(at, at + run.numel)
        at += run.numel
        whole = run.numel == of.parameter.numel()
        shape = of.parameter.shape if whole else (run.numel,)
        piece = Parameter(values[place].view(shape))
        if whole:
            pieces.append(owned_whole(Trained(of.holding, of.parameter), piece))
        else:
            pieces.append(owned_run(of.holding, piece, run.start, run.stop))
    return pieces


# Which ranks work, which serve, and who speaks for whom. Pure.
#
#     decentralised       0 1 2 3 work and serve
#     dedicated servers   0 1 2 3 work | 4 5 serve
#     hybrid              (0 1) (2 3) work, 0 and 2 push and pull for their hosts | 4 5 serve     BytePS, OSDI 2020
#
# A party contributes as one worker: a rank alone, or the workers of a host, which sum their gradients first.


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """`servers` in ascending order; the first rank of a party pushes and pulls for it."""

    parties: tuple[Ranks, ...]
    servers: Ranks

    @property
    def workers(self) -> Ranks:
        """The ranks that push and pull: one of each party."""
        return tuple(party[0] for party in self.parties)

    def party_of(self, rank: int) -> Ranks:
        """The party of `rank`; empty for one that only serves."""
        return next((party for party in self.parties if rank in party), ())


def roles_of(config: ServerConfig, size: int, hosts: Sequence[str] = ()) -> Roles:
    """The roles of `size` ranks. `hosts` are their hosts' identities in rank order; empty: nobody knows, or cares.

    Raises `ConfigError` where no worker, or no party that counts, is left.
    """
    working = size - config.servers
    if working < 1:
        raise ConfigError(
            f"sync.servers = {config.servers} of {size} ranks leaves none to work: lower it, or raise run.processes"
        )
    parties: dict[str, list[int]] = {}
    for rank in range(working):
        shared = config.topology == "hybrid" and len(hosts) == size
        parties.setdefault(hosts[rank] if shared else str(rank), []).append(rank)
    if config.backup is not None and config.backup >= len(parties):
        raise ConfigError(
            f"sync.backup = {config.backup}, and {len(parties)} contribute to an update: none would be left to count; "
            "lower it"
        )
    return Roles(
        tuple(tuple(party) for party in parties.values()), tuple(range(working if config.servers else 0, size))
    )
