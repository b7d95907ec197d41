"""What each parameter is for, declared as data by the model that has it.

A model declares an ordered mapping of name patterns (`fnmatch`) to roles; the first pattern that fits decides. From
roles follow the first values, the weight decay, and later how tensor parallelism splits a parameter:

    embedding, head     split over the vocabulary (or the classes)
    column              output features split: a weight's rows, and the bias that belongs to them
    row                 input features split: a weight's columns; the products are then summed
    packed              several column layers in one, as queries, keys and values: each rank has its output features of
                        every block
    bias                added once, after the sum of a `row` layer; whole everywhere
    norm, replicated    whole everywhere
    router              whole everywhere; each rank routes tokens of its own, so its gradient is a sum over them
    expert              stacked experts; split over the experts, the first dimension
    table               an `EmbeddingTable`'s rows, whose gradient is sparse; its module says how it is split

A module that declares nothing, such as a user's own, is replicated and keeps the first values it was built with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.maths.counter import normal

# `EmbeddingTable`: a large table of vectors, looked up by row, of which each step touches few rows.
#
#     y_i = W[id_i],    dL/dW = the rows that were looked up, and nothing of the others
#
# Recommendation models keep most of their parameters in such tables (DLRM, arXiv:1906.00091). The gradient is sparse
# (PyTorch's `nn.Embedding(sparse=True)`): its size, the bytes between ranks and the optimizer's work are in proportion
# to the rows touched, not to the table. Under `layout.shard` the ranks split the table by rows or by columns; the
# vectors then travel, and never the table (`shoal.parallel.split`).


SplitAlong = Literal["rows", "columns"]


class Lookup(Protocol):
    """How ids find their vectors, which other ranks may hold."""

    def __call__(self, weight: Tensor, ids: Tensor) -> Tensor:
        """`ids` int64 `[n]` to vectors `[n, width]`; `weight` is the part of the table that this rank holds."""
        ...


def look_up(weight: Tensor, ids: Tensor) -> Tensor:
    """The whole table is here."""
    return F.embedding(ids, weight, sparse=True)


class EmbeddingTable(nn.Module):
    """`rows` vectors of `width` numbers. Under `layout.shard` each rank holds some rows, or some columns of all rows.

    Split by rows a lookup sends each vector once; split by columns it sends the ids to every rank, and the ranks have
    equal work however uneven the ids are. Several features share one table, and one exchange, if their ids are shifted
    by the rows before them. The first values are normal with standard deviation `std`.
    """

    def __init__(self, rows: int, width: int, *, split: SplitAlong = "rows", std: float = 0.01) -> None:
        super().__init__()
        if rows < 1 or width < 1 or split not in ("rows", "columns"):
            raise UserCodeError(
                f"EmbeddingTable({rows}, {width}, split={split!r}): rows and width are at least 1, and split is "
                '"rows" or "columns"'
            )
        self.rows, self.width, self.split_along = rows, width, split
        self.weight = nn.Parameter(torch.randn(rows, width) * std)
        self.lookup: Lookup = look_up
        checks = torch.sparse.check_sparse_tensor_invariants
        if not checks.is_enabled():
            checks.disable()  # as they are: PyTorch warns where nobody has said it

    def forward(self, ids: Tensor) -> Tensor:
        """`ids` int64 `[...]`, from 0 to `rows` - 1, to vectors `[..., width]`. Raises `UserCodeError` for others."""
        if ids.dtype != torch.int64:
            raise UserCodeError(f"EmbeddingTable takes ids of int64, and got {str(ids.dtype).removeprefix('torch.')}")
        flat = ids.reshape(-1)
        if len(flat) and not (int(flat.min()) >= 0 and int(flat.max()) < self.rows):
            raise UserCodeError(
                f"EmbeddingTable of {self.rows} rows was given ids from {int(flat.min())} to {int(flat.max())}; ids "
                f"must lie between 0 and {self.rows - 1}"
            )
        return self.lookup(self.weight, flat).view(*ids.shape, self.width)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.width}, split={self.split_along!r}"


def is_conv1d(layer: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 in `transformers`, whose weight is `[in, out]`."""
    kind = type(layer)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


