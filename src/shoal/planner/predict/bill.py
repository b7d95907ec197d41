"""The seconds of a step, itemised: what is not in the bill is not in the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ITEMS: Mapping[str, str] = {
    "matrix products": "linear layers, forward and backward",
    "attention": "scores, softmax and weighted values, forward and backward",
    "memory passes": "norms, residuals, activations, copies, sums of weight gradients",
    "recomputation": "forward work that is done again in the backward",
    "head and loss": "output matrix, cross-entropy, embedding",
    "launches": "the device waits for the host to launch operators",
    "tensor": "collectives between tensor ranks that nothing hides",
    "context": "keys and values between context ranks that attention does not hide",
    "expert": "tokens to experts and back",
    "gathers": "ZeRO-2 and -3: scattered gradients and gathered weights of each microbatch that nothing hides",
    "waiting": "where ranks meet, all wait for the slowest; measured machines only",
    "overlap": "computation slowed down by communication that runs beside it",
    "transfers": "activations and their gradients between stages",
    "bubble": "a pipeline rank waits for others",
    "gradients": "sums of gradients over replicas that the backward does not hide, gathered weights",
    "optimizer": "unscaling, norm, Adam, casts",
}


COMPUTED = ("matrix products", "attention", "memory passes", "recomputation", "head and loss")
"""Items in which the device computes, so that communication can run beside them."""


@dataclass(frozen=True)
class Bill:
    """Seconds by item of `ITEMS`; absent items are 0."""

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    def rows(self) -> list[tuple[str, float, float]]:
        """(item, seconds, share) of every item that is not 0, in the order of `ITEMS`."""
        total = self.total
        return [(name, self.seconds[name], self.seconds[name] / total) for name in ITEMS if self.seconds.get(name)]
