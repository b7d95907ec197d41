"""Embedding tables (`shoal.models.embedding_table`) split over the ranks of `layout.shard`, by rows or by columns.

Each rank looks up ids of its own samples. A rank asks for each row once, however often its samples name it:

    rows      ids to the ranks that hold them | vectors back              backward: gradients of vectors to the holders
    columns   ids to every rank | its columns of the vectors back         backward: columns of the gradients, the same

The holder adds up what all ranks of its replica send, so that its gradient is whole: a sparse tensor of the rows that
anyone looked up. A step sends each way, for u rows that a rank touches, u * width numbers and u ids (by columns: u ids
to each rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.errors import LayoutError
from shoal.models.embedding_table import EmbeddingTable, tables_in
from shoal.topology.axes import placed
from shoal.topology.box import Box, Dims
from shoal.topology.holding import Holding
from shoal.topology.refusal import nearest_divisors


def split_tables(model: nn.Module, mesh: Mesh) -> dict[str, Holding]:
    """Leaves in the tables of `model`, in place, this rank's rows or columns; their holdings, by names of weights.

    Raises `LayoutError` under axes that tables do not know, and for widths or rows that cannot be split.
    """
    tables, layout = tables_in(model), mesh.layout
    for name, table in tables.items():
        if layout.pipeline * layout.context * layout.tensor * layout.expert > 1:
            raise LayoutError(
                f"{name} is the weight of an EmbeddingTable, which is split over layout.shard and repeated over "
                "layout.replicate; set pipeline, context, tensor and expert to 1"
            )
        _check_sizes(name, table, layout.shard)
    group = mesh.axis("shard")
    return {name: _split(name, table, mesh, group) for name, table in tables.items()}


def _check_sizes(name: str, table: EmbeddingTable, size: int) -> None:
    if table.split_along == "columns" and table.width % size:
        sizes = " or ".join(f"shard={n}" for n in nearest_divisors(table.width, size))
        raise LayoutError(
            f"{name} has {table.width} columns, which shard={size} does not divide; nearest: {sizes}, or split the "
            'table by "rows"'
        )
    if table.split_along == "rows" and table.rows < size:
        raise LayoutError(f"{name} has {table.rows} rows, fewer than the {size} ranks of layout.shard; lower shard")


def _split(name: str, table: EmbeddingTable, mesh: Mesh, group: Collective) -> Holding:
    shape = (table.rows, table.width)
    if table.split_along == "rows":
        starts = [table.rows * rank // group.size for rank in range(group.size + 1)]
        own = starts[group.rank], starts[group.rank + 1]
        box = Box((own[0], 0), (own[1] - own[0], table.width))
        lookup = _Rows(group, tuple(starts))
    else:
        columns = table.width // group.size
        box = Box((0, group.rank * columns), (table.rows, columns))
        lookup = _Columns(group)
    if group.size > 1:
        part = table.weight.detach()[box.slices].contiguous().clone()
        table.weight = nn.Parameter(part, requires_grad=table.weight.requires_grad)
        table.lookup = lookup
    return held_table(mesh, name, shape, box)


def held_table(mesh: Mesh, name: str, shape: Dims, box: Box) -> Holding:
    """The holding of a part of a table, whose gradient is whole in its replica before any agreement."""
    alone = (mesh.rank,)
    replicas = mesh.layout.group("replicate", mesh.rank)
    sharded = ("shard",) if mesh.layout.shard > 1 else ()
    return Holding(name, shape, (box,), placed("dense", sharded=sharded), mesh.rank, alone, replicas, alone, alone)


@dataclass(frozen=True)
class _Rows:
    """`Lookup` in a table whose rows `starts[r]` to `starts[r + 1]` rank r holds."""

    group: Collective
    starts: tuple[int, ...]

    def __call__(self, weight: Tensor, ids: Tensor) -> Tensor:
        wanted, places = torch.unique(ids, return_inverse=True)  # ascending, so those of one holder are neighbours
        bounds = torch.searchsorted(wanted, torch.tensor(self.starts, device=ids.device))
        sent = (bounds[1:] - bounds[:-1]).tolist()
        received = _exchanged_counts(sent, self.group, ids.device)
        asked = _exchanged(wanted, sent, received, self.group) - self.starts[self.group.rank]
        return _LookUp.apply(weight, asked, _Route(self.group, tuple(sent), tuple(received)))[places]


@dataclass(frozen=True)
class _Columns:
    """`Lookup` in a table of which each rank holds as many columns, in rank order."""

    group: Collective

    def __call__(self, weight: Tensor, ids: Tensor) -> Tensor:
        size = self.group.size
        wanted, places = torch.unique(ids, return_inverse=True)
        sent = [len(wanted)] * size
        received = _exchanged_counts(sent, self.group, ids.device)
        asked = _exchanged(wanted.repeat(size), sent, received, self.group)
        parts = _LookUp.apply(weight, asked, _Route(self.group, tuple(sent), tuple(received)))
        vectors = parts.view(size, len(wanted), -1).transpose(0, 1).flatten(1)
        return vectors[places]


@dataclass(frozen=True)
class _Route:
    """Rank r gets the vectors of `received[r]` ids that it asked for, and gave those of `sent[r]`."""

    group: Collective
    sent: Sequence[int]
    received: Sequence[int]


class _LookUp(torch.autograd.Function):
    """The rows `asked`, sent to those who asked. Backward: their gradients come back, and make a sparse one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, asked: Tensor, route: _Route) -> Tensor:
        ctx.save_for_backward(asked)
        ctx.route, ctx.shape = route, weight.shape
        return _exchanged(weight.detach()[asked], route.received, route.sent, route.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (asked,), route = ctx.saved_tensors, ctx.route
        rows = _exchanged(gradients[0].contiguous(), route.sent, route.received, route.group)
        return torch.sparse_coo_tensor(asked[None], rows, ctx.shape, check_invariants=False), None, None


def _exchanged(rows: Tensor, sent: Iterable[int], received: Iterable[int], group: Collective) -> Tensor:
    """`sent[r]` of the `rows` go to rank r, and `received[r]` come from it."""
    sent, received = list(sent), list(received)
    output = rows.new_empty(sum(received), *rows.shape[1:])
    group.all_to_all(output, rows.contiguous(), output_sizes=received, input_sizes=sent).wait()
    return output


def _exchanged_counts(sent: Sequence[int], group: Collective, device: torch.device) -> list[int]:
    counts = torch.tensor(sent, device=device)
    theirs = torch.empty_like(counts)
    group.all_to_all(theirs, counts).wait()
    return theirs.tolist()
