"""What a step counts, votes on and returns: sums over ranks in lock-step, the vote on a device, gradient noise, the
result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.comm.ledger import Entry
from shoal.cost.noise_scale import Moments, MovingMoments, moments
from shoal.data.sample import Batch
from shoal.engine.growing_batch import BatchGrowth
from shoal.errors import DataError, UserCodeError
from shoal.gradients.reducer import OwnGradient
from shoal.state import numbers_on, side_stream, wait_for, works_in_streams
from shoal.sync.strategy import Agreed

# What a step counts before its backward: the denominator of the loss, samples, tokens, who wants to stop, and whose
# buffers move.
#
# Each rank counts its own microbatches; one small all-reduce, hidden behind the first forward, adds them up. So every
# rank divides by the same global denominator, and all learn in the same step that one of them was told to stop.


# A small sum over ranks in lock-step, in which each says which call it is in.
#
# What a step counts, a number that a loop sums, and the end of a loop are sums of one shape on one group. So a rank
# that makes another call than the others, such as one that leaves the loop alone, meets them there, and all of them
# learn it:
#
#     [ranks in each call ...  numbers ...]  summed over the ranks


Call = Literal["the next step", "sum() or mean()", "held_out()", "evaluation()", "export()", "the end of the loop"]
CALLS: tuple[Call, ...] = get_args(Call)
NUMBERS = 5
"""How many numbers a meeting sums."""


class Meeting:
    """The sum of up to `NUMBERS` `numbers` over `group`, under way; `wait` gives it."""

    def __init__(self, call: Call, numbers: Sequence[float], group: Collective, *, device: torch.device) -> None:
        self._call, self._size = CALLS.index(call), group.size
        self._handle: Handle | None = None
        own = [0.0] * (len(CALLS) + NUMBERS)
        own[self._call] = 1.0
        own[len(CALLS) : len(CALLS) + len(numbers)] = numbers
        self._own = own
        if group.size > 1:
            self._stream = side_stream(device)
            with self._stream or nullcontext():
                self._sums = numbers_on(device, own)
                self._handle = group.all_reduce(self._sums)

    def wait(self) -> list[float]:
        """The sums. Raises `UserCodeError`, on every rank, where not all of them are in the same call."""
        if self._handle is None:
            return self._own[len(CALLS) :]
        with self._stream or nullcontext():
            self._handle.wait()
            sums = _read(*_to_host(self._sums))
        if sums[self._call] != self._size:
            said = [f"{int(ranks)} in {call}" for call, ranks in zip(CALLS, sums, strict=False) if ranks]
            raise UserCodeError(
                f"of {self._size} ranks {' and '.join(said)}: every rank makes the same calls of its run in the same "
                "order; let no `if` that is true on one rank alone decide on a `break` or on such a call"
            )
        return sums[len(CALLS) :]


def meet(call: Call, group: Collective, *, device: torch.device, number: float = 0.0) -> float:
    """The sum of `number` over `group`, once all of its ranks are in `call`. Raises what `Meeting.wait` does."""
    return Meeting(call, [number], group, device=device).wait()[0]


@dataclass(frozen=True)
class Tally:
    """Sums over all ranks of the agreement domain."""

    denominator: float
    samples: int
    tokens: int
    stop: bool
    buffers_move: bool = False


class PendingTally:
    """A tally under way; `wait` gives it."""

    def __init__(
        self,
        microbatches: Sequence[Batch],
        group: Collective,
        *,
        stop: bool,
        device: torch.device,
        buffers_move: bool = False,
    ) -> None:
        own = [
            sum(batch.weight for batch in microbatches),
            sum(batch.real_samples for batch in microbatches),
            sum(batch.tokens for batch in microbatches),
            float(stop),
            float(buffers_move),
        ]
        self._sums = Meeting("the next step", own, group, device=device)
        self._tally: Tally | None = None

    def wait(self) -> Tally:
        """Raises `DataError` where the whole global batch weighs nothing: there is nothing to average over; and
        `UserCodeError` where a rank does something else than the step.
        """
        if self._tally is not None:
            return self._tally
        denominator, samples, tokens, stop, buffers_move = self._sums.wait()
        if denominator <= 0:
            raise DataError(
                f"the weights of a global batch of {int(samples)} samples sum to {denominator:g}; the loss is divided "
                "by that sum. Every step needs at least one sample or token of positive weight"
            )
        self._tally = Tally(denominator, int(samples), int(tokens), stop > 0, buffers_move > 0)
        return self._tally


# The vote on a step, taken on the device.
#
# Whether norm and loss are finite decides whether there is an update, and how far it is clipped. A GPU computes both
# some time after the host has launched the backward. A host that waits for them lets the GPU run dry. So the kernels of
# the update get the outcome as tensors, and are launched at once; norm and loss travel to pinned memory meanwhile, and
# are read while the update runs: the host is back before the GPU has ended.
#
#     divisor = scale max(1, |g| / limit),   found_inf = 1 where |g| or the loss is not finite, else 0


class DeviceVote:
    """Of `norm`, the 2-norm of the agreed gradient, and `loss`, that of the global batch: scalars."""

    def __init__(self, norm: Tensor, loss: Tensor) -> None:
        both = torch.stack([norm.double(), loss.double().to(norm.device)])
        self._norm = both[0]
        self._on_host, self._copied = _to_host(both)
        total = both.sum()
        self.found_inf = (total - total).ne(0).float()  # NaN, which is not 0, where one of them is not finite
        """1.0: nothing is updated."""

    def divisor(self, scale: float, limits: Sequence[float]) -> Tensor | None:
        """What the gradients, which hold `scale`, are divided by, so that their norm is at most each of `limits`; None:
        they are as they are to be. A float32 scalar.
        """
        if not limits:
            return None if scale == 1.0 else torch.full((), scale, device=self._norm.device)
        over = self._norm if min(limits) == 1.0 else self._norm / min(limits)
        factor = over.clamp(min=1.0)
        return (factor if scale == 1.0 else factor * scale).float()

    def read(self) -> tuple[float, float]:
        """Norm and loss, when they are there. What was launched after them may still run."""
        norm, loss = _read(self._on_host, self._copied)
        return norm, loss

    @staticmethod
    def finite(norm: float, loss: float) -> bool:
        """What `found_inf` says, on the host."""
        return math.isfinite(norm) and math.isfinite(loss)


def read_numbers(numbers: Tensor) -> list[float]:
    """What a device has computed, when it is there. What was launched after it may still run."""
    return _read(*_to_host(numbers))


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.Event | None]:
    """The numbers in memory of the host, and the event after which they are there."""
    if not works_in_streams(numbers.device):
        return numbers, None
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    return there, torch.accelerator.current_stream(numbers.device).record_event()


def _read(on_host: Tensor, copied: torch.Event | None) -> list[float]:
    """What `_to_host` gave, when it is there."""
    if copied is not None:
        wait_for(copied)
    return on_host.tolist()


# Measures the gradient noise scale while training: the gradient of a part of the batch beside that of all of it.
#
# Each rank takes the norm of what it computed alone (`gradients.reducer.OwnGradient`); their mean over the ranks, and
# that of the sum, which every step computes anyway, are the two batch sizes of `cost.noise_scale`. It costs one pass
# over the gradients and an all-reduce of three numbers, in the steps in which it is due; layer by layer, another pass
# and two numbers a parameter.
#
# A gradient is a sum divided by the global denominator D, so that a part of weight D_r holds D_r / D of a mean.


DECAY = 0.95
"""Of the moving averages, for each measurement: about twenty of them."""


@dataclass(frozen=True)
class NoiseReading:
    """The moments of one step, their averages over this life of the run, and those of each layer where asked for."""

    step: Moments
    mean: Moments
    layers: Mapping[str, Moments] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Under the names of measurements; `noise/scale` counts samples."""
        whole = {"noise/scale": self.mean.scale, "noise/signal": self.step.signal, "noise/trace": self.step.trace}
        return whole | {f"noise/scale/{layer}": own.scale for layer, own in self.layers.items()}


