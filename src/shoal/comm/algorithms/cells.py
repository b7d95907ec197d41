"""`Cells`: the numbered cells of a table as slices of flat tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Reduction

_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Cells:
    """`flats` are one-dimensional and equally long; each has `chunks` cells, as equal as its length allows."""

    def __init__(self, flats: Sequence[Tensor], chunks: int, op: Reduction = "sum") -> None:
        self._flats, self._chunks, self._combine = flats, chunks, _COMBINE[op]
        short, longer = divmod(flats[0].numel(), chunks)
        self._bounds = [chunk * short + min(chunk, longer) for chunk in range(chunks + 1)]

    def span(self, cells: Sequence[int]) -> Tensor | None:
        """A view of these cells, where they lie one after the other."""
        flat, first = divmod(cells[0], self._chunks)
        last = first + len(cells) - 1
        if last >= self._chunks or any(cell != cells[0] + i for i, cell in enumerate(cells)):
            return None
        return self._flats[flat][self._bounds[first] : self._bounds[last + 1]]

    def read(self, cells: Sequence[int]) -> Tensor:
        """Their content: a view where they lie one after the other, else a copy."""
        view = self.span(cells)
        return torch.cat([self.view(cell) for cell in cells]) if view is None else view

    def view(self, cell: int) -> Tensor:
        """One cell."""
        flat, chunk = divmod(cell, self._chunks)
        return self._flats[flat][self._bounds[chunk] : self._bounds[chunk + 1]]

    def empty(self, cells: Sequence[int]) -> Tensor:
        """Room for the content of these cells."""
        sizes = (self._bounds[cell % self._chunks + 1] - self._bounds[cell % self._chunks] for cell in cells)
        return self._flats[0].new_empty(sum(sizes))

    def write(self, cells: Sequence[int], content: Tensor) -> None:
        """Replaces them."""
        for target, part in self._parts(cells, content):
            target.copy_(part)

    def add(self, cells: Sequence[int], content: Tensor, *, first: bool) -> None:
        """Reduces `content` into them; `first` says that it is the first operand, for results that depend on it."""
        for target, part in self._parts(cells, content):
            self._combine(*((part, target) if first else (target, part)), out=target)

    def _parts(self, cells: Sequence[int], content: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views to write, with what goes there."""
        whole = self.span(cells)
        if whole is not None:
            return [(whole, content)]
        targets = [self.view(cell) for cell in cells]
        return list(zip(targets, content.split([target.numel() for target in targets]), strict=True))
