"""Silent corruption: replicas that are equal by construction vote on a fingerprint of their parameters.

Memory and arithmetic units fail without an error now and then (Dixit et al., "Silent data corruptions at scale",
arXiv:2102.11245). Replicas that apply the same updates hold the same bits; each puts a fingerprint of them into its
report, and the majority is right. With two replicas a difference is seen, but not whose it is.

The other replicas' gradients contained those that the culprit computed since its parameters changed; they are equal to
each other, and so is the run that goes on. How old the difference can be is the number of steps between fingerprints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """After `step` replicas differ. `culprits` differ from a majority; none are named where there is no majority."""

    step: int
    culprits: tuple[str, ...]
    sentence: str


def compare(step: int, fingerprints: Mapping[str, int]) -> Divergence | None:
    """Who differs after `step`; None where all are equal, or nobody took a fingerprint (0)."""
    taken = {name: value for name, value in fingerprints.items() if value}
    counts = Counter(taken.values()).most_common(1)
    if not counts or counts[0][1] == len(taken):
        return None
    value, votes = counts[0]
    if 2 * votes <= len(taken):
        names = ", ".join(sorted(taken))
        return Divergence(
            step,
            (),
            f"after step {step} the parameters of {names} differ, and no majority says whose are right: "
            "resume from the newest checkpoint, and run 3 replicas or more",
        )
    culprits = tuple(sorted(name for name, found in taken.items() if found != value))
    return Divergence(
        step,
        culprits,
        f"after step {step} the parameters of {', '.join(culprits)} differ from those of the {votes} others: "
        "check the memory and the devices of the host",
    )
