"""Communication beside computation: what is seen of it, and what hiding the rest costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Communication that is seen, and computation that hidden communication slows down, seconds."""

    seen_s: float
    slowed_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.seen_s + self.slowed_s


def exposed(communication_s: float, beside_s: float, *, slowdown: float) -> Exposed:
    """What `beside_s` seconds of computation cannot hide, and what hiding costs them."""
    hidden = min(communication_s, beside_s)
    return Exposed(seen_s=communication_s - hidden, slowed_s=hidden * slowdown)
