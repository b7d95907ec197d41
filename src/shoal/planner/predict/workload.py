"""What is trained, and what of it a step's communication moves: all that prices ask of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shoal.codec.costs import Matrices
from shoal.cost.transformer import Recompute, Transformer, matmul_parameters
from shoal.schedules.cut import balanced_cut

# The seconds of a step, itemised: what is not in the bill is not in the prediction.


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


# Every number that a prediction uses and that neither the cluster, the model nor the plan gives, with its origin.
#
# None is fitted to a row that is predicted. Two may be calibrated, each on one measured row of a machine type:
# `compute`, a factor on the matrix-multiply rate (`calibrate_compute`), and `dispatch_s`, the seconds that the host
# takes for one operator (`calibrate_dispatch`).


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

    def record(self) -> list[dict[str, Any]]:
        """Plain values, for JSON: every constant with its value and where it comes from."""
        return [{"name": name, "value": value, "origin": origin} for name, value, origin in self.listed()]


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


# One constant from one measured step: the value at which the prediction is the measurement.
#
# Step time falls with `compute` and rises with `dispatch_s`, so a bisection finds the value, or the end of the range
# where the measurement lies beyond it: a machine cannot be calibrated to more than its data sheet.


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
