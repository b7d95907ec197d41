"""What is trained, and what of it a step's communication moves: all that prices ask of a model.

One constant from one measured step: the value at which the prediction is the measurement.

Step time falls with `compute` and rises with `dispatch_s`, so a bisection finds the value, or the end of the range
where the measurement lies beyond it: a machine cannot be calibrated to more than its data sheet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.codec.stated import Matrices
from shoal.cost.transformer import Recompute, Transformer, matmul_parameters
from shoal.planner.predict.bill import Constants
from shoal.schedules.cut import balanced_cut


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the step that trains it."""

    model: Transformer
    global_samples: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_samples * self.sequence


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The fullest pipeline rank of a plan. `head` is 1 where it has the head and the loss, else 0.

    `numbers` are its parameters before ZeRO shards them, `tied_numbers` those of an embedding that the last stage uses
    too, `outside_numbers` those of its embedding and head. `boundary_bytes` are one activation of a microbatch towards
    the next stage. `matrices` are those among its parameters.
    """

    layers: float
    head: float
    numbers: float
    tied_numbers: float
    boundary_bytes: float
    outside_numbers: float = 0.0
    matrices: tuple[Matrices, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What of a search a model can do: axes that can split it, what it can compute again, sliced sequences."""

    axes: frozenset[str] = frozenset(("replicate", "shard", "pipeline", "context", "tensor", "expert"))
    recompute: frozenset[Recompute] = frozenset(("none", "selective", "operators", "full"))
    sequence_parallel: bool = True


EMBEDDING_SHARE = 1e-3
"""What the pipeline's cut counts for a part without matrix products, of the dearest part."""


@functools.lru_cache(maxsize=1 << 10)
def balanced_layers(model: Transformer, stages: int) -> tuple[int, ...]:
    """Layers of each stage as the pipeline itself cuts a model: embedding, layers and head, weighed by the numbers that
    a token is multiplied with, so that the network has no part in it.

    Raises `LayoutError` for more stages than parts.
    """
    layer, head = float(matmul_parameters(model)), float(model.vocabulary * model.hidden)
    costs = [EMBEDDING_SHARE * max(layer, head), *[layer] * model.layers, head]
    cut = balanced_cut(costs, stages)
    return tuple(sum(0 < part <= model.layers for part in parts) for parts in cut)


COMPUTE_RANGE = (0.2, 1.25)
DISPATCH_RANGE = (0.0, 1e-3)
FACTOR_RANGE = (0.25, 4.0)
SPEED_RANGE = (0.1, 10.0)
STEPS = 60


def calibrate_compute(predicted_s: Callable[[Constants], float], measured_s: float, start: Constants) -> Constants:
    """`start` with the factor on the matrix-multiply rate that gives `measured_s`."""
    value = _bisect(lambda x: -predicted_s(replace(start, compute=x)), -measured_s, COMPUTE_RANGE)
    return replace(start, compute=value)


def calibrate_dispatch(predicted_s: Callable[[Constants], float], measured_s: float, start: Constants) -> Constants:
    """`start` with the host's seconds of one operator that give `measured_s`."""
    value = _bisect(lambda x: predicted_s(replace(start, dispatch_s=x)), measured_s, DISPATCH_RANGE)
    return replace(start, dispatch_s=value)


def calibrate_factor(predicted_s: Callable[[float], float], measured_s: float) -> float:
    """The factor on all measured operators that gives `measured_s`: what a whole step does to caches and memory."""
    return _bisect(predicted_s, measured_s, FACTOR_RANGE)


def calibrate_speed(predicted_s: Callable[[float], float], measured_s: float) -> float:
    """The speed of a device, as a multiple of its assumed one, that gives `measured_s`."""
    return _bisect(lambda x: -predicted_s(x), -measured_s, SPEED_RANGE)


def _bisect(rising: Callable[[float], float], wanted: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    for _ in range(STEPS):
        middle = (low + high) / 2
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
