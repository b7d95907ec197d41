"""What each parameter is for, declared as data by the model that has it.

A model declares an ordered mapping of name patterns (`fnmatch`) to roles; the first pattern that fits decides. From
roles follow the first values, the weight decay, and later how tensor parallelism splits a parameter:

    embedding, head     split over the vocabulary (or the classes)
    column              output features split: a weight's rows, and the bias that belongs to them
    row                 input features split: a weight's columns; the products are then summed
    bias                added once, after the sum of a `row` layer; whole everywhere
    norm, replicated    whole everywhere

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

Kind = Literal["embedding", "head", "column", "row", "norm", "bias", "replicated"]


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
    return {name: _role(model, name, parameter) for name, parameter in model.named_parameters()}


def role_of(model: nn.Module, name: str) -> Role:
    """The role of one parameter, by any of its names. Raises `UserCodeError` where there is no such name or role."""
    for found, parameter in model.named_parameters(remove_duplicate=False):
        if found == name:
            return _role(model, name, parameter)
    raise UserCodeError(f"{type(model).__name__} has no parameter '{name}'; ask for a name of its named_parameters()")


def _role(model: nn.Module, name: str, parameter: Tensor) -> Role:
    if not isinstance(model, DeclaresRoles):
        return Role("replicated", init=None, decay=parameter.ndim >= 2)
    for pattern, role in model.parameter_roles().items():
        if fnmatchcase(name, pattern):
            return role
    raise UserCodeError(
        f"{type(model).__name__}.parameter_roles() says nothing of the parameter '{name}'; a model that declares roles "
        f"declares all: add a pattern that fits it"
    )
