"""State that is saved: what a rank owns of the model, sections of a checkpoint, and the tensors that are read into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.topology.holding import Box, Dims, Holding, Ranks, boxes_of_run


def works_in_streams(device: torch.device) -> bool:
    """Whether `device` does its work behind the caller's back, in streams, and copies at full speed to and from pinned
    memory: GPUs of CUDA, ROCm and XPU. Not so CPUs and MPS, whose memory is the host's.
    """
    return device.type not in ("cpu", "meta", "mps")


def numbers_on(device: torch.device, numbers: Sequence[float], *, dtype: torch.dtype = torch.float64) -> Tensor:
    """`numbers` as a tensor on `device`. `torch.tensor` would wait there for all that was launched before."""
    if not works_in_streams(device):
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def wait_for(event: torch.Event) -> None:
    """Returns when the device has come to `event`. A rank that waits for others on a GPU stands here, where the watch
    on hangs looks for it: a collective there is waited for by the device, not by a thread.
    """
    event.synchronize()


@cache
def side_stream(device: torch.device) -> torch.Stream | None:
    """A stream for small sums that the host waits for: they are not behind the forward that was launched before. None
    where a device has no streams.
    """
    return torch.Stream(device) if works_in_streams(device) else None


# What a rank trains, and what of it is its own to update and to save.
#
# The ranks' holdings say what each trains (`Trained`); how gradients are reduced decides which tensors the optimizer
# runs on (`Owned`). If optimizer state is sharded these are pieces of parameters: a whole parameter in its own shape,
# or a one-dimensional run of its elements. Their `regions` say which boxes of the unsplit parameter they are, so that
# every slot of the optimizer can be saved and resharded.


@dataclass(frozen=True)
class Trained:
    """A parameter of this rank, and where it stands in the unsplit model: its numbers are those of `holding.boxes`.

    `master` has these numbers in float32, where the model computes with fewer bits of them; ranks then sum its gradient
    in `reduce_dtype`.
    """

    holding: Holding
    parameter: Parameter
    master: Tensor | None = None
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Region:
    """A part of an owned tensor: the elements from `start` on, row by row, are `box` of the unsplit parameter."""

    box: Box
    start: int


@dataclass(frozen=True)
class Owned:
    """A tensor that this rank's optimizer updates; its `.grad` is the agreed gradient after `Gradients.reduce`.

    `is_piece`: it is this rank's share of what several hold; else it stands in the model, there as here.
    """

    name: str
    parameter: Parameter
    holding: Holding
    regions: tuple[Region, ...]
    is_piece: bool = False

    @property
    def gradient(self) -> Tensor:
        """Its agreed gradient, dense; zeros where it has none."""
        gradient = self.parameter.grad
        gradient = torch.zeros_like(self.parameter) if gradient is None else gradient
        return gradient.to_dense() if gradient.is_sparse else gradient

    def boxes(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the unsplit parameter that it holds, and the numbers of each in `tensor`, of its shape: views
        where that is contiguous.
        """
        flat = tensor.flatten()
        for region in self.regions:
            yield region.box, flat[region.start : region.start + region.box.numel].view(region.box.shape)

    def regions_of(self, start: int, numel: int) -> list[Region]:
        """What lies in its elements from `start` on, counted from there."""
        return list(regions_of_run(self.regions, start, start + numel))


class UpdatePart(NamedTuple):
    """Parameters that are updated together, their gradients, and the kernel that updates such."""

    parameters: list[Parameter]
    gradients: list[Tensor]
    kernel: Callable[[list[Parameter], list[Tensor]], None]

    def update(self) -> None:
        """Updates them, with the options that their group had when the step was taken."""
        self.kernel(self.parameters, self.gradients)

    def of(self, parameters: list[Parameter], gradients: list[Tensor]) -> UpdatePart:
        """The same update of copies of the parameters."""
        return UpdatePart(parameters, gradients, self.kernel)


def regions_of(holding: Holding) -> tuple[Region, ...]:
    """The boxes of a holding, one after the other."""
    regions, at = [], 0
    for box in holding.boxes:
        regions.append(Region(box, at))
        at += box.numel
    return tuple(regions)


