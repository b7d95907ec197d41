"""A model becomes this rank's part of it, along all axes at once, and every parameter learns where it stands.

    chain of parts  --pipeline-->  the stages of this rank  --tensor-->  slices of matrices  --expert-->  some experts
                    --context-->   attention that sees the rest of the sequence
                    --shard-->     rows or columns of embedding tables

What is left is an `nn.Module` of plain parameters under the names of the unsplit model. `Holding` says of each which
box of the unsplit parameter it is, with whom its gradient is summed, and who holds the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.comm.messages import Messages
from shoal.errors import LayoutError, UserCodeError
from shoal.models.roles import EmbeddingTable, Role, Stored, roles_of, stored_in, tables_in
from shoal.models.sample_places import Inside
from shoal.parallel.context.kinds import ContextKind, check_context, put_context
from shoal.parallel.context.ring import pairs_of_ring
from shoal.parallel.expert import ExpertGroups, ExpertPart, split_experts
from shoal.parallel.pipeline.stages import Stages
from shoal.parallel.tensor.plan import TensorPart, split_tensor
from shoal.parallel.tensor.summa import Grid, lines_of
from shoal.parallel.tensor.vocabulary import VocabularySplit
from shoal.topology.holding import AlongTensor, Box, Dims, Holding, held, held_expert, whole
from shoal.topology.layout import placed
from shoal.topology.refusal import nearest_divisors

# Embedding tables (`shoal.models.roles`) split over the ranks of `layout.shard`, by rows or by columns.
#
# Each rank looks up ids of its own samples. A rank asks for each row once, however often its samples name it:
#
#   rows      ids to the ranks that hold them | vectors back              backward: gradients of vectors to the holders
#   columns   ids to every rank | its columns of the vectors back         backward: columns of the gradients, the same
#
# The holder adds up what all ranks of its replica send, so that its gradient is whole: a sparse tensor of the rows that
# anyone looked up. A step sends each way, for u rows that a rank touches, u * width numbers and u ids (by columns: u
# ids to each rank).


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


@dataclass(frozen=True)
class Split:
    """This rank's part of a model.

    `shapes` and `roles` are those of all parameters of the unsplit model, in its order, tied ones once; `frozen` those
    that are not trained, `buffers` the names of its buffers that are saved; `holdings` are of the parameters of this
    rank, by the names that they have here. `vocabulary` says how the logits are split over `tensor`, where they are;
    `columns` and `rows` what layers do to the features, see `TensorPlan`. Of the unsplit model's parameters, `tied` are
    those that several modules use, `no_products` those of embeddings and norms, which are no matrices of products, and
    `stored` those that are not one matrix `[outputs, inputs, ...]`.
    """

    model: nn.Module
    shapes: Mapping[str, Dims]
    roles: Mapping[str, Role]
    frozen: frozenset[str]
    buffers: frozenset[str]
    holdings: Mapping[str, Holding]
    vocabulary: VocabularySplit | None
    columns: Mapping[str, Inside] = field(default_factory=dict)
    rows: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    no_products: frozenset[str] = frozenset()
    stored: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def held(self) -> list[tuple[Holding, Parameter]]:
        """The parameters of this rank, each once, and where they stand in the unsplit model."""
        return [(self.holdings[name], parameter) for name, parameter in self.model.named_parameters()]

    @property
    def trained_sizes(self) -> dict[str, int]:
        """The elements of every parameter of the unsplit model that is trained, by name."""
        return {name: prod(shape) for name, shape in self.shapes.items() if name not in self.frozen}


def split_model(
    model: nn.Module,
    mesh: Mesh,
    *,
    stages: Stages | None = None,
    sequence_parallel: bool = False,
    context: ContextKind = "ring",
    grid_rows: int | None = None,
) -> Split:
    """Leaves in `model`, in place, what this rank computes with. Parameters may be of any device, "meta" too.

    `stages` say which parts of the chain this rank holds; None: all. `grid_rows`: the ranks of `tensor` stand in so
    many rows of a grid, and matrices lie in blocks on it (`shoal.parallel.tensor.summa`).

    Raises:
        LayoutError: something does not divide; the sentence names the nearest sizes that do.
        UserCodeError: the model does not declare what splitting it needs.
    """
    layout, unsplit = mesh.layout, Unsplit.of(model)
    check_context(model, mesh.axis("context"))
    tables = split_tables(model, mesh)
    if stages is not None:
        stages.keep(layout.index("pipeline", mesh.rank))
    grid = None if grid_rows is None else _grid(mesh, grid_rows)
    tensor = split_tensor(model, mesh.axis("tensor"), sequence_parallel=sequence_parallel, grid=grid)
    experts: dict[str, ExpertPart] = {}
    if layout.size(("shard", "context", "tensor")) > 1:
        experts = split_experts(model, _expert_groups(mesh, sequence_parallel=sequence_parallel))
    put_context(model, mesh.axis("context"), context, _ring(mesh) if context == "ring" else None)
    if layout.expert > 1 and not any(role.kind == "expert" for role in unsplit.roles.values()):
        raise UserCodeError(
            f"{type(model).__name__} has no experts, and layout.expert = {layout.expert} splits them; set it to 1"
        )
    holdings = {}
    for name, _ in model.named_parameters():
        if name in tables:
            holdings[name] = tables[name]
            continue
        places = stages.holders(name) if stages is not None else ()
        holdings[name] = _holding(mesh, unsplit, name, tensor.parts.get(name), experts.get(name), places)
    return Split(
        model, unsplit.shapes, unsplit.roles, unsplit.frozen, unsplit.buffers, holdings, tensor.vocabulary,
        tensor.columns, tensor.rows, unsplit.tied, unsplit.no_products, unsplit.stored,
    )  # fmt: skip


def _ring(mesh: Mesh) -> Messages | None:
    """What the context ranks send each other over."""
    size = mesh.layout.context
    return mesh.messages("context", pairs=pairs_of_ring(size)) if size > 1 else None


@dataclass(frozen=True)
class Unsplit:
    """What the unsplit model is made of: shapes and roles by first name, the first name by each name."""

    shapes: dict[str, Dims]
    roles: dict[str, Role]
    frozen: frozenset[str]
    buffers: frozenset[str]
    first: dict[str, str]
    no_products: frozenset[str]
    stored: dict[str, Stored]

    @property
    def tied(self) -> frozenset[str]:
        """The first names of parameters that have several."""
        return frozenset(first for name, first in self.first.items() if name != first)

    @classmethod
    def of(cls, model: nn.Module) -> Unsplit:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        first = {name: by_id[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        saved = set(model.state_dict(keep_vars=True))
        buffers = frozenset(name for name, _ in model.named_buffers() if name in saved)
        frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
        roles = roles_of(model)
        no_products = frozenset(
            first[f"{path}.{name}".lstrip(".")]
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Norm" in type(module).__name__
            for name, _ in module.named_parameters(recurse=False)
        )
        return cls(shapes, roles, frozen, buffers, first, no_products, stored_in(model, roles))


def _grid(mesh: Mesh, rows: int) -> Grid:
    """This rank's lines of the grid that its group along `tensor` makes."""
    row, column = lines_of(mesh.layout.group("tensor", mesh.rank), mesh.layout.index("tensor", mesh.rank), rows=rows)
    return Grid(mesh.ranks(row), mesh.ranks(column))


