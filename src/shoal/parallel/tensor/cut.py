"""Which slice of a dimension a place along `tensor` holds, and why some sizes cannot be split."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import LayoutError
from shoal.topology.refusal import nearest_divisors, nearest_multiples


@dataclass(frozen=True)
class Cut:
    """`length` numbers from `offset`, held by the places `twins`; of every `block` numbers, where that is given."""

    offset: int
    length: int
    twins: tuple[int, ...]
    block: int | None = None


def uneven_cut(total: int, place: int, size: int) -> Cut:
    """Parts that differ by one at most, the longer ones first: the rule of `torch.tensor_split`. Some may be empty."""
    each, extra = divmod(total, size)
    return Cut(place * each + min(place, extra), each + (place < extra), (place,))


def even_cut(features: int, place: int, size: int, *, what: str, unit: int = 1) -> Cut:
    """Equal parts of whole units (heads of `unit` features, or single features).

    Raises `LayoutError` where `size` does not divide the units; `what` names the layer.
    """
    units = features // unit
    if features % unit or units % size:
        raise LayoutError(_indivisible(what, units, size, noun="features" if unit == 1 else "heads"))
    length = features // size
    return Cut(place * length, length, (place,))


def grouped_cut(features: int, place: int, size: int, *, what: str, unit: int, heads: int) -> Cut:
    """Key or value heads of `unit` features that `heads` query heads share, each group next to the other.

    Where there are fewer of them than places, neighbouring places hold the same one: that of their query heads.
    Raises `LayoutError` where neither number divides the other.
    """
    shared = features // unit
    if features % unit == 0 and shared < size and size % shared == 0:
        copies = size // shared
        first = place // copies * copies
        return Cut(place // copies * unit, unit, tuple(range(first, first + copies)))
    if features % unit or shared % size:
        raise LayoutError(_ungrouped(what, shared, size, heads=heads))
    return even_cut(features, place, size, what=what, unit=unit)


def _indivisible(what: str, units: int, size: int, *, noun: str) -> str:
    sizes = " or ".join(f"tensor={n}" for n in nearest_divisors(units, size))
    others = " or ".join(map(str, nearest_multiples(size, units)))
    return f"{what} has {units} {noun}, which tensor={size} does not divide; nearest: {sizes}, or {others} {noun}"


def _ungrouped(what: str, shared: int, size: int, *, heads: int) -> str:
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
    below, above = [n for n in fitting if n < size][-1:], [n for n in fitting if n > size][:1]
    sizes = " or ".join(f"tensor={n}" for n in below + above)
    return (
        f"{what} has {shared} heads that the {heads} query heads share; tensor={size} must divide them or be a "
        f"multiple of them; nearest: {sizes}"
    )
