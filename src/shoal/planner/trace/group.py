"""The ranks of a group that a trace pretends to: whatever they are told is written down, and nothing travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Handle, Reduction, ordinary

Told = Callable[[str, int], None]
"""Gets the kind of a collective, and the bytes of the whole tensor."""


class _Done:
    def wait(self) -> None:
        """Nothing was under way."""


def _nobody(kind: str, size: int) -> None:
    """Hears of collectives outside of a trace."""


@dataclass
class TracedGroup:
    """`Collective` of rank 0 among `size`, for tensors without storage. `told` hears of every collective."""

    size: int
    rank: int = 0
    told: Told = _nobody
    wire: str = "no wire: ranks are traced"

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return ordinary(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Handle:
        return self._tell("all_reduce", tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Handle:
        return self._tell("all_gather", input)

    def all_gather(self, output: Tensor, input: Tensor) -> Handle:
        return self._tell("all_gather", output)

    def all_to_all(
        self, output: Tensor, input: Tensor, *, output_sizes: Sequence[int] = (), input_sizes: Sequence[int] = ()
    ) -> Handle:
        return self._tell("all_to_all", input)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> Handle:
        return self._tell("broadcast", tensor)

    def reduce(self, tensor: Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        return self._tell("all_reduce", tensor)

    def gather(self, outputs: Sequence[Tensor], input: Tensor, *, root: int = 0) -> Handle:
        return self._tell("gather", input)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], *, root: int = 0) -> Handle:
        return self._tell("scatter", output)

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Handle:
        return self._tell("send", tensor)

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Handle:
        return _Done()

    def barrier(self) -> Handle:
        return _Done()

    def _tell(self, kind: str, tensor: Any) -> Handle:
        self.told(kind, tensor.numel() * tensor.element_size())
        return _Done()
