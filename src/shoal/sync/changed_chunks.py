"""Which chunks of a row of numbers have changed: pushes and pulls leave the others out.

    push    chunks of the gradient that are not all zero
    pull    chunks of the parameters that differ from what the worker read before

A chunk is `CHUNK` elements; the last one may be shorter. Where the first element of every chunk has changed, all are
taken as changed without another look: that is the usual case, and costs one element in `CHUNK`.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 256
"""Elements: a bit in 2,048 of float64, and small beside a layer."""


def changed_chunks(now: Tensor, before: Tensor | None = None) -> Tensor | None:
    """Bool [chunks] for `now` [numel] beside `before` [numel] (None: zeros); None: all have changed.

    What is not a number has changed.
    """
    if not bool((now[::CHUNK] == (0 if before is None else before[::CHUNK])).any()):
        return None
    differs = now != (0 if before is None else before)
    whole = len(now) // CHUNK * CHUNK
    chunks = differs[:whole].view(-1, CHUNK).any(1)
    if whole < len(now):
        chunks = torch.cat([chunks, differs[whole:].any()[None]])
    return None if bool(chunks.all()) else chunks


def elements_of(chunks: Tensor, numel: int) -> Tensor:
    """Bool [numel]: the elements of `chunks`, bool [chunks]."""
    return chunks.repeat_interleave(CHUNK)[:numel]


def chunks_in(numel: int) -> int:
    """Chunks of a row of `numel`."""
    return -(-numel // CHUNK)
