"""A traced model and the step that trains it: what a search of layouts asks of them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.planner.trace.subject import Subject


@dataclass(frozen=True)
class TracedSizes:
    """What of a traced model limits its layouts."""

    subject: Subject

    @property
    def layers(self) -> int:
        """Blocks, or 1 where the model shows none."""
        return max(1, len(self.subject.units.blocks))

    @property
    def experts(self) -> int:
        """A user's experts are not told apart from other layers."""
        return 0

    def tensor_fits(self, ranks: int) -> bool:
        """Can the model be split over so many tensor ranks? It is tried."""
        return ranks == 1 or self.subject.refusal(ranks) is None


@dataclass(frozen=True, kw_only=True)
class TracedJob:
    """`sequence` are the positions of a sample that are weighed: tokens, or 1."""

    subject: Subject
    global_samples: int
    sequence: int

    @property
    def model(self) -> TracedSizes:
        """What limits layouts."""
        return TracedSizes(self.subject)

    @property
    def tokens(self) -> int:
        """Positions of one step."""
        return self.global_samples * self.sequence
