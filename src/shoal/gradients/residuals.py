"""What error feedback carries from step to step, as a section of the state.

Every rank has residuals of its own: what it has not sent of its gradients. `codec/residual/<source>/<name>` is that of
parameter `name`, in the shape of the unsplit model, on the rank that has place `source` among those that sum it, or
push it to servers. Ranks that divide a parameter each hold a part of the tensor.

Where ranks sum velocities or momenta, `codec/velocity/<source>/<name>` is that rank's, likewise.

What a codec has learned, such as the bases of PowerSGD, is `codec/state/...`, the same on all ranks that sum.

Only the sum over sources has a meaning, and it is kept when their number changes: of n ranks, rank r goes on with what
the sources r, r + n, r + 2n, ... had. A rank that carries its state from one generation of an elastic run to the next
keeps its own, whatever its new place: the source is then called `own`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.exchanges.coded import Coded
from shoal.comm.exchanges.coded_sum import CodedPushes
from shoal.comm.exchanges.exchange import Segment
from shoal.comm.exchanges.momentum import CodedMomentum
from shoal.errors import UsageError
from shoal.state import Held, Owned, Target, views

PREFIX = "codec/residual/"
VELOCITY = "codec/velocity/"
STATE = "codec/state/"
OWN = "own"
"""The source of what a rank keeps for itself, in memory; in a checkpoint sources are numbers."""
_BY_SOURCE = re.compile(f"^({PREFIX}|{VELOCITY})[^/]+/")
Carries = Coded | CodedPushes
"""What keeps a residual from step to step."""


def is_own(name: str) -> bool:
    """Whether the tensor `name` of a state is something that no other rank has a copy of: a residual or a velocity."""
    return _BY_SOURCE.match(name) is not None


def as_own(name: str) -> str:
    """The name under which a rank keeps the tensor `name` whatever its next place is."""
    return _BY_SOURCE.sub(rf"\g<1>{OWN}/", name)


class ResidualSection:
    """The residuals of `exchanges`, those of this rank that use the codec of this `kind`; `owned` are the parameters in
    them. `feedback`: ranks keep residuals, if not this one.
    """

    name = "codec"

    def __init__(self, kind: str, exchanges: Sequence[Carries], owned: Sequence[Owned], *, feedback: bool) -> None:
        self._kind, self._exchanges, self._feedback = kind, exchanges, feedback
        self._owned = {own.name: own for own in owned}

    def tensors(self) -> dict[str, Held]:
        """Of a group of one rank, which sends all, only what it has not sent yet, and what it knows of the momentum."""
        found: dict[str, list[Target]] = {}
        for exchange, segment in self._segments():
            carries = exchange.group.size > 1 or isinstance(exchange, CodedMomentum | CodedPushes) or exchange.arrived
            if carries and exchange.residual is not None:
                place = f"{exchange.group.rank}/{segment.name}"
                found.setdefault(PREFIX + place, []).extend(self._parts(exchange.residual, segment))
                if isinstance(exchange, CodedMomentum):
                    found.setdefault(VELOCITY + place, []).extend(self._parts(exchange.velocity, segment))
        return self._state() | found

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """The residuals of this rank's sources."""
        found = {name: held for name, held in self._state().items() if name in saved}
        exchanges = [exchange for exchange in self._exchanges if exchange.feedback]
        found |= self._arriving(PREFIX, saved, {exchange: exchange.arrival for exchange in exchanges})
        corrected = [exchange for exchange in exchanges if isinstance(exchange, CodedMomentum)]
        return found | self._arriving(VELOCITY, saved, {one: one.velocity_arrival for one in corrected})

    def _arriving(
        self, prefix: str, saved: Mapping[str, torch.dtype], arrival: Mapping[Any, Callable[[], Tensor]]
    ) -> dict[str, list[Target]]:
        """What is saved under `prefix` of this rank's sources, into what `arrival` makes for an exchange."""
        sources: dict[str, list[str]] = {}
        for key in saved:
            if key.startswith(prefix):
                source, _, name = key.removeprefix(prefix).partition("/")
                sources.setdefault(name, []).append(source)
        found: dict[str, list[Target]] = {}
        arrivals: dict[tuple[int, str], Tensor] = {}
        for exchange, segment in ((one, segment) for one in arrival for segment in one.segments):
            group = exchange.group
            for source in sources.get(segment.name, ()):
                if source == OWN or int(source) % group.size == group.rank:
                    place = (id(exchange), source)
                    if place not in arrivals:
                        arrivals[place] = arrival[exchange]()
                    key = f"{prefix}{source}/{segment.name}"
                    found.setdefault(key, []).extend(self._parts(arrivals[place], segment))
        return found

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """All: the others are those of other ranks' sources, or were learned by another codec."""
        return {name for name in saved if name.startswith((PREFIX, VELOCITY, STATE))}

    def facts(self) -> dict[str, Any]:
        """How many sums were made, from which the codec's random numbers follow."""
        if not self._exchanges:
            return {}
        rounds = max(exchange.rounds for exchange in self._exchanges)
        return {
            "kind": self._kind,
            "rounds": rounds,
            "updates": max(exchange.updates for exchange in self._exchanges),
            "residuals": any(key.startswith(PREFIX) for key in self.tensors()),
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Raises `UsageError` if the saved run has residuals and this one keeps none: they would be lost."""
        if facts["residuals"] and not self._feedback:
            raise UsageError(
                f'this run directory was trained with codec.kind = "{facts["kind"]}" and holds gradients that were not '
                f'sent yet, and codec.kind = "{self._kind}" as given keeps none: go on with a codec and codec.feedback '
                "= true, or give another run.directory (and run.warm_start to begin with these weights)"
            )
        for exchange in self._exchanges:
            exchange.rounds = int(facts["rounds"])
            exchange.updates = int(facts.get("updates", facts["rounds"]))

    def _state(self) -> dict[str, Held]:
        return {f"{STATE}{name}": held for exchange in self._exchanges for name, held in exchange.state.items()}

    def _segments(self) -> Iterator[tuple[Carries, Segment]]:
        """What lies in exchanges that keep residuals."""
        for exchange in self._exchanges:
            if exchange.feedback:
                for segment in exchange.segments:
                    yield exchange, segment

    def _parts(self, residual: Tensor | None, segment: Segment) -> list[Target]:
        assert residual is not None, "segments are those of exchanges that keep residuals"
        owned = self._owned[segment.name]
        regions = ((region.box, region.start) for region in owned.regions_of(segment.skipped, segment.numel))
        return views(residual[segment.slice], regions, global_shape=owned.holding.global_shape)
