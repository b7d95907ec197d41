"""What context ranks send each other: a shift round the ring, and the document numbers of all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle


@dataclass(frozen=True)
class Shift:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    leaving: Tensor  # kept until it has left
    arriving: Tensor
    handles: tuple[Handle, Handle]

    def wait(self) -> Tensor:
        """What has arrived."""
        for handle in self.handles:
            handle.wait()
        return self.arriving


def shift(group: Collective, tensor: Tensor, *, tag: int) -> Shift:
    """Begins to send `tensor`, contiguous and not to be written until `wait`, to the next rank of the ring.

    Even ranks call send first and odd ranks receive first: a backend that runs the calls of a pair in their order, as
    NCCL does, would stand still if both began with the same.
    """
    arriving = torch.empty_like(tensor)
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.rank % 2 == 0:
        sent = group.send(tensor, to=to, tag=tag)
        return Shift(tensor, arriving, (sent, group.recv(arriving, source=source, tag=tag)))
    received = group.recv(arriving, source=source, tag=tag)
    return Shift(tensor, arriving, (received, group.send(tensor, to=to, tag=tag)))


def gathered(group: Collective, tensor: Tensor) -> Tensor:
    """`[size, ...]`: every rank's `tensor`."""
    tensor = tensor.contiguous()
    output = torch.empty((group.size * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    group.all_gather(output, tensor).wait()
    return output.unflatten(0, (group.size, -1))
