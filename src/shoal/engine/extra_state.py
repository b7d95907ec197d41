"""State that a user's loop has beside model and optimizer: schedulers, moving averages, counters of its own.

Anything with `state_dict()` and `load_state_dict()`. Tensors in it are saved as tensors, the rest as JSON; every rank
has the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.errors import UserCodeError
from shoal.state import Held

PREFIX = "extra/"


class HasStateDict(Protocol):
    """As PyTorch's schedulers and modules have it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ExtraSection:
    """`Section` of the state of `objects`, by name. What was read reaches them by `restore`."""

    name = "extra"

    def __init__(self, objects: Mapping[str, HasStateDict]) -> None:
        """Raises `UserCodeError` for a name that cannot stand in the name of a tensor."""
        wrong = next((name for name in objects if not name or "/" in name), None)
        if wrong is not None:
            raise UserCodeError(f"the state {wrong!r} has a name that is empty or holds a slash; give it a plain name")
        self._objects = objects
        self._facts: Mapping[str, Any] = {}
        self._read: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Held]:
        """`extra/<object>/<place in its state>`."""
        found: dict[str, Held] = {}
        for name, held in self._objects.items():
            _walk(held.state_dict(), f"{PREFIX}{name}", lambda at, tensor: found.__setitem__(at, tensor.detach()))
        return found

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """Memory of their own, which `restore` hands over. Raises `UserCodeError` for a tensor that is not there."""
        here = self.tensors()
        wanted = [name for name in saved if name.startswith(PREFIX) and name.split("/")[1] in self._objects]
        lacking = next((name for name in wanted if name not in here), None)
        if lacking is not None:
            raise UserCodeError(
                f"the checkpoint holds {lacking}, and the object of that name has no such tensor before it is loaded; "
                "build it as it was in the run that saved"
            )
        self._read = {name: torch.empty_like(tensor) for name in wanted if isinstance(tensor := here[name], Tensor)}
        return dict(self._read)

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Objects that this run does not have."""
        return {name for name in saved if name.startswith(PREFIX)}

    def facts(self) -> dict[str, Any]:
        return {
            name: _walk(held.state_dict(), f"{PREFIX}{name}", lambda *_: None) for name, held in self._objects.items()
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    def restore(self) -> None:
        """Hands everything that was read to its object."""
        for name, facts in self._facts.items():
            if name in self._objects:
                self._objects[name].load_state_dict(_filled(facts, self._read))


_TENSOR = "tensor of this checkpoint"


def _walk(value: Any, at: str, on_tensor: Callable[[str, Tensor], Any]) -> Any:
    """`value` for JSON, with a note in the place of each tensor. Raises `UserCodeError` for what JSON cannot hold."""
    if isinstance(value, Tensor):
        on_tensor(at, value)
        return {_TENSOR: at}
    if isinstance(value, Mapping):
        keys = [key if isinstance(key, str) else [type(key).__name__, key] for key in value]
        if any(not isinstance(key, str) and key[0] != "int" for key in keys):
            raise UserCodeError(f"{at} has keys that are neither text nor whole numbers; a checkpoint cannot hold them")
        return {
            "map": [[key, _walk(v, f"{at}/{k}", on_tensor)] for key, (k, v) in zip(keys, value.items(), strict=True)]
        }
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_walk(v, f"{at}/{i}", on_tensor) for i, v in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):  # the best loss so far begins at infinity
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserCodeError(
        f"{at} is a {type(value).__name__}; a checkpoint holds tensors, numbers, texts, None, and lists and dicts of "
        "these"
    )


def _filled(facts: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `_walk` went through."""
    if not isinstance(facts, Mapping):
        return facts
    (kind, held), *_ = facts.items()
    if kind == _TENSOR:
        return tensors[held]
    if kind == "map":
        return {key if isinstance(key, str) else int(key[1]): _filled(value, tensors) for key, value in held}
    if kind == "float":
        return float(held)
    found = [_filled(value, tensors) for value in held]
    return tuple(found) if kind == "tuple" else found
