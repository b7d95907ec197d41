"""What an optimizer keeps for masked weights is zero, and need not be held (`sparsity.packed_state`).

Between two updates the numbers of trained weights alone are kept. A part of the state at a time is brought into the
shape of its parameters, which the optimizer's own kernel then updates.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.state import UpdatePart


@dataclass(frozen=True)
class KeptNumbers:
    """Stands in an optimizer's state for a slot that is zero but where the mask `kept`, of its shape, is set: its other
    numbers are the flat `values`.
    """

    values: Tensor
    kept: Tensor

    def read(self, places: Tensor | None = None) -> Tensor:
        """The slot. `places`: those of its numbers, where they are known."""
        slot = torch.zeros(self.kept.shape, dtype=self.values.dtype, device=self.values.device)
        slot.view(-1).index_copy_(0, places_of(self.kept) if places is None else places, self.values)
        return slot


def places_of(kept: Tensor) -> Tensor:
    """Where a mask is set, int64, counted row by row."""
    return kept.flatten().nonzero().squeeze(1)


class PackedState:
    """Where the state of an optimizer lives between updates: the numbers of trained weights alone.

    A part of it at a time is brought into the shape of its parameters, which the optimizer's own kernel then updates,
    so that weights are the same to the last bit. `masks` say what of a parameter is trained. Where the numbers of a
    part belong is found anew in every step: to keep the places would take as much as they do.
    """

    part_bytes = 4 << 20

    def __init__(self) -> None:
        self.masks: dict[Parameter, Tensor] = {}

    def to_read(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """A checkpoint is read into whole slots, where they are."""

    def stream(self, parts: Sequence[UpdatePart], state: MutableMapping[Parameter, dict[str, Any]]) -> None:
        """Runs all updates in order, each with its state in the shape of its parameters."""
        for part in parts:
            places = {p: places_of(self.masks[p]) for p in part.parameters if p in self.masks}
            for parameter, own in places.items():
                slots = state.get(parameter, {})
                slots.update({name: slot.read(own) for name, slot in slots.items() if isinstance(slot, KeptNumbers)})
            part.update()
            for parameter, own in places.items():
                self.pack(parameter, state[parameter], own)

    def put_away(self, state: MutableMapping[Parameter, dict[str, Any]]) -> None:
        """After a checkpoint was read into it. Masks are put on when the first step begins, and it is packed then."""

    def pack(self, parameter: Parameter, slots: dict[str, Any], places: Tensor | None = None) -> None:
        """Leaves the numbers that are trained alone of `slots`, which are those of `parameter`. `places`: see above."""
        kept = self.masks[parameter]
        places = places_of(kept) if places is None else places
        for name, slot in slots.items():
            if isinstance(slot, Tensor) and slot.shape == parameter.shape:
                slots[name] = KeptNumbers(slot.flatten().index_select(0, places), kept)
