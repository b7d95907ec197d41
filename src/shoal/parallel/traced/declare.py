"""What a run file says of a module that declares nothing: roles, counts and a traced chain become its own methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from shoal.errors import UserCodeError
from shoal.models.roles import DeclaresParts, DeclaresRoles, Kind, Role
from shoal.parallel.traced.chain import traced_chain
from shoal.parallel.traced.relay import Relay


def declare(
    model: nn.Module, *, roles: Mapping[str, Kind], counts: Sequence[str], parts: str | Sequence[Sequence[str]]
) -> None:
    """Gives `model` the methods `parameter_roles`, `tensor_counts`, `context` and `parts`, where they are wanted.

    `roles` are patterns of names of parameters, `counts` of integer attributes; `parts` are the modules of each
    part of the chain, or "traced": tracing finds them; or "declared". Raises `UserCodeError` for what the model
    declares itself, and for patterns and names that fit nothing.
    """
    if roles:
        declared = _roles(model, roles)
        _give(model, "parameter_roles", DeclaresRoles, lambda: declared, key="model.roles")
    if counts:
        declared_counts = tuple(name for pattern in counts for name in _counts(model, pattern))
        object.__setattr__(model, "tensor_counts", lambda: declared_counts)
    if parts != "declared":
        chain = traced_chain(model) if isinstance(parts, str) else Relay(model, parts)
        _give(model, "context", DeclaresParts, chain.context, key="model.parts")
        object.__setattr__(model, "parts", lambda: chain.parts)


def _give(model: nn.Module, name: str, protocol: type, method: object, *, key: str) -> None:
    if isinstance(model, protocol):
        raise UserCodeError(f"{type(model).__name__} has {name}() itself; leave {key} out of the run file")
    object.__setattr__(model, name, method)


def _roles(model: nn.Module, roles: Mapping[str, Kind]) -> dict[str, Role]:
    """The role of each parameter by its name; those that no pattern fits stay whole."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in roles:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise UserCodeError(
                f"model.roles has {pattern!r}, which fits no parameter of {type(model).__name__}; propose roles "
                "anew by `shoal split`"
            )
    found: dict[str, Role] = {}
    for name, parameter in named.items():
        fitting: list[Kind] = [roles[pattern] for pattern in roles if fnmatchcase(name, pattern)]
        kind: Kind = fitting[0] if fitting else "replicated"
        found[name] = Role(kind, init=None, decay=parameter.ndim >= 2)
    return found


def _counts(model: nn.Module, pattern: str) -> list[str]:
    """The attributes that it fits, by their full names."""
    fitting = [name for name in integer_attributes(model) if fnmatchcase(name, pattern)]
    if not fitting:
        raise UserCodeError(
            f"model.counts has {pattern!r}, which is no integer attribute of a module of {type(model).__name__}; "
            "propose counts anew by `shoal split`"
        )
    return fitting


def integer_attributes(model: nn.Module) -> Iterator[str]:
    """The full names of all that modules have under a name of their own: `blocks.0.attention.heads`."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int:
                yield f"{path}.{name}" if path else name
