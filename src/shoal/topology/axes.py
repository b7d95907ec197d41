"""The names of the axes, and the two ways in which a rank is read as coordinates along them.

Dense parameters see the ranks of a replica as pipeline x shard x context x tensor. Experts see the same ranks as
pipeline x expert_shard x expert: `expert` is cut from the innermost end of shard x context x tensor, and
`expert_shard`, the rest, is the data axis of the experts. A *reading* is one of these two lists of axes, outermost
first. Axes of one reading are independent of each other; `tensor` and `expert` are not: they count the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
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
