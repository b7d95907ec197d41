"""Saved activations in the host's memory until the backward needs them (as in vDNN, arXiv:1602.08124)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay: they cost more to move than they free."""


@dataclass(frozen=True)
class _Moved:
    """A tensor's numbers on the host, and where they came from."""

    copy: Tensor
    device: torch.device


@contextmanager
def offloaded(*, staying: Iterable[Tensor] = (), smallest_bytes: int = SMALLEST_BYTES) -> Iterator[None]:
    """Moves what autograd saves of a forward run inside to the host, and back in its backward.

    The storages of `staying`, such as the parameters, are not moved, and neither are tensors under `smallest_bytes`.
    On a CPU it changes nothing but the time. Inside a recomputed block nothing is saved, so only its inputs move.
    """
    kept = {tensor.untyped_storage().data_ptr() for tensor in staying}
    with saved_tensors_hooks(lambda tensor: _moved(tensor, kept, smallest_bytes=smallest_bytes), _back):
        yield


def _moved(tensor: Tensor, kept: Collection[int], *, smallest_bytes: int) -> Tensor | _Moved:
    if tensor.nbytes < smallest_bytes or tensor.untyped_storage().data_ptr() in kept:
        return tensor.detach()  # an operator's own result would keep the operator alive, and so itself
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return _Moved(copy.copy_(tensor, non_blocking=False), tensor.device)


def _back(held: Tensor | _Moved) -> Tensor:
    return held if isinstance(held, Tensor) else held.copy.to(held.device, non_blocking=True)