def _expert_groups(mesh: Mesh, *, sequence_parallel: bool) -> ExpertGroups:
    return ExpertGroups(
        expert=mesh.axis("expert"),
        tensor=mesh.axis("tensor"),
        sequence=mesh.axis("context", "tensor"),
        sequence_parallel=sequence_parallel,
    )


def _holding(
    mesh: Mesh,
    unsplit: Unsplit,
    name: str,
    tensor: TensorPart | None,
    expert: ExpertPart | None,
    places: Collection[int],
) -> Holding:
    """Of the parameter that this rank's part of the model calls `name`; `places` along `pipeline` hold it."""
    first = unsplit.first[name]
    shape = unsplit.shapes[first]
    if unsplit.roles[first].kind == "expert":
        box = whole(shape) if expert is None else _slab(shape, expert.dim, expert.offset, expert.length)
        return held_expert(mesh.layout, mesh.rank, first, shape, box=box)
    assert tensor is not None, f"the tensor plan says nothing of {name}"
    return held(
        mesh.layout,
        mesh.rank,
        first,
        shape,
        boxes=tensor.boxes(shape),
        tensor=AlongTensor(split=tensor.dim is not None, partial=tensor.partial, same=tensor.twins),
        tied=places,
    )


def _slab(shape: Dims, dim: int, offset: int, length: int) -> Box:
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim], sizes[dim] = offset, length
    return Box(tuple(starts), tuple(sizes))
