"""What a module is told beside its arguments, so that a forward can be repeated later as it was.

The keys of the samples, what a router has to know of its microbatch, training or evaluation: such things are set on the
modules before a forward, and by the time of the backward others may have been set for the next microbatch. `Replay`
takes them down; inside of it they are as they were, and what the repeated forward writes leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from shoal.models.keyed_draws import active_draws

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}

Attributes = Mapping[nn.Module, Mapping[str, Any]]


class Replay(AbstractContextManager[None]):
    """Takes down the attributes of `module` and its submodules, by reference; inside, they are those again.

    It may be entered any number of times: a backward in two parts, of activations and of weights, recomputes twice.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._attributes = module, _attributes(module)
        self._draws = active_draws()
        self._moment = None if self._draws is None else self._draws.moment()
        self._entered: list[tuple[Attributes, ExitStack]] = []

    def __enter__(self) -> None:
        later, buffers = _attributes(self._module), ExitStack()
        _set(self._attributes)
        buffers.enter_context(_copied_buffers(self._module))
        if self._draws is not None and self._moment is not None:
            buffers.enter_context(self._draws.replaying(self._moment))
        self._entered.append((later, buffers))

    def __exit__(self, *error: object) -> None:
        later, buffers = self._entered.pop()
        buffers.close()
        _set(later)


def _attributes(module: nn.Module) -> Attributes:
    return {m: {name: x for name, x in vars(m).items() if name not in _INTERNAL} for m in module.modules()}


def _set(attributes: Attributes) -> None:
    for module, values in attributes.items():
        now = vars(module)
        for name, value in values.items():
            if now.get(name) is not value:
                setattr(module, name, value)


@contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """Gives the modules copies of their buffers to write to, such as running statistics."""
    places = [
        (m, name, old) for m in module.modules() for name, old in m.named_buffers(recurse=False, remove_duplicate=False)
    ]
    copies = {id(old): old.clone() for _, _, old in places}
    try:
        for owner, name, old in places:
            setattr(owner, name, copies[id(old)])
        yield
    finally:
        for owner, name, old in places:
            setattr(owner, name, old)
