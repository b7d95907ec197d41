"""Every number that a prediction uses and that neither the cluster, the model nor the plan gives, with its origin.

None is fitted to a row that is predicted. Two may be calibrated, each on one measured row of a machine type
(`planner.predict.calibrate`): `compute`, a factor on the matrix-multiply rate, and `dispatch_s`, the seconds that the
host takes for one operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any


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
    flash_share: float = _constant(
        0.75, "flash attention's rate over that of matrix products: 190 of 255 TFLOP/s, arXiv:2307.08691 figure 5"
    )
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
