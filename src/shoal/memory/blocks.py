"""Which modules of a model are its blocks: what `recompute` computes again one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from shoal.errors import UserCodeError


@runtime_checkable
class DeclaresBlocks(Protocol):
    """A module that says which of its submodules are blocks, where they are not the children of a `ModuleList`."""

    def recompute_blocks(self) -> Sequence[str]:
        """The names of submodules, none inside another, in the order in which they run."""
        ...


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by name: those that the model declares, else the children of its outermost `nn.ModuleList`s."""
    if isinstance(model, DeclaresBlocks):
        return {name: model.get_submodule(name) for name in model.recompute_blocks()}
    return dict(_children_of_lists(model, ""))


def chosen_blocks(model: nn.Module, layers: Collection[int] | None) -> dict[str, nn.Module]:
    """The blocks numbered `layers`, from 0 in the model's order; None: all.

    Raises `UserCodeError` where the model has no blocks, or not that many.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserCodeError(
            f"{type(model).__name__} has no blocks to recompute: hold them in an nn.ModuleList, name them in "
            f"recompute_blocks(), or set memory.recompute = 'none'"
        )
    beyond = [layer for layer in layers or () if not 0 <= layer < len(blocks)]
    if beyond:
        raise UserCodeError(
            f"layer {beyond[0]} cannot be recomputed: {type(model).__name__} has {len(blocks)} blocks, numbered from 0 "
            f"to {len(blocks) - 1}; correct memory.recompute_layers"
        )
    return {name: block for i, (name, block) in enumerate(blocks.items()) if layers is None or i in layers}


def _children_of_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            yield from ((f"{path}.{index}", block) for index, block in child.named_children())
        else:
            yield from _children_of_lists(child, f"{path}.")
