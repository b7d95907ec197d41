"""Why a layout cannot be, in sentences that offer the nearest one that can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from shoal.errors import LayoutError

MOST_RANKS = 1 << 20
"""No layout is larger: beyond the largest machines that anybody trains on, a size is a slip of the keyboard."""


def check_size(name: str, size: object) -> None:
    """Raises `LayoutError` unless `size` is a whole number from 1 to `MOST_RANKS`."""
    if type(size) is not int:
        raise LayoutError(f"{name}={size!r}: a size is a whole number, such as {name}=2")
    if size < 1:
        raise LayoutError(f"{name}={size}: a size is at least 1; leave it out, or set {name}=1")
    if size > MOST_RANKS:
        raise LayoutError(f"{name}={size}: a layout has at most {MOST_RANKS} ranks; lower it")


def check_world(sizes: Mapping[str, int]) -> None:
    """Raises `LayoutError` if the product is more than `MOST_RANKS`."""
    ranks = prod(sizes.values())
    if ranks > MOST_RANKS:
        raise LayoutError(f"{written(sizes)} makes {ranks} ranks: a layout has at most {MOST_RANKS}; lower one of them")


def check_expert(expert: int, shared: Mapping[str, int]) -> None:
    """Raises `LayoutError` unless `expert` divides the ranks that experts share with the axes of `shared`."""
    ranks = prod(shared.values())
    if ranks % expert:
        raise LayoutError(
            f"expert={expert} does not divide {written(shared)} = {ranks}, the ranks that experts are laid on; "
            f"nearest: {_either('expert=', nearest_divisors(ranks, expert))}"
        )


def check_divides(processes: int, inside: Mapping[str, int]) -> None:
    """Raises `LayoutError` unless replicas of the sizes `inside` use all of the processes."""
    replica_size = prod(inside.values())
    if processes % replica_size == 0:
        return
    repairs = [repair for axis in inside if (repair := _repair(processes, inside, axis))]
    repairs.append(_either("", nearest_multiples(replica_size, processes)) + " processes")
    raise LayoutError(f"{processes} processes cannot be split by {written(inside)}; nearest: {', or '.join(repairs)}")


def check_total(processes: int, sizes: Mapping[str, int]) -> None:
    """Raises `LayoutError` unless the sizes multiply to `processes`, which those inside a replica divide."""
    ranks = prod(sizes.values())
    if ranks != processes:
        fitting = processes * sizes["replicate"] // ranks
        raise LayoutError(
            f"{written(sizes)} makes {ranks} ranks, but there are {processes} processes: "
            f"set replicate={fitting} or leave it out, or start {ranks} processes"
        )


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The largest divisor of `number` up to `wanted`, and the smallest above it where there is one."""
    below = next(d for d in range(min(wanted, number), 0, -1) if number % d == 0)
    above = next((d for d in range(wanted + 1, number + 1) if number % d == 0), None)
    return [below] if above is None else [below, above]


def nearest_multiples(unit: int, wanted: int) -> list[int]:
    """The positive multiples of `unit` on both sides of `wanted`, which is not one itself."""
    below = wanted - wanted % unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def written(sizes: Mapping[str, int]) -> str:
    """`shard=2 x tensor=3`; axes of one rank are left out, unless all are."""
    split = {axis: size for axis, size in sizes.items() if size > 1} or sizes
    return " x ".join(f"{axis}={size}" for axis, size in split.items())


def _repair(processes: int, inside: Mapping[str, int], axis: str) -> str | None:
    """The nearest sizes of one axis that make the whole divide, the others as they are; None where none does."""
    others = prod(inside.values()) // inside[axis]
    if inside[axis] == 1 or processes % others:
        return None
    return _either(f"{axis}=", nearest_divisors(processes // others, inside[axis]))


def _either(prefix: str, values: Iterable[int]) -> str:
    return " or ".join(f"{prefix}{value}" for value in values)
