"""Models that are a chain, declared as data: what a pipeline cuts into stages.

    context = model.context(*inputs)
    x = part_n(... part_1(part_0(None, context), context) ..., context)

`context` is made of the inputs alone, so that every stage can make its own; only `x` travels between stages. A part
names the submodules it uses, and no other part uses them: a stage drops those of the parts that it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One link: its name for people, the names of its submodules, and `run(x, context)`, `x` None for the first."""

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
