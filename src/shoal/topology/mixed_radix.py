"""Counting in mixed radix: a number as digits, each with a base of its own, as hours, minutes and seconds are.

    number = ((d0 * b1 + d1) * b2 + d2) * b3 + ...          0 <= d_i < b_i

Outermost digit first (Horner's rule; Knuth, The Art of Computer Programming, volume 2, section 4.1, equation 9).
"""

from __future__ import annotations

from collections.abc import Sequence


def to_digits(number: int, bases: Sequence[int]) -> tuple[int, ...]:
    """The digits of `number`, `0 <= number < product(bases)`, outermost first."""
    digits = []
    for base in reversed(bases):
        number, digit = divmod(number, base)
        digits.append(digit)
    return tuple(reversed(digits))


def to_number(digits: Sequence[int], bases: Sequence[int]) -> int:
    """The inverse of `to_digits`."""
    number = 0
    for digit, base in zip(digits, bases, strict=True):
        number = number * base + digit
    return number


def strides(bases: Sequence[int]) -> tuple[int, ...]:
    """How far the number moves when a digit grows by one: the product of the bases to its right."""
    steps, step = [], 1
    for base in reversed(bases):
        steps.append(step)
        step *= base
    return tuple(reversed(steps))
