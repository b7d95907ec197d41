"""Random ways in which ranks hold a tensor, and the memory that they hold it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from hypothesis import strategies as st
from torch import Tensor

from shoal.state import Target
from shoal.topology.holding import Box, Dims, boxes_of_run, whole

Held = dict[int, list[Box]]
"""The boxes of one tensor, by the rank that holds them."""

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def held(draw: st.DrawFn, shape: Dims, ranks: Sequence[int]) -> Held:
    """A cut of a tensor over `ranks`: whole, along a dim, in runs of the flat tensor, or copies cut each in its way.

    Cuts nest: what a place along a dim holds may be cut in runs again, as ZeRO cuts what tensor parallelism left.
    """
    if prod(shape) == 0:
        return _whole(shape, ranks)
    kinds = ["whole", "runs", *(["dim"] if shape else []), *(["copies", "stage"] if len(ranks) > 1 else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "stage":
        return draw(held(shape, ranks[: draw(st.integers(1, len(ranks) - 1))]))
    if kind == "copies":
        middle = draw(st.integers(1, len(ranks) - 1))
        return draw(_copy(shape, ranks[:middle])) | draw(_copy(shape, ranks[middle:]))
    if kind == "dim":
        return draw(_along_a_dim(shape, ranks))
    return draw(_copy(shape, ranks))


@st.composite
def _copy(draw: st.DrawFn, shape: Dims, ranks: Sequence[int]) -> Held:
    """Every element has equally many holders."""
    if draw(st.booleans()):
        return _whole(shape, ranks)
    borders = _borders(draw, prod(shape), len(ranks))
    runs = zip(ranks, borders, borders[1:], strict=False)
    return {rank: list(boxes_of_run(shape, start, stop)) for rank, start, stop in runs}


@st.composite
def _along_a_dim(draw: st.DrawFn, shape: Dims, ranks: Sequence[int]) -> Held:
    """Uneven slices; each belongs to a group of ranks that cut it further."""
    dim, places = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, len(ranks)))
    groups = [ranks[place::places] for place in range(places)]
    found: Held = {}
    borders = _borders(draw, shape[dim], places)
    for group, start, stop in zip(groups, borders, borders[1:], strict=False):
        if start < stop:
            part = Box(
                tuple(start if d == dim else 0 for d in range(len(shape))),
                tuple(stop - start if d == dim else size for d, size in enumerate(shape)),
            )
            inner = draw(held(part.shape, group))
            found |= {rank: [box.within(part.offset) for box in boxes] for rank, boxes in inner.items()}
    return found


def _whole(shape: Dims, ranks: Sequence[int]) -> Held:
    return {rank: [whole(shape)] for rank in ranks}


def _borders(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    return [0, *sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1))), size]


def targets(tensor: Tensor, boxes: Sequence[Box], *, empty: bool = False) -> list[Target]:
    """The parts of `tensor`, each in memory of its own; `empty`: of zeros, to be filled."""
    parts = [tensor[box.slices].clone() for box in boxes]
    return [
        Target(torch.zeros_like(part) if empty else part, tuple(tensor.shape), box.offset)
        for part, box in zip(parts, boxes, strict=True)
    ]


def of_rank(
    rank: int, tensors: Mapping[str, Tensor], layout: Mapping[str, Held], *, empty: bool = False
) -> dict[str, list[Target]]:
    """What `rank` holds of `tensors` in `layout`."""
    return {
        name: targets(tensor, layout[name][rank], empty=empty)
        for name, tensor in tensors.items()
        if rank in layout[name]
    }