class MeasuresLayers(Protocol):
    """What knows the layers of a model, and measures a gradient layer by layer."""

    @property
    def of_parameters(self) -> Mapping[str, str]:
        """The layer of each parameter, by name; the same on all ranks, in one order."""
        ...

    def norms(self, norm: float) -> Mapping[str, float]:
        """The 2-norms of the layers' gradients, `norm` being that of all. All ranks call it."""
        ...


class NoiseMeter:
    """Measures every `every` steps. `group`: all ranks; `counts`: is this rank the one that counts its samples?

    `separates_microbatches`: is a rank's first microbatch its part (else all that it has)? The averages are not in
    checkpoints: they start anew where a run goes on. `growth` is told of every reading. `layers`: each of them is
    measured, too.
    """

    def __init__(
        self,
        own: OwnGradient,
        group: Collective,
        *,
        every: int,
        counts: bool,
        separates_microbatches: bool,
        device: torch.device,
        growth: BatchGrowth | None = None,
        layers: MeasuresLayers | None = None,
    ) -> None:
        self._own, self._group, self._device = own, group, device
        self._growth, self._layers = growth, layers
        of_parameters = {} if layers is None else layers.of_parameters
        self._means = dict.fromkeys(dict.fromkeys(of_parameters.values()), MovingMoments(decay=DECAY))
        rows = {layer: row for row, layer in enumerate(self._means, start=1)}
        self._places = {name: rows[layer] for name, layer in of_parameters.items()}
        self._every, self._counts, self._separates_microbatches = every, counts, separates_microbatches
        self._mean = MovingMoments(decay=DECAY)

    def start(self, step: int) -> None:
        """Before the sync starts its step."""
        self._own.wanted = step % self._every == 0

    def reading(self, batches: Sequence[Batch], tally: Tally, *, norm: float, scale: float) -> NoiseReading | None:
        """The noise of a finite step, `norm` being that of the whole gradient; None where it is not due, and where one
        part has all samples, as in the few at the end of an epoch.

        `scale` is the loss scale that is still in the gradients. Every rank calls it, or none does.
        """
        if not self._own.wanted:
            return None
        squares, inverse, parts = self._over_ranks(
            batches[:1] if self._separates_microbatches else batches, tally, scale
        )
        if inverse * tally.samples <= parts:
            return None

        def of(square: float, whole: float) -> Moments:
            return moments(square / parts, whole**2, small_inverse=inverse / parts, big_inverse=1 / tally.samples)

        one = of(squares[0], norm)
        self._mean = self._mean.after(one)
        if self._growth is not None:
            self._growth.note(one)
        norms = {} if self._layers is None else self._layers.norms(norm)
        for (layer, mean), square in zip(self._means.items(), squares[1:], strict=True):
            self._means[layer] = mean.after(of(square, norms.get(layer, 0.0)))
        return NoiseReading(one, self._mean.mean, {layer: mean.mean for layer, mean in self._means.items()})

    def _over_ranks(self, part: Sequence[Batch], tally: Tally, scale: float) -> tuple[list[float], float, float]:
        """Sums over all parts: squared norms of their mean gradients, of all and by layer, inverses of their samples,
        and how many.
        """
        weight, samples = sum(batch.weight for batch in part), sum(len(batch) for batch in part)
        own = self._own.squares(self._places, self._device)
        squares = own * (tally.denominator / (weight * scale)) ** 2 if weight else torch.zeros_like(own)
        counts = float(self._counts and weight > 0)
        mine = torch.tensor([counts / max(1, samples), counts], dtype=torch.float64, device=self._device)
        sums = torch.cat([squares, mine])
        if self._group.size > 1:
            self._group.all_reduce(sums).wait()
        *total, inverse, parts = sums.tolist()
        return total, inverse, parts


# What a step did, and what it took.


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, without overlap: they add up to it.

    `sync_exposed_s` is what the caller stood still for the wire, wherever that was; `optimizer_s` holds norm and clip.
    """

    forward_backward_s: float
    sync_exposed_s: float
    optimizer_s: float


@dataclass(frozen=True)
class StepResult:
    """What a step did. `norm` and `loss` are those of the whole global batch; `scale` is the loss scale it used.

    `agreed` is what all replicas know since; None if they did not agree in this step. `noise` is None where it was not
    due, or the step not finite. `wire` is what this rank sent, by operation. `skipped`: other replicas made the step
    without this one, which computed nothing.
    """

    loss: float
    norm: float
    scale: float
    committed: bool
    tally: Tally
    times: StepTimes
    bytes_sent: int
    agreed: Agreed | None = None
    noise: NoiseReading | None = None
    wire: Mapping[str, Entry] = field(default_factory=dict)
    skipped: bool = False
