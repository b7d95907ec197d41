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
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.models.roles import EmbeddingTable
from shoal.state import Owned, Trained, owned_whole
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
