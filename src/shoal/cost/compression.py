"""What a sum of gradients costs a step, with a codec and without, on a link that was measured.

    wire     = calls alpha + bytes / rate
    exposed  = coding + processor bytes + max(wire / buckets, wire - window)

Coding is done by the processor that computes, so that nothing hides it; so is the work of sending, where ranks fill the
cores (`processor_s_byte`, 0 for links that do it themselves). The wire works while the backward fills further
buckets, for the seconds of `window`; the last bucket has nothing to hide behind. (Agarwal et al., "On the Utility of
Gradient Compression in Distributed Training Systems", arXiv:2103.00543, section 4: the same terms, for one bucket.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STAYS_WITHIN = 0.9
"""A choice is left for one that costs at most this part of it: measurements are noisy, and a change has a price."""


@dataclass(frozen=True)
class Way:
    """One way to sum all buckets of a step: collectives of a rank, bytes that it sends, seconds of coding."""

    name: str
    calls: float
    sent_bytes: float
    coding_s: float


@dataclass(frozen=True)
class MeasuredLink:
    """`alpha_s` is the time of a collective without content, `bytes_s` the rate at which a rank sends,
    `processor_s_byte` what its processor works for each of the bytes.
    """

    alpha_s: float
    bytes_s: float
    processor_s_byte: float = 0.0

    @staticmethod
    def of(short_s: float, long_s: float, long_bytes: float, *, processor_s: float = 0.0) -> MeasuredLink:
        """From the seconds of a collective that sends nothing to speak of, and of one that sends `long_bytes`, which
        kept the processor busy for `processor_s`.
        """
        return MeasuredLink(short_s, long_bytes / max(long_s - short_s, long_s / 10, 1e-9), processor_s / long_bytes)

    def wire_s(self, way: Way) -> float:
        """Seconds for which the link works in a step."""
        return way.calls * self.alpha_s + way.sent_bytes / self.bytes_s


def exposed_s(way: Way, link: MeasuredLink, *, window_s: float, buckets: int) -> float:
    """Seconds that a step takes longer than one without communication."""
    wire_s = link.wire_s(way)
    return way.coding_s + way.sent_bytes * link.processor_s_byte + max(wire_s / max(buckets, 1), wire_s - window_s)


def choose(
    ways: Sequence[Way], link: MeasuredLink, *, window_s: float, buckets: int, present: str | None = None
) -> tuple[str, str]:
    """The name of the way that costs least, and why in a line. The `present` one stays where none is clearly better."""
    costs = {way.name: exposed_s(way, link, window_s=window_s, buckets=buckets) for way in ways}
    best = min(costs, key=lambda name: costs[name])
    if present in costs and costs[best] > STAYS_WITHIN * costs[present]:
        best = present
    others = ", ".join(f"{name} {1e3 * cost:.1f} ms" for name, cost in costs.items() if name != best)
    return best, (
        f"{best} costs {1e3 * costs[best]:.1f} ms a step at {8e-6 * link.bytes_s:.0f} Mbit/s and "
        f"{1e6 * link.alpha_s:.0f} us a call ({others})"
    )
