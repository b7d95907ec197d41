"""The seconds of a step, itemised: what is not in the bill is not in the prediction.

Every number that a prediction uses and that neither the cluster, the model nor the plan gives, with its origin.

None is fitted to a row that is predicted. Two may be calibrated, each on one measured row of a machine type
(`planner.predict.calibrate`): `compute`, a factor on the matrix-multiply rate, and `dispatch_s`, the seconds that the
host takes for one operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

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
    "coding": "encoding and decoding of what a codec sends, error feedback",
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


def _constant(value: float, origin: str) -> Any:
    return field(default=value, metadata={"origin": origin})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Numbers with origins; `listed` gives both."""

    compute: float = _constant(1.0, "factor on the device's matmul_efficiency; 1, or calibrated on one row")
    dispatch_s: float = _constant(29e-6, "host seconds of one operator; PyTorch eager, or calibrated on one row")
    memory_efficiency: float = _constant(
        0.8, "share of the memory's rate that element-wise kernels reach; assumed, STREAM reaches 0.8 to 0.9"
    )
    kernel_s: float = _constant(4e-6, "shortest kernel with its launch gap on the device; assumed")
    overlap_slowdown: float = _constant(
        0.126, "seconds of computation lost for a hidden second of communication: Galvatron's measured 1.126"
    )
    forward_operators: float = _constant(
        30, "aten operators that are no views in the forward of an eager GPT layer with dropout: counted"
    )
    backward_operators: float = _constant(42, "the same in its backward, sums of gradients included: counted")
    head_operators: float = _constant(
        66, "operators of embedding, head, loss and schedule for a microbatch: two thirds of a layer's, assumed"
    )
    optimizer_start_s: float = _constant(
        3e-4, "host seconds of an optimizer step: ten launches for many tensors each; assumed"
    )

    def listed(self) -> Iterator[tuple[str, float, str]]:
        """(name, value, origin) of each."""
        for constant in fields(self):
            yield constant.name, getattr(self, constant.name), constant.metadata["origin"]
