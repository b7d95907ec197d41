"""What sequence parallelism adds to a split model: outside its regions every rank has a slice of each sequence.

Norms, dropout and the residual sum cost nothing twice, and their activations take 1 / size of the memory
(arXiv:2205.05198). Attention and feed-forward see the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.models.dropout import KeyedDropout
from shoal.parallel.tensor.operators import slice_of


def change_input(region: nn.Module, crossing: Callable[[Tensor], Tensor]) -> None:
    """The first input of `region` is crossed, such as to the whole sequence, for all that the module does with it."""

    def cross_first(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if args:
            return (crossing(args[0]), *args[1:]), named
        first = next(iter(named))
        return args, {**named, first: crossing(named[first])}

    region.register_forward_pre_hook(cross_first, with_kwargs=True)


def change_output(region: nn.Module, crossing: Callable[[Tensor], Tensor]) -> None:
    """What `region` gives is crossed on its way back to the stream."""

    def cross(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return crossing(output)

    region.register_forward_hook(cross)


def slice_positions(model: nn.Module, group: Collective, *, inside: Iterable[nn.Module]) -> None:
    """Keyed dropout outside of the regions `inside` drops what it would drop in this rank's slice of whole samples."""
    whole = {id(module) for region in inside for module in region.modules()}

    def add_positions(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        x = args[0] if args else named["x"]
        given = args[1] if len(args) > 1 else named.get("positions")
        return (x, _own_positions(x, given, group)), {}

    for module in model.modules():
        if isinstance(module, KeyedDropout) and id(module) not in whole:
            module.register_forward_pre_hook(add_positions, with_kwargs=True)


def _own_positions(x: Tensor, given: Tensor | None, group: Collective) -> Tensor:
    """The places in their samples of the slice `x` `[batch, seq / size, ...]`, from those of the whole sequences."""
    if given is None:
        first = group.rank * x.shape[1]
        return torch.arange(first, first + x.shape[1], device=x.device)[None]
    return slice_of(given, group)
