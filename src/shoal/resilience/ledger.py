"""The sample ledger: which positions of the data's order the present state has used, each exactly once.

A generation holds the only lease on all positions from its first on, open-ended: no message is needed per step, and
positions that it has not committed when it ends go to the next generation. What is committed follows the state: where
a run goes back to an earlier state, the positions used after it are free again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.resilience.events import Committed, Continued, Decision, Formed, Rewound


@dataclass
class SampleLedger:
    """`step` is the newest committed one, `position` the next to be used; `redone` counts positions that a state used
    which was lost.
    """

    generation: int = 0
    step: int = 0
    position: int = 0
    redone: int = 0

    def begin(self, generation: int, *, step: int, position: int) -> None:
        """A generation takes over the lease, with the state after `step`.

        Raises `ValueError` for a generation that is older than one that held the lease.
        """
        if generation < self.generation:
            raise ValueError(f"generation {generation} cannot begin: generation {self.generation} holds the lease")
        self.redone += max(0, self.position - position)
        self.generation, self.step, self.position = generation, step, position

    def commit(self, generation: int, step: int, *, start: int, stop: int) -> None:
        """Marks the positions of one step as used.

        Raises `ValueError` where `generation` does not hold the lease, or the step is not the next one, on the next
        positions.
        """
        if generation != self.generation:
            raise ValueError(f"generation {generation} commits step {step}, but {self.generation} holds the lease")
        if step != self.step + 1 or start != self.position or stop < start:
            raise ValueError(
                f"step {step} on positions [{start}, {stop}) does not follow step {self.step}, "
                f"which ended at position {self.position}: each position is used once, in order"
            )
        self.step, self.position = step, stop


def audit(decisions: Iterable[Decision]) -> SampleLedger:
    """The ledger that a journal adds up to. Raises `ValueError` at the first decision that breaks a rule."""
    ledger = SampleLedger()
    for decision in decisions:
        if isinstance(decision, Formed):
            ledger.begin(decision.number, step=decision.step, position=decision.position)
        elif isinstance(decision, Rewound | Continued):
            ledger.begin(decision.generation, step=decision.step, position=decision.position)
        elif isinstance(decision, Committed):
            ledger.commit(decision.generation, decision.step, start=decision.start, stop=decision.stop)
    return ledger
