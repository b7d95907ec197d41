"""`Collective` of one rank: every result is the rank's own contribution, at once and without a wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.collective import Handle, Reduction, ordinary
from shoal.errors import CollectiveError


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


class Alone:
    """The group of an axis of size 1."""

    rank = 0
    size = 1
    wire = "one rank alone"

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return ordinary(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> Handle:
        return _Done()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        return _copied(output, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        return _copied(output, input)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
    ) -> Handle:
        return _copied(output, input)

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0) -> Handle:
        return _Done()

    def reduce(self, tensor: torch.Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        return _Done()

    def gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, *, root: int = 0) -> Handle:
        return _copied(outputs[0], input)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int = 0) -> Handle:
        return _copied(output, inputs[0])

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        raise CollectiveError(f"a group of one rank was asked to send to rank {to}: it has no other")

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        raise CollectiveError(
            f"a group of one rank was asked to receive from rank {source}: there is nobody else in it"
        )

    def barrier(self) -> Handle:
        return _Done()


def _copied(output: torch.Tensor, input: torch.Tensor) -> Handle:
    output.copy_(input.view_as(output))
    return _Done()
