"""The names of the axes, and the two ways in which a rank is read as coordinates along them.

Dense parameters see the ranks of a replica as pipeline x shard x context x tensor. Experts see the same ranks as
pipeline x expert_shard x expert: `expert` is cut from the innermost end of shard x context x tensor, and
`expert_shard`, the rest, is the data axis of the experts. A *reading* is one of these two lists of axes, outermost
first. Axes of one reading are independent of each other; `tensor` and `expert` are not: they count the same ranks.

Where one parameter lies, and over which ranks its gradient is a sum.

Two questions about a parameter and an axis, independent of each other:

- Do the ranks along the axis hold different pieces of it (`sharded`), or the same numbers (`replicated`)?
- Does each of them compute one term of its gradient (`partial`), or the whole?

Both are true of `shard` under ZeRO-3, where a reduce-scatter answers them at once. Gradient sync asks for
`all_reduce_axes` and `reduce_scatter_axes`; a norm or a count adds up over `sharded` alone, so that a number that
several ranks hold counts once.

    part                                   sharded      partial, beside the batch axes
    a norm's weight                        -            -
    a column of a tensor-parallel matrix   tensor       -
    a norm under sequence parallelism      -            tensor
    an embedding tied across stages        -            pipeline
    a matrix under ZeRO-3                  shard        -

An expert's parameters are sharded over `expert`. Tokens reach experts through an exchange over shard x context x
tensor in which each token is sent once, so an expert's gradient has one term on each rank of `expert_shard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Axis = Literal["replicate", "pipeline", "shard", "context", "tensor", "expert_shard", "expert"]

DENSE: tuple[Axis, ...] = ("replicate", "pipeline", "shard", "context", "tensor")
EXPERT: tuple[Axis, ...] = ("replicate", "pipeline", "expert_shard", "expert")

INSIDE_REPLICA: tuple[Axis, ...] = ("pipeline", "shard", "context", "tensor")
SHARED_WITH_EXPERTS: tuple[Axis, ...] = ("shard", "context", "tensor")


def reading_of(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The reading that has all of `axes`; the dense one where both have them.

    Raises:
        ValueError: an axis is unknown, or no reading has them all.
    """
    wanted = set(axes)
    unknown = wanted - {*DENSE, *EXPERT}
    if unknown:
        known = ", ".join(dict.fromkeys((*DENSE, *EXPERT)))
        raise ValueError(f"no axis is called {_listed(unknown)}: axes are {known}")
    for reading in (DENSE, EXPERT):
        if wanted <= set(reading):
            return reading
    clashing = wanted & set(SHARED_WITH_EXPERTS)
    raise ValueError(
        f"{_listed(wanted - set(DENSE))} and {_listed(clashing)} count the same ranks twice: "
        f"combine axes of {' x '.join(DENSE)}, or of {' x '.join(EXPERT)}"
    )


def in_order(axes: Iterable[Axis], reading: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """`axes` without repetition, outermost first."""
    wanted = set(axes)
    return tuple(axis for axis in reading if axis in wanted)


def _listed(axes: Iterable[str]) -> str:
    return ", ".join(repr(axis) for axis in sorted(axes))


Kind = Literal["dense", "expert"]

BATCH_AXES: tuple[Axis, ...] = ("replicate", "shard", "context")
"""The axes that split the batch: each rank along them sees samples, or tokens of a sample, that no other sees."""

_READING: Mapping[Kind, tuple[Axis, ...]] = MappingProxyType({"dense": DENSE, "expert": EXPERT})
_SUMMED: Mapping[Kind, tuple[Axis, ...]] = MappingProxyType(
    {"dense": BATCH_AXES, "expert": ("replicate", "expert_shard")},
)
_SHARDED: Mapping[Kind, tuple[Axis, ...]] = MappingProxyType({"dense": (), "expert": ("expert",)})


@dataclass(frozen=True)
class Placement:
    """One parameter's axes, outermost first. Build it with `placed`."""

    reading: tuple[Axis, ...]
    sharded: tuple[Axis, ...]
    partial: tuple[Axis, ...]

    @property
    def replicated(self) -> tuple[Axis, ...]:
        """The axes along which every rank holds the same numbers."""
        return tuple(axis for axis in self.reading if axis not in self.sharded)

    @property
    def all_reduce_axes(self) -> tuple[Axis, ...]:
        """Terms are summed, and every rank keeps the sum."""
        return tuple(axis for axis in self.partial if axis not in self.sharded)

    @property
    def reduce_scatter_axes(self) -> tuple[Axis, ...]:
        """Terms are summed, and each rank keeps the piece that it holds."""
        return tuple(axis for axis in self.partial if axis in self.sharded)


def placed(kind: Kind, *, sharded: Iterable[Axis] = (), partial: Iterable[Axis] = ()) -> Placement:
    """The placement of a parameter of this kind, with the axes that a parallel plan adds.

    Raises:
        ValueError: the kind is unknown, or an axis is not one that this kind is counted along.
    """
    if kind not in _READING:
        raise ValueError(f"no parameter is of kind {kind!r}: kinds are {', '.join(map(repr, _READING))}")
    reading = _READING[kind]
    sharded, partial = {*_SHARDED[kind], *sharded}, {*_SUMMED[kind], *partial}
    foreign = sorted((sharded | partial) - set(reading))
    if foreign:
        raise ValueError(f"a parameter of kind {kind!r} has no axis {foreign[0]!r}: its axes are {', '.join(reading)}")
    return Placement(reading, in_order(sharded, reading), in_order(partial, reading))
