"""A share of gossip as one message: its number and weight, then the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.sync.push_sum import Share

HEAD = 2
"""float64 numbers before the tensors of a message: the share's number, and its weight."""


def message_bytes(like: Sequence[Tensor]) -> int:
    """Of a message with tensors as those in `like`."""
    return HEAD * 8 + sum(x.nbytes for x in like)


def pack(share: Share, device: torch.device) -> Tensor:
    """One message, uint8: number and weight, then the tensors, the largest element size first."""
    head = torch.tensor([float(share.number), share.weight], dtype=torch.float64, device=device)
    parts = sorted(share.x, key=lambda x: -x.element_size())
    return torch.cat([part.view(torch.uint8) for part in (head, *parts)])


def unpack(message: Tensor, source: int, like: Sequence[Tensor]) -> Share:
    """The share that `pack` made `message` of, with tensors as those in `like`: views of it."""
    number, weight = message[: HEAD * 8].view(torch.float64).tolist()
    x, at = list(like), HEAD * 8
    for index in sorted(range(len(like)), key=lambda index: -like[index].element_size()):
        x[index] = message[at : at + like[index].nbytes].view(like[index].dtype)
        at += like[index].nbytes
    return Share(source, int(number), x, weight)
