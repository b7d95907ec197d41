"""Sentences on numbers that do not divide: what was found, and the nearest that do; None where all is well."""

from __future__ import annotations

from shoal.topology.refusal import nearest_divisors, nearest_multiples


def divides(axis: str, size: int, name: str, number: int) -> str | None:
    """`size` of `axis` must divide `number`, which is called `name`."""
    if number % size == 0:
        return None
    divisors = " or ".join(map(str, nearest_divisors(number, size)))
    multiples = " or ".join(map(str, nearest_multiples(size, number)))
    return f"{axis} = {size} does not divide {name} = {number}; nearest: {axis} = {divisors}, or {name} = {multiples}"


def divides_or_divided(axis: str, size: int, name: str, number: int) -> str | None:
    """Fewer heads than ranks are held by several ranks each, so the larger must be a multiple of the smaller."""
    return None if size % number == 0 else divides(axis, size, name, number)


def not_multiple(name: str, number: int, unit: int, what: str) -> str:
    """`number` is no multiple of `unit`, which is that of `what`."""
    nearest = " or ".join(map(str, nearest_multiples(unit, number)))
    return f"{name} = {number} is not a multiple of {what}; nearest: {nearest}"
