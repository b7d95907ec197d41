"""A model becomes this rank's part of it, along all axes at once, and every parameter learns where it stands.

    chain of parts  --pipeline-->  the stages of this rank  --tensor-->  slices of matrices  --expert-->  some experts
                    --context-->   attention that sees the rest of the sequence
                    --shard-->     rows or columns of embedding tables

What is left is an `nn.Module` of plain parameters under the names of the unsplit model. `Holding` says of each which
box of the unsplit parameter it is, with whom its gradient is summed, and who holds the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn import Parameter

from shoal.comm.mesh import Mesh
from shoal.errors import UserCodeError
from shoal.models.keyed_draws import Inside
from shoal.models.roles import Role, roles_of
from shoal.parallel.context.put import ContextKind, check_context, put_context
from shoal.parallel.expert.exchange import ExpertGroups, ExpertPart, split_experts
from shoal.parallel.pipeline.stages import Stages
from shoal.parallel.tables import split_tables
from shoal.parallel.tensor.plan import TensorPart, split_tensor
from shoal.parallel.tensor.summa import Grid, lines_of
from shoal.parallel.tensor.vocabulary import VocabularySplit
from shoal.topology.box import Box, Dims, whole
from shoal.topology.holding import AlongTensor, Holding, held, held_expert


@dataclass(frozen=True)
class Split:
    """This rank's part of a model.

    `shapes` and `roles` are those of all parameters of the unsplit model, in its order, tied ones once; `frozen` those
    that are not trained, `buffers` the names of its buffers that are saved; `holdings` are of the parameters of this
    rank, by the names that they have here. `vocabulary` says how the logits are split over `tensor`, where they are;
    `columns` and `rows` what layers do to the features, see `TensorPlan`. Of the unsplit model's parameters, `tied` are
    those that several modules use, and `lookups` those of `nn.Embedding`s.
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
    lookups: frozenset[str] = frozenset()

    @property
    def held(self) -> list[tuple[Holding, Parameter]]:
        """The parameters of this rank, each once, and where they stand in the unsplit model."""
        return [(self.holdings[name], parameter) for name, parameter in self.model.named_parameters()]


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
    layout, unsplit = mesh.layout, _Unsplit.of(model)
    check_context(model, mesh.axis("context"))
    tables = split_tables(model, mesh)
    if stages is not None:
        stages.keep(layout.index("pipeline", mesh.rank))
    grid = None if grid_rows is None else _grid(mesh, grid_rows)
    tensor = split_tensor(model, mesh.axis("tensor"), sequence_parallel=sequence_parallel, grid=grid)
    experts: dict[str, ExpertPart] = {}
    if layout.size(("shard", "context", "tensor")) > 1:
        experts = split_experts(model, _expert_groups(mesh, sequence_parallel=sequence_parallel))
    put_context(model, mesh.axis("context"), context)
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
        tensor.columns, tensor.rows, unsplit.tied, unsplit.lookups,
    )  # fmt: skip


@dataclass(frozen=True)
class _Unsplit:
    """What the unsplit model is made of: shapes and roles by first name, the first name by each name."""

    shapes: dict[str, Dims]
    roles: dict[str, Role]
    frozen: frozenset[str]
    buffers: frozenset[str]
    first: dict[str, str]
    lookups: frozenset[str]

    @property
    def tied(self) -> frozenset[str]:
        """The first names of parameters that have several."""
        return frozenset(first for name, first in self.first.items() if name != first)

    @classmethod
    def of(cls, model: nn.Module) -> _Unsplit:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        first = {name: by_id[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        saved = set(model.state_dict(keep_vars=True))
        buffers = frozenset(name for name, _ in model.named_buffers() if name in saved)
        frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
        embeddings = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        lookups = frozenset(first[f"{name}.weight"] for name in embeddings)
        return cls(shapes, roles_of(model), frozen, buffers, first, lookups)


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
    unsplit: _Unsplit,
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
