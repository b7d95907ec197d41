"""`Layout`: how the ranks of a run are arranged. Pure arithmetic on integers.

A layout is a box of ranks with five axes, R x P x D x C x T, outermost first:

    replicate  copies of the model, which agree through a sync strategy     R
    pipeline   stages of the model                                          P
    shard      samples, and the pieces of parameters (FSDP, ZeRO)           D
    context    parts of a sequence                                          C
    tensor     parts of a matrix; innermost, for it needs the fastest link  T

and the ranks count through it as an odometer does:

    rank = (((replicate * P + pipeline) * D + shard) * C + context) * T + tensor

So a replica is P * D * C * T consecutive ranks, and a tensor group is T consecutive ranks, which launchers put on one
host. `expert` (E) adds no ranks: it re-reads those of shard x context x tensor, of which E must be a divisor, as
expert_shard x expert, with `expert` innermost:

    rank = ((replicate * P + pipeline) * (D * C * T / E) + expert_shard) * E + expert

The *group* of an axis at a rank is the ranks that share all other coordinates with it; the groups of an axis are a
partition of the world. Several axes of one reading (see `reading_of`) make a group in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from types import MappingProxyType
from typing import Literal, Self

from shoal.errors import LayoutError
from shoal.topology.refusal import check_divides, check_expert, check_size, check_total, check_world

# The names of the axes, and the two ways in which a rank is read as coordinates along them.
#
# Dense parameters see the ranks of a replica as pipeline x shard x context x tensor. Experts see the same ranks as
# pipeline x expert_shard x expert: `expert` is cut from the innermost end of shard x context x tensor, and
# `expert_shard`, the rest, is the data axis of the experts. A *reading* is one of these two lists of axes, outermost
# first. Axes of one reading are independent of each other; `tensor` and `expert` are not: they count the same ranks.


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


# Where one parameter lies, and over which ranks its gradient is a sum.
#
# Two questions about a parameter and an axis, independent of each other:
#
# - Do the ranks along the axis hold different pieces of it (`sharded`), or the same numbers (`replicated`)?
# - Does each of them compute one term of its gradient (`partial`), or the whole?
#
# Both are true of `shard` under ZeRO-3, where a reduce-scatter answers them at once. A norm or a count adds up over
# `sharded` alone, so that a number that several ranks hold counts once.
#
#     part                                   sharded      partial, beside the batch axes
#     a norm's weight                        -            -
#     a column of a tensor-parallel matrix   tensor       -
#     a norm under sequence parallelism      -            tensor
#     an embedding tied across stages        -            pipeline
#     a matrix under ZeRO-3                  shard        -
#
# An expert's parameters are sharded over `expert`. Tokens reach experts through an exchange over shard x context x
# tensor in which each token is sent once, so an expert's gradient has one term on each rank of `expert_shard`.


Kind = Literal["dense", "expert"]

BATCH_AXES: tuple[Axis, ...] = ("replicate", "shard", "context")
"""The axes that split the batch: each rank along them sees samples, or tokens of a sample, that no other sees."""

_READING: Mapping[Kind, tuple[Axis, ...]] = MappingProxyType({"dense": DENSE, "expert": EXPERT})
_SUMMED: Mapping[Kind, tuple[Axis, ...]] = MappingProxyType(
    {"dense": BATCH_AXES, "expert": ("replicate", "expert_shard")}
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


# Counting in mixed radix: a number as digits, each with a base of its own, as hours, minutes and seconds are.
#
#     number = ((d0 * b1 + d1) * b2 + d2) * b3 + ...          0 <= d_i < b_i
#
# Outermost digit first (Horner's rule; Knuth, The Art of Computer Programming, volume 2, section 4.1, equation 9).


def to_digits(number: int, bases: Sequence[int]) -> tuple[int, ...]:
    """The digits of `number`, `0 <= number < product(bases)`, outermost first."""
    digits = []
    for base in reversed(bases):
        number, digit = divmod(number, base)
        digits.append(digit)
    return tuple(reversed(digits))


def strides(bases: Sequence[int]) -> tuple[int, ...]:
    """How far the number moves when a digit grows by one: the product of the bases to its right."""
    steps, step = [], 1
    for base in reversed(bases):
        steps.append(step)
        step *= base
    return tuple(reversed(steps))


Axes = Axis | tuple[Axis, ...]


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """A rank's place along each axis of the box, from 0."""

    replicate: int = 0
    pipeline: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the axes. Immutable; equality is by value.

    Raises:
        LayoutError: a size is not a whole number from 1, `expert` does not divide shard x context x tensor, or there
            are more ranks than `refusal.MOST_RANKS`.
    """

    replicate: int = 1
    pipeline: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            check_size(name, size)
        check_world(self._named(DENSE))
        check_expert(self.expert, self._named(SHARED_WITH_EXPERTS))

    @classmethod
    def for_processes(cls, processes: int, **given: int | None) -> Self:
        """The layout of a known number of ranks. Where `replicate` is not given (or None), it takes what remains.

        Raises:
            LayoutError: the sizes do not multiply to `processes`; the message names the nearest that do.
        """
        check_size("processes", processes)
        sizes = {axis: size for axis, size in given.items() if size is not None}
        replica = cls.from_dict({**sizes, "replicate": 1})
        check_divides(processes, replica._named(INSIDE_REPLICA))
        layout = cls.from_dict({"replicate": processes // replica.world_size, **sizes})
        check_total(processes, layout._named(DENSE))
        return layout

    @classmethod
    def from_dict(cls, sizes: Mapping[str, int]) -> Self:
        """The inverse of `to_dict`; an axis that is absent has size 1. Raises `LayoutError` for one that is unknown."""
        known = [field.name for field in fields(cls)]
        for name in sizes:
            if name not in known:
                raise LayoutError(f"a layout has no axis {name!r} whose size can be given; it has {', '.join(known)}")
        return cls(**sizes)

    def to_dict(self) -> dict[str, int]:
        """The six sizes by name, as plain integers."""
        return asdict(self)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.size(DENSE)

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.size(INSIDE_REPLICA)

    @property
    def expert_shard(self) -> int:
        """Size of the experts' data axis: what `expert` leaves of shard x context x tensor."""
        return self.size(SHARED_WITH_EXPERTS) // self.expert

    def size(self, axes: Axes) -> int:
        """Ranks in one group of `axes`. Raises `ValueError` if they are not of one reading."""
        wanted = _as_tuple(axes)
        return prod(self._sizes(in_order(wanted, reading_of(wanted))))

    def coordinate(self, rank: int) -> Coordinate:
        """Where `rank` lies in the box."""
        return Coordinate(**dict(zip(DENSE, to_digits(self._known(rank), self._sizes(DENSE)), strict=True)))

    def index(self, axis: Axis, rank: int) -> int:
        """Place of `rank` along one axis, the experts' included: which member it is of its `group(axis, rank)`."""
        reading = reading_of((axis,))
        return to_digits(self._known(rank), self._sizes(reading))[reading.index(axis)]

    def group(self, axes: Axes, rank: int) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` along `axes` at most.

        Raises:
            ValueError: `rank` is outside the world, or the axes are not of one reading.
        """
        wanted = _as_tuple(axes)
        reading = reading_of(wanted)
        sizes = self._sizes(reading)
        group = [self._known(rank)]
        for axis, size, stride, index in zip(reading, sizes, strides(sizes), to_digits(rank, sizes), strict=True):
            if axis in wanted:
                group = [member + (place - index) * stride for member in group for place in range(size)]
        return tuple(group)

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """All groups of `axes`, by their first rank: a partition of the world."""
        wanted = _as_tuple(axes)
        others: tuple[Axis, ...] = tuple(axis for axis in reading_of(wanted) if axis not in wanted)
        return tuple(self.group(wanted, first) for first in self.group(others, 0))

    def describe(self) -> str:
        """One line for people: `2 replicas x (shard 2, tensor 2) = 8 ranks`."""
        inner = [f"{axis} {getattr(self, axis)}" for axis in INSIDE_REPLICA if getattr(self, axis) > 1]
        if self.expert > 1:
            inner.append(f"expert {self.expert} on the same ranks")
        parts = f" x ({', '.join(inner)})" if inner else ""
        return f"{_counted(self.replicate, 'replica')}{parts} = {_counted(self.world_size, 'rank')}"

    def _sizes(self, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in axes)

    def _named(self, axes: tuple[Axis, ...]) -> dict[str, int]:
        return dict(zip(axes, self._sizes(axes), strict=True))

    def _known(self, rank: int) -> int:
        _check_place("rank", rank, self.world_size)
        return rank


def _as_tuple(axes: Axes) -> tuple[Axis, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _check_place(name: str, place: int, size: int) -> None:
    if not 0 <= place < size:
        raise ValueError(f"{name} {place} of {size}: it must be in 0 .. {size - 1}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
