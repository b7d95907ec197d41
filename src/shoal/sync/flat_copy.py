"""`FlatCopy`: a copy of what a rank's optimizer updates, one flat buffer for each dtype.

Strategies keep such copies (where a round began, an outer momentum, a replica's own parameters beside the model that is
shown) and compute with whole buffers. In a checkpoint each tensor of a copy stands under the name and box of the
unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.exchanges.exchange import Segment
from shoal.state.ownership import Owned
from shoal.state.target import Held, views


class FlatCopy:
    """Zeros in the shapes of `owned`. `buffers` `[numel]` are one for each dtype, `segments` what lies in each."""

    def __init__(self, owned: Sequence[Owned]) -> None:
        self.owned = owned
        self._of_buffer: list[list[Owned]] = []
        for dtype in dict.fromkeys(one.parameter.dtype for one in owned):
            self._of_buffer.append([one for one in owned if one.parameter.dtype == dtype])
        self.buffers = [
            torch.zeros(sum(one.parameter.numel() for one in group), dtype=first.dtype, device=first.device)
            for group in self._of_buffer
            for first in [group[0].parameter]
        ]

    @property
    def segments(self) -> list[list[Segment]]:
        """For each buffer, where the tensors lie in it."""
        return [
            [Segment(one.name, start, tuple(one.parameter.shape)) for one, start in _starts(group)]
            for group in self._of_buffer
        ]

    def read(self) -> None:
        """Becomes the parameters."""
        for one, part in self._parts():
            part.copy_(one.parameter.detach())

    @torch.no_grad()
    def write(self, values: Sequence[Tensor] | None = None) -> None:
        """The parameters become what is here, or `values`, which lie as `buffers` do."""
        for one, part in self._parts(values):
            one.parameter.copy_(part)

    def held(self, prefix: str) -> dict[str, Held]:
        """For a checkpoint: `<prefix><parameter>`."""
        found: dict[str, list[Any]] = {}
        for one, part in self._parts():
            regions = ((region.box, region.start) for region in one.regions)
            targets = views(part, regions, global_shape=one.holding.global_shape)
            found.setdefault(f"{prefix}{one.name}", []).extend(targets)
        return dict(found)

    def _parts(self, values: Sequence[Tensor] | None = None) -> Iterator[tuple[Owned, Tensor]]:
        """Each owned tensor and its part of a buffer, in its shape."""
        for group, buffer in zip(self._of_buffer, values or self.buffers, strict=True):
            for one, start in _starts(group):
                yield one, buffer[start : start + one.parameter.numel()].view(one.parameter.shape)


def _starts(group: Sequence[Owned]) -> Iterator[tuple[Owned, int]]:
    start = 0
    for one in group:
        yield one, start
        start += one.parameter.numel()
