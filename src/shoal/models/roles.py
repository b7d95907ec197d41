"""What each parameter is for, declared as data by the model that has it.

A model declares an ordered mapping of name patterns (`fnmatch`) to roles; the first pattern that fits decides. From
roles follow the first values, the weight decay, and later how tensor parallelism splits a parameter:

    embedding, head     split over the vocabulary (or the classes)
    column              output features split: a weight's rows, and the bias that belongs to them
    row                 input features split: a weight's columns; the products are then summed
    bias                added once, after the sum of a `row` layer; whole everywhere
    norm, replicated    whole everywhere
    router              whole everywhere; each rank routes tokens of its own, so its gradient is a sum over them
    expert              stacked experts; split over the experts, the first dimension

A module that declares nothing, such as a user's own, is replicated and keeps the first values it was built with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.models.law import Law

Kind = Literal["embedding", "head", "column", "row", "norm", "bias", "replicated", "router", "expert"]


@dataclass(frozen=True)
class Role:
    """What a parameter is (`kind`), its first values (`init`; None: those it has), and whether weight decay applies."""

    kind: Kind
    init: Law | None
    decay: bool


@runtime_checkable
class DeclaresRoles(Protocol):
    """A module that says what its parameters are."""

    def parameter_roles(self) -> Mapping[str, Role]:
        """Patterns of parameter names to roles, in the order in which they are tried."""
        ...


def roles_of(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter, in the model's order; a tied parameter appears once, under its first name.

    Raises `UserCodeError` for a parameter that a model which declares roles has forgotten.
    """
    if not isinstance(model, DeclaresRoles):
        return {name: _role_of_undeclared(parameter) for name, parameter in model.named_parameters()}
    declared = model.parameter_roles()
    return {name: _declared_role(model, declared, name=name) for name, _ in model.named_parameters()}


def role_of(model: nn.Module, name: str) -> Role:
    """The role of one parameter, by any of its names. Raises `UserCodeError` where there is no such name or role."""
    parameter = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None:
        raise UserCodeError(f"{type(model).__name__} has no parameter '{name}'; use a name of its named_parameters()")
    if not isinstance(model, DeclaresRoles):
        return _role_of_undeclared(parameter)
    return _declared_role(model, model.parameter_roles(), name=name)


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
