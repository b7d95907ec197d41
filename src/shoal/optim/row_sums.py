"""Sums over the rows of whole parameters, of which ranks have parts: one all-reduce for all rows of all parameters.

A row is what its first index leaves free: the weights of one output. A vector or a number is one row. A part may begin
and end within a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from shoal.optim.declared import Dims
from shoal.optim.parts import Parts, exchanged
from shoal.state.ownership import Owned, Region, is_counted


class RowSums:
    """Sums for the parameters of `parts.owned`, in its order. All ranks of the replica make it and call it together."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        own = {o.name: rows_of(o.holding.global_shape) for o in parts.owned}
        every = {name: rows for one in exchanged(own, parts.replica, parts.device) for name, rows in one.items()}
        self._starts: dict[str, int] = {}
        self._length = 0
        for name in sorted(every):
            self._starts[name] = self._length
            self._length += every[name]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`tensors` have this rank's part of each; the sums of the rows of the whole ones, float64 `[rows]`."""
        table = torch.zeros(self._length, dtype=torch.float64, device=self._parts.device)
        for own, tensor in zip(self._parts.owned, tensors, strict=True):
            start = self._starts[own.name]
            for (first, last), part in row_parts(own, tensor) if is_counted(own) else ():
                table[start + first : start + last] += part.double().sum(1)
        self._parts.replica.all_reduce(table).wait()
        found = []
        for own in self._parts.owned:
            start = self._starts[own.name]
            found.append(table[start : start + rows_of(own.holding.global_shape)])
        return found


def rows_of(shape: Dims) -> int:
    """Rows of a parameter of this shape."""
    return shape[0] if len(shape) > 1 else 1


def row_length(shape: Dims) -> int:
    """Numbers in each of them."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)


def row_parts(own: Owned, tensor: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """What of which rows lies in `tensor`, which has the numbers of `own`: ((first, last), view `[rows, n]`)."""
    flat = tensor.view(-1)
    for region in own.regions:
        rows = _rows(region, own.holding.global_shape)
        part = flat[region.start : region.start + region.box.numel]
        yield rows, part.view(rows[1] - rows[0], -1)


def _rows(region: Region, shape: Dims) -> tuple[int, int]:
    if len(shape) < 2:
        return (0, 1)
    return region.box.offset[0], region.box.offset[0] + region.box.shape[0]
