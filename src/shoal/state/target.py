"""`Target`: a part of a tensor of the unsplit model that one rank holds; what is saved from it and loaded into it.

A rank names the tensors of the unsplit model and says of each what it holds: a plain tensor is the whole, a sequence of
targets are the boxes of it that lie here, an empty sequence means that another rank has it. If the boxes are runs of
one flat buffer, as ZeRO divides them, `views` makes them targets without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.topology.box import Box, Dims


class Target(NamedTuple):
    """A part of a tensor: `tensor` begins at `offset` of the tensor whose shape is `global_shape`."""

    tensor: Tensor
    global_shape: Dims
    offset: Dims

    @property
    def box(self) -> Box:
        """Which part it is."""
        return Box(tuple(self.offset), tuple(self.tensor.shape))


Held = Tensor | Target | Sequence[Target]
"""What a rank has of one tensor: all of it, or boxes of it."""


def targets_of(held: Held) -> tuple[Target, ...]:
    """`held` as targets; none for an empty sequence, which says that other ranks have the tensor."""
    if isinstance(held, Tensor):
        return (Target(held, tuple(held.shape), (0,) * held.dim()),)
    return (held,) if isinstance(held, Target) else tuple(held)


def parts_of(tensors: Mapping[str, Held]) -> dict[str, tuple[Target, ...]]:
    """Every name of `tensors`, and the parts of it that are here."""
    return {name: targets_of(held) for name, held in tensors.items()}


def views(tensor: Tensor, regions: Iterable[tuple[Box, int]], *, global_shape: Dims) -> list[Target]:
    """The boxes of an unsplit tensor of `global_shape` that lie in the contiguous `tensor`.

    A region is a box, and the place among the elements of `tensor` from where on it lies there, row-major.
    """
    flat = tensor.detach().view(-1)
    return [
        Target(flat[start : start + box.numel].view(box.shape), tuple(global_shape), box.offset)
        for box, start in regions
        if box.numel
    ]
