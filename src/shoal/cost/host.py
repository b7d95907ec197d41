"""What the host spends on a step beside its operators: the loop, hooks, modules.

    seconds = step + microbatches x (microbatch + layers x layer)

Three measured steps of tiny GPTs give the three, once what their operators take is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Host:
    """Seconds of one rank on a core of its own."""

    step_s: float = 0.0
    microbatch_s: float = 0.0
    layer_s: float = 0.0

    def seconds(self, *, microbatches: int, layers: float) -> float:
        """Of one step in which a rank has `layers` layers."""
        return self.step_s + microbatches * (self.microbatch_s + layers * self.layer_s)


def host_of(measured_s: Mapping[tuple[int, int], float], operators_s: Callable[[int, int], float]) -> Host:
    """From steps by (layers, microbatches): (1, 1), (l, 1) and (1, m); none is negative."""
    rest = {size: max(0.0, seconds - operators_s(*size)) for size, seconds in measured_s.items()}
    deep, many = max(size[0] for size in rest), max(size[1] for size in rest)
    layer_s = max(0.0, (rest[deep, 1] - rest[1, 1]) / (deep - 1))
    microbatch_s = max(0.0, (rest[1, many] - rest[1, 1]) / (many - 1) - layer_s)
    return Host(step_s=max(0.0, rest[1, 1] - microbatch_s - layer_s), microbatch_s=microbatch_s, layer_s=layer_s)
