"""What one rank holds of the tensors that are saved, as data.

A rank publishes its inventory, a list of items: the name, type and shape of each tensor of the unsplit model, and the
boxes of it that lie here. From the inventories of all ranks, each makes the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3

from shoal.checkpoint.grid import TensorSpec
from shoal.checkpoint.tensorfile import BY_NAME, dtype_name
from shoal.errors import UsageError
from shoal.state.target import Target
from shoal.topology.box import Box, Dims, intersection, whole


class Item(NamedTuple):
    """The boxes of one tensor that one rank holds. Without any it only says that other ranks hold the tensor."""

    name: str
    dtype: str
    shape: Dims
    boxes: tuple[Box, ...]

    @property
    def spec(self) -> TensorSpec:
        """The tensor as the grid sees it."""
        return TensorSpec(self.name, self.dtype, BY_NAME[self.dtype].itemsize, self.shape)


Inventory = Sequence[Item]

_INVENTORY = msgspec.msgpack.Decoder(list[Item])


def inventory_of(parts: Mapping[str, Sequence[Target]]) -> list[Item]:
    """What `parts` are parts of. Raises `UsageError` where they contradict themselves or cannot be saved."""
    return [_item(name, targets) for name, targets in parts.items()]


def encode(inventory: Inventory) -> bytes:
    """The inventory as the exchange carries it."""
    return msgspec.msgpack.encode(inventory)


def decode(value: bytes) -> list[Item]:
    """The inventory of another rank."""
    return _INVENTORY.decode(value)


def digest(encoded: bytes) -> str:
    """A name for an encoded inventory: equal for equal ones."""
    return blake3(encoded).hexdigest()


def _item(name: str, targets: Sequence[Target]) -> Item:
    if not targets:
        return Item(name, "", (), ())
    first = targets[0]
    item = Item(name, dtype_name(first.tensor, name), tuple(first.global_shape), tuple(t.box for t in targets))
    for target in targets[1:]:
        if target.tensor.dtype != first.tensor.dtype or tuple(target.global_shape) != item.shape:
            raise UsageError(
                f"the parts of {name} on one rank are of {item.dtype} {list(item.shape)} and of "
                f"{dtype_name(target.tensor, name)} {list(target.global_shape)}: they must be parts of one tensor"
            )
    _require_sound(item)
    return item


def _require_sound(item: Item) -> None:
    everything = whole(item.shape)
    for number, box in enumerate(item.boxes):
        fits = len(box.offset) == len(box.shape) == len(item.shape)
        if not fits or (box.numel and intersection(box, everything) != box):
            raise UsageError(f"{item.name} has the shape {list(item.shape)}, and a rank holds {said(box)} of it")
        twice = next((other for other in item.boxes[:number] if intersection(box, other)), None)
        if twice is not None:
            raise UsageError(f"one rank holds a part of {item.name} twice, in {said(twice)} and in {said(box)}")


def said(box: Box) -> str:
    """The box as people write a slice: `[0:4, 2:3]`."""
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(box.offset, box.shape, strict=True))}]"
