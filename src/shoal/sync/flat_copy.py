"""`FlatCopy`: a copy of what a rank's optimizer updates, one flat buffer for each dtype.

Strategies keep such copies (where a round began, an outer momentum, a replica's own parameters beside the model that is
shown) and compute with whole buffers. In a checkpoint each tensor of a copy stands under the name and box of the
unsplit model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import Segment
from shoal.state import Held, Owned, views


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


# The parameters of each replica in a checkpoint, for strategies under which replicas never become equal.
#
# `model/...` is the one model that such a strategy shows to evaluations and saves: the replicas' average, or a centre.
# `sync/replica-<number>/x/<parameter>` is what replica `number` itself goes on with, `sync/replica-<number>/<scalar>`
# are its numbers. As many replicas as saved go on from their own; any other number begins at the model.


SYNC = "sync/"
MOMENTUM = f"{SYNC}momentum/"
_NAME = re.compile(rf"{SYNC}replica-(\d+)/")


class OwnSection:
    """The section of one replica's own `x`, and of float64 `scalars` of it; `shared` are outer momenta, equal on all.

    `loaded` says whether a checkpoint was read into them.
    """

    name = "sync"

    def __init__(
        self,
        replicas: Collective,
        x: FlatCopy,
        *,
        scalars: Mapping[str, Tensor] | None = None,
        shared: Sequence[FlatCopy] = (),
    ) -> None:
        self._replicas, self._x, self.loaded = replicas, x, False
        self._scalars, self._shared = dict(scalars or {}), shared

    def tensors(self) -> dict[str, Held]:
        """This replica's own, and what is shared."""
        prefix = f"{SYNC}replica-{self._replicas.rank}/"
        own = self._x.held(f"{prefix}x/") | {f"{prefix}{name}": scalar for name, scalar in self._scalars.items()}
        return own | self._shared_tensors()

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """What this replica had, if there were as many replicas; what is shared in any case."""
        self.loaded = replicas_in(saved) == self._replicas.size
        held = self.tensors() if self.loaded else self._shared_tensors()
        return {name: targets for name, targets in held.items() if name in saved}

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Every rank has its own; another strategy may have saved more."""
        return {name for name in saved if name.startswith(SYNC)}

    def facts(self) -> dict[str, Any]:
        return {}

    def load(self, facts: Mapping[str, Any]) -> None:
        """There are no facts."""

    def _shared_tensors(self) -> dict[str, Held]:
        return {name: held for copy in self._shared for name, held in copy.held(MOMENTUM).items()}


def replicas_in(saved: Iterable[str]) -> int:
    """How many replicas have saved parameters of their own; 0 if none."""
    numbers: Sequence[int] = [int(found[1]) for name in saved if (found := _NAME.match(name))]
    return max(numbers, default=-1) + 1