@dataclass(frozen=True)
class Stored:
    """How the matrices of a parameter lie in it, where it is not one, `[outputs, inputs, ...]`.

    `stacked`: several, along a dimension of their own, `[matrices, outputs, inputs]`; `groups`: as many, one after the
    other along the first dimension; `turned`: with inputs before outputs.
    """

    turned: bool = False
    stacked: bool = False
    groups: int = 1

    def as_rows(self, weight: Tensor) -> Tensor:
        """`[outputs of all matrices, inputs, ...]`."""
        each = weight if self.stacked else weight.unflatten(0, (self.groups, -1))
        return (each.transpose(1, 2) if self.turned else each).flatten(0, 1)

    def as_stored(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """What `as_rows` has made of a parameter of `shape`, as it was."""
        each = rows.unflatten(0, (self.matrices(shape), -1))
        return (each.transpose(1, 2) if self.turned else each).reshape(*shape)

    def matrices(self, shape: Sequence[int]) -> int:
        """How many a parameter of `shape` holds."""
        return shape[0] if self.stacked else self.groups

    def rows_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """That of what `as_rows` makes of it."""
        return tuple(self.as_rows(torch.empty(*shape, device="meta")).shape)


AS_IT_IS = Stored()
"""One matrix, `[outputs, inputs, ...]`."""


def stored_in(model: nn.Module, roles: Mapping[str, Role]) -> dict[str, Stored]:
    """The parameters of `model`, whose `roles` these are, that are not one matrix `[outputs, inputs, ...]`."""
    found = {name: Stored(stacked=True) for name, role in roles.items() if role.kind == "expert"}
    for path, module in model.named_modules():
        if is_conv1d(module):
            found[f"{path}.weight"] = Stored(turned=True)
        elif isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            found[f"{path}.weight".lstrip(".")] = Stored(turned=True, groups=module.groups)
        elif hasattr(module, "_is_expert_parallel"):  # experts of transformers
            each = Stored(turned=bool(getattr(module, "is_transposed", False)), stacked=True)
            found |= {f"{path}.{name}": each for name, _ in module.named_parameters(recurse=False)}
    dims = {name: parameter.ndim for name, parameter in model.named_parameters()}
    return {name: each for name, each in found.items() if dims.get(name, 0) > (2 if each.stacked else 1)}


def tables_in(model: nn.Module) -> dict[str, EmbeddingTable]:
    """The tables of a model, by the first names of their weights. Raises `UserCodeError` for a tied weight."""
    found = {f"{name}.weight".lstrip("."): m for name, m in model.named_modules() if isinstance(m, EmbeddingTable)}
    uses = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    for name, table in found.items():
        if uses.count(id(table.weight)) > 1:
            raise UserCodeError(f"{name}, the weight of an EmbeddingTable, is used by another module too; untie them")
    return found


# The laws that first values of parameters follow: each maps counters to numbers, so that any part is drawn alone.


class Law(Protocol):
    """A distribution of first values."""

    def draw(self, key: int, counters: Tensor, *, dtype: torch.dtype) -> Tensor:
        """One value for each counter (int64, any shape and device), in `dtype`."""
        ...


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers of mean 0 and standard deviation `std`, computed in float64 and then rounded."""

    std: float

    def draw(self, key: int, counters: Tensor, *, dtype: torch.dtype) -> Tensor:
        return (normal(key, counters, dtype=torch.float64) * self.std).to(dtype)


@dataclass(frozen=True)
class Constant:
    """The same number everywhere."""

    value: float

    def draw(self, key: int, counters: Tensor, *, dtype: torch.dtype) -> Tensor:
        return torch.full_like(counters, self.value, dtype=dtype)


ZEROS = Constant(0.0)
ONES = Constant(1.0)


Kind = Literal[
    "embedding", "head", "column", "row", "packed", "norm", "bias", "replicated", "router", "expert", "table"
]


@dataclass(frozen=True)
class Widened:
    """Which dimensions of a parameter grow with the width of its model, and `times` as wide as at the base they are.

    "input": its outputs alone, as of embeddings, biases and norms; "hidden": both; "output": its inputs alone, as of a
    head. `times` is that of the inputs where these grow, else of the outputs.
    """

    grows: Literal["input", "hidden", "output"]
    times: float


def widened(grows: Literal["input", "hidden", "output"], times: float | None) -> Widened | None:
    """None where the model's rates do not follow its width, and `times` is None."""
    return None if times is None else Widened(grows, times)


@dataclass(frozen=True)
class Role:
    """What a parameter is (`kind`), its first values (`init`; None: those it has), and whether weight decay applies.

    `widened`: how its rate follows the width, where the model asks for that (`shoal.optim.mup`); None: it does not.
    """

    kind: Kind
    init: Law | None
    decay: bool
    widened: Widened | None = None


_TABLE = Role("table", init=None, decay=False)
"""Of an embedding table in a model that declares nothing: decay would move rows that a step has not touched."""


@runtime_checkable
class DeclaresRoles(Protocol):
    """A module that says what its parameters are."""

    def parameter_roles(self) -> Mapping[str, Role]:
        """Patterns of parameter names to roles, in the order in which they are tried."""
        ...


@runtime_checkable
class DeclaresOwnRoles(Protocol):
    """A module that says what parameters of its own are, by their names in it, whatever model it is in."""

    def own_roles(self) -> Mapping[str, Role]:
        """Names to roles."""
        ...


@runtime_checkable
class FollowsWidth(Protocol):
    """A module whose rates follow its width, though it declares nothing of it (`shoal.models.width`)."""

    width_rules: Mapping[str, Widened]
    """By the names of parameters."""


@runtime_checkable
class DeclaresCounts(Protocol):
    """A module whose forward counts what tensor parallelism splits, such as heads."""

    def tensor_counts(self) -> Sequence[str]:
        """Names of integer attributes, `blocks.0.attention.heads`, of which each rank has its share."""
        ...


def roles_of(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter, in the model's order; a tied parameter appears once, under its first name.

    Raises `UserCodeError` for a parameter that a model which declares roles has forgotten.
    """
    rules = model.width_rules if isinstance(model, FollowsWidth) else {}
    roles = _roles_of(model)
    return roles | {name: replace(roles[name], widened=rule) for name, rule in rules.items() if name in roles}


def _roles_of(model: nn.Module) -> dict[str, Role]:
    if not isinstance(model, DeclaresRoles):
        tables, own = tables_in(model), _own_roles(model)
        return {
            name: own.get(name) or (_TABLE if name in tables else _role_of_undeclared(parameter))
            for name, parameter in model.named_parameters()
        }
    own = _own_roles(model)
    declared = own | {pattern: role for pattern, role in model.parameter_roles().items() if pattern not in own}
    return {name: _declared_role(model, declared, name=name) for name, _ in model.named_parameters()}


def role_of(model: nn.Module, name: str) -> Role:
    """The role of one parameter, by any of its names. Raises `UserCodeError` where there is no such name or role."""
    parameter = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None:
        raise UserCodeError(f"{type(model).__name__} has no parameter '{name}'; use a name of its named_parameters()")
    if name in (own := _own_roles(model)):
        return own[name]
    if not isinstance(model, DeclaresRoles):
        return _TABLE if name in tables_in(model) else _role_of_undeclared(parameter)
    return _declared_role(model, model.parameter_roles(), name=name)


def _own_roles(model: nn.Module) -> dict[str, Role]:
    """What modules of `model` say of parameters of their own, by their names in it."""
    return {
        f"{path}.{name}" if path else name: role
        for path, module in model.named_modules()
        if isinstance(module, DeclaresOwnRoles)
        for name, role in module.own_roles().items()
    }


def _role_of_undeclared(parameter: Tensor) -> Role:
    return Role("replicated", init=None, decay=parameter.ndim >= 2)


def _declared_role(model: nn.Module, declared: Mapping[str, Role], *, name: str) -> Role:
    for pattern, role in declared.items():
        if fnmatchcase(name, pattern):
            return role
    raise UserCodeError(
        f"{type(model).__name__}.parameter_roles() says nothing of the parameter '{name}'; a model that declares roles "
        f"declares all: add a pattern that fits it"
    )


# Models that are a chain, declared as data: what a pipeline cuts into stages.
#
#     context = model.context(*inputs)
#     x = part_n(... part_1(part_0(None, context), context) ..., context)
#
# `context` is made of the inputs alone, so that every stage can make its own; only `x` travels between stages. A part
# names the submodules it uses, and no other part uses them: a stage drops those of the parts that it does not hold.


@dataclass(frozen=True)
class Part:
    """One link: its name for people, the names of its submodules (and of parameters beside them), and
    `run(x, context)`, `x` None for the first."""

    name: str
    modules: tuple[str, ...]
    run: Callable[[Any, Any], Tensor]


@runtime_checkable
class DeclaresParts(Protocol):
    """A module that says which chain it is."""

    def context(self, *inputs: Any, **named: Any) -> Any:
        """What every part gets beside the activations, from the inputs of `forward`."""
        ...

    def parts(self) -> Sequence[Part]:
        """The links, first to last."""
        ...


def run_chain(model: DeclaresParts, *inputs: Any, **named: Any) -> Any:
    """The whole chain: the `forward` of a model that declares one."""
    context = model.context(*inputs, **named)
    x = None
    for part in model.parts():
        x = part.run(x, context)
    return x
