"""The all-reduces of a program's step: written down once, and made again with nothing between them.

What tensor parallelism asks of the wire may be too little to be seen in a step's time; it can be seen alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_FUNCTIONAL = torch.ops._c10d_functional
_ALL_REDUCES = (_FUNCTIONAL.all_reduce, _FUNCTIONAL.all_reduce_)


class AllReduces(TorchDispatchMode):
    """While it is entered, `numels` gathers the elements of every functional all-reduce, of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again, as what it does to local tensors
        if func._overloadpacket in _ALL_REDUCES:
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def all_reduces(step: Callable[[], Any]) -> list[int]:
    """Elements of each that `step` makes, in order."""
    with AllReduces() as found:
        step()
    return found.numels


def again(numels: Sequence[int], group: dist.ProcessGroup) -> Callable[[], None]:
    """Makes them, of zeros, one after the other."""
    tensors = [torch.zeros(numel) for numel in numels]

    def calls() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)

    return calls
