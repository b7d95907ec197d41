"""Recorded routes: which experts each token went to, by (layer, sample, place in the sample).

Two layouts sum in different orders, so scores that are equal but for rounding may be ranked differently, and then the
outputs differ by more than rounding. A comparison therefore records the choices of one run and replays them in the
other; where the other would have chosen otherwise by more than a near-tie, that is a difference of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

UNKNOWN = -1


class RouteTap(Protocol):
    """What stands between a router's choice and its use."""

    def __call__(self, layer: str, *, samples: Tensor, places: Tensor, preferences: Tensor, chosen: Tensor) -> Tensor:
        """The experts to use, `[batch, seq, top_k]` as `chosen`; `samples` `[batch]`, `places` `[batch, seq]`."""
        ...


class TakesRoutes(nn.Module):
    """The base of a module whose choices may be recorded and replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.tap: RouteTap | None = None


@dataclass(eq=False)
class Routes:
    """A record: `tables[layer][sample]` is int64 `[places, top_k]`, `UNKNOWN` at places that nobody recorded."""

    tables: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def record(self, layer: str, *, samples: Tensor, places: Tensor, chosen: Tensor) -> None:
        """Writes down `chosen` `[batch, seq, top_k]`; a negative sample is filler."""
        table = self.tables.setdefault(layer, {})
        for sample, at, experts in zip(samples.tolist(), places.cpu(), chosen.cpu(), strict=True):
            if sample < 0:
                continue
            longest = max(int(at.max()) + 1 if at.numel() else 0, len(table.get(sample, ())))
            rows = torch.full((longest, experts.shape[-1]), UNKNOWN)
            if sample in table:
                rows[: len(table[sample])] = table[sample]
            rows[at] = experts
            table[sample] = rows

    def find(self, layer: str, *, samples: Tensor, places: Tensor) -> Tensor:
        """What was written, `[batch, seq, top_k]`. Raises `KeyError` for a layer, sample or place that was not."""
        rows = []
        for sample, at in zip(samples.tolist(), places.cpu(), strict=True):
            table = self.tables.get(layer, {}).get(sample)
            if table is None or (at.numel() and int(at.max()) >= len(table)) or bool((table[at] == UNKNOWN).any()):
                raise KeyError(f"no routes of sample {sample} in {layer} were recorded for all of these places")
            rows.append(table[at])
        return torch.stack(rows).to(places.device) if rows else places.new_zeros(0, 1, 1)

    def merge(self, other: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Adds the tables of another record, such as another rank's; what it knows wins."""
        for layer, table in other.items():
            for sample, rows in table.items():
                known = (rows != UNKNOWN).all(-1).nonzero()[:, 0]
                self.record(layer, samples=torch.tensor([sample]), places=known[None], chosen=rows[known][None])


@dataclass(eq=False)
class RecordRoutes:
    """A tap that writes down what is chosen, and leaves it."""

    routes: Routes

    def __call__(self, layer: str, *, samples: Tensor, places: Tensor, preferences: Tensor, chosen: Tensor) -> Tensor:
        self.routes.record(layer, samples=samples, places=places, chosen=chosen)
        return chosen


class RouteDifference(NamedTuple):
    """A token that would have gone elsewhere; `gap`: by how much its own last choice was preferred to the record's."""

    layer: str
    sample: int
    place: int
    gap: float


@dataclass(eq=False)
class ReplayRoutes:
    """A tap that uses the record. `differences` lists the tokens whose own choice differs by more than `margin`.

    `replayed` counts those whose own choice was another at all.
    """

    routes: Routes
    margin: float
    differences: list[RouteDifference] = field(default_factory=list)
    replayed: int = 0

    def __call__(self, layer: str, *, samples: Tensor, places: Tensor, preferences: Tensor, chosen: Tensor) -> Tensor:
        recorded, known = chosen.clone(), samples >= 0  # filler goes where it likes
        recorded[known] = self.routes.find(layer, samples=samples[known], places=places[known])
        other = (recorded.sort(-1).values != chosen.sort(-1).values).any(-1)
        self.replayed += int(other.sum())
        gaps = preferences.gather(-1, chosen).amin(-1) - preferences.gather(-1, recorded).amin(-1)
        for row, column in (other & ~(gaps <= self.margin)).nonzero().tolist():
            place, gap = int(places[row, column]), float(gaps[row, column])
            self.differences.append(RouteDifference(layer, int(samples[row]), place, gap))
        return recorded


def set_routes(model: nn.Module, tap: RouteTap | None) -> None:
    """Puts `tap` between choice and use in every mixture of `model`; None takes it away.

    Samples are told apart by `Auxiliary.samples`, which must then be given.
    """
    for module in model.modules():
        if isinstance(module, TakesRoutes):
            module.tap = tap
