"""Hooks: a user's functions, called after each step, evaluation and save with a small read-only record.

A hook after a step or an evaluation may return more measurements, by name; they are recorded beside Shoal's own. Hooks
run on every rank, between two steps: what they do is time in which the rank does not train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from shoal.errors import UserCodeError


@dataclass(frozen=True)
class HookRecord:
    """What a hook is told: the step just done, this rank, and `values`, the measurements by name (none after a save).

    `model` is this rank's part of the model, to look at. Under ZeRO-3 its parameters are pieces.
    """

    step: int
    rank: int
    values: Mapping[str, float]
    model: nn.Module


Hook = Callable[[HookRecord], Mapping[str, float] | None]


@dataclass(frozen=True)
class Hooks:
    """The hooks of a run: names in the run file, and the functions; `users_traceback` shows an error."""

    rank: int = 0
    model: nn.Module = field(default_factory=nn.Identity)
    after_step: Sequence[tuple[str, Hook]] = ()
    after_evaluation: Sequence[tuple[str, Hook]] = ()
    after_save: Sequence[tuple[str, Hook]] = ()
    users_traceback: Callable[[BaseException], str] = str

    def stepped(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """`values` and what the hooks measured. Raises `UserCodeError` for a hook that raises or gives no numbers."""
        return self._call("after_step", self.after_step, step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """The same after an evaluation."""
        return self._call("after_evaluation", self.after_evaluation, step, values)

    def saved(self, step: int) -> None:
        """The checkpoint of `step` counts now."""
        self._call("after_save", self.after_save, step, {})

    def _call(
        self, key: str, hooks: Sequence[tuple[str, Hook]], step: int, values: Mapping[str, float]
    ) -> dict[str, float]:
        found = dict(values)
        for name, hook in hooks:
            where = f"hooks.{key}: {name} at step {step}"
            try:
                more = hook(HookRecord(step, self.rank, MappingProxyType(dict(found)), self.model))
            except Exception as error:
                raise UserCodeError(f"{where} raised:\n{self.users_traceback(error)}") from None
            found |= _numbers(more, where, found)
        return found


def _numbers(more: Any, where: str, taken: Mapping[str, float]) -> dict[str, float]:
    if more is None:
        return {}
    if not isinstance(more, Mapping):
        raise UserCodeError(f"{where} returned a {type(more).__name__}; return None or a mapping of names to numbers")
    found = {}
    for name, value in more.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise UserCodeError(f"{where} returned {name!r}: a {type(value).__name__}; it must be a number") from None
        if str(name) in taken:
            raise UserCodeError(f"{where} returned {name!r}, which is measured already; give it another name")
    return found
