"""The units of a model: what stages are made of and what is computed again; what belongs to none lies outside.

A model that declares a chain has its parts; another the blocks that `memory.recompute` would find; else none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from shoal.memory.blocks import blocks_of
from shoal.models.roles import DeclaresParts


@dataclass(frozen=True)
class Units:
    """Names in order, and the unit of a module by its path; `blocks` are those between a chain's first and last part,
    or all."""

    names: tuple[str, ...]
    of_module: Mapping[str, int]
    blocks: tuple[int, ...]
    is_chain: bool

    def holding(self, path: str) -> int | None:
        """The unit of a module or a parameter by its path, that of the module around it included."""
        while path:
            if path in self.of_module:
                return self.of_module[path]
            path = path.rpartition(".")[0]
        return None


def units_of(model: nn.Module) -> Units:
    """The units of `model`, before or after it was split."""
    if isinstance(model, DeclaresParts) and (parts := list(model.parts())):
        named = [(part.name, part.modules) for part in parts]
        inner = range(1, len(named) - 1) if len(named) > 2 else range(len(named))
        return _units(named, blocks=tuple(inner), is_chain=True)
    blocks = blocks_of(model)
    return _units([(name, (name,)) for name in blocks], blocks=tuple(range(len(blocks))), is_chain=False)


def _units(named: Iterable[tuple[str, Iterable[str]]], *, blocks: tuple[int, ...], is_chain: bool) -> Units:
    named = list(named)
    of_module = {module: index for index, (_, modules) in enumerate(named) for module in modules}
    return Units(tuple(name for name, _ in named), of_module, blocks, is_chain)