def boxes_in(holding: Holding, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a holding, and the numbers of each in `tensor`, which is the rank's parameter: views of it."""
    if len(holding.boxes) == 1:
        yield holding.box, tensor
        return
    flat = tensor.view(-1)
    for region in regions_of(holding):
        yield region.box, flat[region.start : region.start + region.box.numel].view(region.box.shape)


def owned_whole(trained: Trained, piece: Parameter | None = None) -> Owned:
    """All that this rank holds of a parameter, as it stands in the model or in `piece`, which has its shape."""
    holding = trained.holding
    own = trained.parameter if piece is None else piece
    return Owned(holding.name, own, holding, regions_of(holding), is_piece=piece is not None)


def owned_run(holding: Holding, piece: Parameter, start: int, stop: int) -> Owned:
    """The elements `start` .. `stop` of what this rank holds of a parameter; `piece` is one-dimensional."""
    return Owned(holding.name, piece, holding, tuple(regions_of_run(regions_of(holding), start, stop)), is_piece=True)


def regions_of_run(regions: Iterable[Region], start: int, stop: int) -> Iterator[Region]:
    """What lies in the elements `start` .. `stop` of a tensor with these `regions`, counted from `start`."""
    for region in regions:
        first, last = max(start, region.start), min(stop, region.start + region.box.numel)
        at = first - start
        for box in boxes_of_run(region.box.shape, first - region.start, last - region.start):
            yield Region(box.within(region.box.offset), at)
            at += box.numel


def same_piece(holding: Holding, ranks: Ranks) -> Ranks:
    """Those of `ranks` (`holding.sums` or `holding.holders`) whose piece of this part is the piece of this rank.

    `replicate` and `pipeline` lie outside of the sharding axis in a layout, and the other axes within it; so the place
    of a rank along that axis is its number, without what is within, modulo the size of the axis.
    """
    size = len(holding.shard)
    if size == 1:
        return ranks
    within = holding.shard[1] - holding.shard[0]
    return tuple(rank for rank in ranks if rank // within % size == holding.rank // within % size)


def counts_piece(holding: Holding) -> bool:
    """Whether this is the first rank of its replica that has its piece, or, of those at its place along `shard`, the
    first that has this part.
    """
    return holding.rank == min(same_piece(holding, holding.holders))


def owned_gradients(owned: Iterable[Owned]) -> Iterator[tuple[str, Box, Tensor]]:
    """The agreed gradients of a rank: name, box of the unsplit parameter, values."""
    for each in owned:
        for box, part in each.boxes(each.gradient):
            yield each.name, box, part


def is_counted(own: Owned) -> bool:
    """Whether this rank is the first of its replica that holds these numbers."""
    return counts_piece(own.holding) if own.is_piece else own.holding.counts


# `Target`: a part of a tensor of the unsplit model that one rank holds; what is saved from it and loaded into it.
#
# A rank names the tensors of the unsplit model and says of each what it holds: a plain tensor is the whole, a sequence
# of targets are the boxes of it that lie here, an empty sequence means that another rank has it. If the boxes are runs
# of one flat buffer, as ZeRO divides them, `views` makes them targets without a copy.


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


# Looks at all parameters at once, without a loop of Python over them: there are some in every step, and a small step
# has no time for a tenth of a microsecond times a thousand parameters.


_gradient_of = attrgetter("grad")


def gradients_of(parameters: Iterable[Parameter]) -> list[Any]:
    """The gradient of each, a tensor or None."""
    return list(map(_gradient_of, parameters))


def complete(tensors: Iterable[Tensor | None]) -> bool:
    """Is none of them None?"""
    return all(map(is_not, tensors, repeat(None)))


def same_objects(these: Iterable[Any], those: Iterable[Any]) -> bool:
    """Are they the same objects, in the same order?"""
    these, those = list(these), list(those)
    return len(these) == len(those) and all(map(is_, these, those))


# `Section`: a part of the state of a run, as checkpoints see it.


class Section(Protocol):
    """Tensors and facts under names of their own."""

    @property
    def name(self) -> str:
        """Where its facts stand in a checkpoint's state."""
        ...

    def tensors(self) -> Mapping[str, Held]:
        """What is saved."""
        ...

    def targets(self, saved: Mapping[str, torch.dtype]) -> Mapping[str, Held]:
        """What a checkpoint that holds `saved` (name and dtype) is read into."""
        ...

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Those of `saved` that belong to this section and that other ranks fill."""
        ...

    def facts(self) -> dict[str, Any]:
        """What is not a tensor, for JSON."""
        ...

    def load(self, facts: Mapping[str, Any]) -> None:
        """Goes on from what `facts` gave."""
        ...
