"""Bytes of state for one parameter, and how ZeRO divides them (Rajbhandari et al. arXiv:1910.02054).

Mixed-precision Adam keeps 18 bytes: weight 2, gradient 4, float32 master 4, two moments 8 (Megatron-LM). With weight w,
gradient r, optimizer o over D ranks: ZeRO-1 w + r + o/D; ZeRO-2 w + (r + o)/D; ZeRO-3 (w + r + o)/D.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.plan import Zero


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter has in each kind of state; `wire` is the dtype in which gradients are summed over ranks.

    `stream` are those of the residual stream, which autocast leaves in the parameters' dtype.
    """

    weight: float
    gradient: float
    optimizer: float
    activation: float
    wire: float
    stream: float = 2

    def sharded(self, zero: Zero, ranks: int) -> tuple[float, float, float]:
        """(weight, gradient, optimizer) bytes of one parameter on one of `ranks` ranks."""
        return (
            self.weight / (ranks if zero >= 3 else 1),
            self.gradient / (ranks if zero >= 2 else 1),
            self.optimizer / (ranks if zero >= 1 else 1),
        )


MEGATRON_FP16 = StateBytes(weight=2, gradient=4, optimizer=12, activation=2, wire=2)
"""Half-precision weights, float32 gradient sums, master weights and Adam's moments; gradients travel in half."""

MEGATRON_BF16 = StateBytes(weight=2, gradient=4, optimizer=12, activation=2, wire=4)
"""The same with gradients that travel in float32."""

AUTOCAST = StateBytes(weight=4, gradient=4, optimizer=8, activation=2, wire=4, stream=4)
"""Float32 weights, gradients and moments, matrix products in bfloat16 or float16: `precision.kind = "bfloat16"`."""

FLOAT32 = StateBytes(weight=4, gradient=4, optimizer=8, activation=4, wire=4, stream=4)
FLOAT64 = StateBytes(weight=8, gradient=8, optimizer=16, activation=8, wire=8, stream=8)
