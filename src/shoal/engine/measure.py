"""The measurements of a step, under the names that `docs/reference/measurements.md` lists."""

from __future__ import annotations

import json
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.board import Board
from shoal.comm.collective import Collective
from shoal.comm.ledger import Entry
from shoal.engine.state import Progress
from shoal.engine.tally import StepResult
from shoal.gradients.gradients import Gradients
from shoal.models.mixture import Mixture, expert_loads, load_figures
from shoal.resilience.detection import Lasting, Slow, Stragglers, ranks_of
from shoal.state import works_in_streams


def measurements(
    result: StepResult,
    progress: Progress,
    mixtures: Sequence[Mixture],
    *,
    lr: float,
    data_s: float,
    step_s: float,
    stall_s: float,
    device: torch.device,
    with_loads: bool = False,
) -> dict[str, float]:
    """One number a name. Times are this rank's; loss, norm and counts are the whole run's.

    `with_loads`: the load of every expert too, which may be thousands of numbers.
    """
    times, tally = result.times, result.tally
    values = {
        "loss/train": result.loss,
        "lr": lr,
        "grad/norm": result.norm,
        "samples/consumed": progress.samples,
        "time/step": step_s,
        "time/data": data_s,
        "time/forward_backward": times.forward_backward_s,
        "time/sync_exposed": times.sync_exposed_s,
        "time/optimizer": times.optimizer_s,
        "time/checkpoint_stall": stall_s,
        "wire/bytes_sent": result.bytes_sent,
        **wire_figures(result.wire),
        "memory/peak_bytes": peak_bytes(device),
        "throughput/samples_per_second": tally.samples / step_s,
        "steps/skipped": progress.skipped,
    }
    values |= load_figures(mixtures) | (expert_loads(mixtures) if with_loads else {})
    values |= result.noise.values() if result.noise is not None else {}
    if tally.tokens:
        values |= {"tokens/consumed": progress.tokens, "throughput/tokens_per_second": tally.tokens / step_s}
    return values


def wire_figures(wire: Mapping[str, Entry]) -> dict[str, float]:
    """Bytes by link level, and for each collective its bytes and the seconds exposed and hidden."""
    figures: dict[str, float] = {
        "wire/inside_bytes": sum(entry.inside_bytes for entry in wire.values()),
        "wire/between_bytes": sum(entry.between_bytes for entry in wire.values()),
    }
    for operation, entry in wire.items():
        figures[f"wire/{operation}/bytes_sent"] = entry.bytes_sent
        figures[f"wire/{operation}/exposed_s"] = entry.exposed_s
        figures[f"wire/{operation}/hidden_s"] = entry.hidden_s
    return figures


def peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held: allocated on the accelerator, resident in the process on a CPU or under MPS,
    whose memory is the host's.
    """
    if works_in_streams(device):
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The gradient's 2-norm layer by layer, in the steps in which it is asked for.
#
#     |g_l| = |g| sqrt(s_l / sum_k s_k) with s_l = sum over p in l of n_p / c_p * sum over ranks |g_p|^2
#
# Each rank adds up the squares of what its optimizer owns. Several ranks may own the same numbers (replicas, tied
# weights): c_p counts what all of them own of a parameter, n_p what there is, so that each number counts once. |g| is
# the norm that the step has taken anyway, without the loss scale. It costs one pass over the gradients and one
# all-reduce of two numbers a parameter.


PREFIX = "grad/norm/"


class LayerNorms:
    """Measures every `every` steps, over the ranks of `group`, which take each step together.

    `sizes`: the elements of every parameter of the unsplit model by name, the same on all ranks.
    """

    def __init__(
        self, gradients: Gradients, group: Collective, sizes: Mapping[str, int], *, every: int, device: torch.device
    ) -> None:
        self._gradients, self._group, self._device, self._every = gradients, group, device, every
        self._sizes = torch.tensor(list(sizes.values()), dtype=torch.float64)
        self._index = {name: index for index, name in enumerate(sizes)}
        self.of_parameters: Mapping[str, str] = {name: layer_of(name) for name in sizes}
        """The layer of each parameter."""
        self._layers = list(self.of_parameters.values())
        self._figures: dict[str, float] = {}

    def due(self, step: int) -> Callable[[float], None] | None:
        """What is to be called with the norm of the whole gradient, once it is agreed; None in other steps."""
        return self._measure if step % self._every == 0 else None

    def take_figures(self) -> dict[str, float]:
        """`grad/norm/<layer>` of the step just taken, on the first rank of the group; {} where it was not due."""
        found, self._figures = self._figures, {}
        return found

    def _measure(self, norm: float) -> None:
        found = self.norms(norm)
        if self._group.rank == 0:
            self._figures = {PREFIX + layer: own for layer, own in found.items()}

    def norms(self, norm: float) -> dict[str, float]:
        """Those of the layers, `norm` being that of the whole gradient. All ranks of the group call it."""
        squares = self._squares()
        totals = torch.zeros(len(self._layers), dtype=torch.float64)
        known = squares[1] > 0
        totals[known] = squares[0, known] * self._sizes[known] / squares[1, known]
        by_layer: dict[str, float] = {}
        for layer, square, is_known in zip(self._layers, totals.tolist(), known.tolist(), strict=True):
            if is_known:  # not a part that a server updates
                by_layer[layer] = by_layer.get(layer, 0.0) + square
        whole = math.fsum(by_layer.values())
        return {layer: norm * math.sqrt(square / whole) if whole > 0 else norm for layer, square in by_layer.items()}

    def _squares(self) -> Tensor:
        """`[2, parameters]`: squared norms, and elements, of what all ranks own of each parameter."""
        own = torch.zeros(2, len(self._layers), dtype=torch.float64)
        indices, norms = [], []
        for owned in self._gradients.owned:
            gradient, index = owned.parameter.grad, self._index[owned.name]
            own[1, index] += owned.parameter.numel()
            if gradient is not None:
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                indices.append(index)
                norms.append(torch.linalg.vector_norm(values, dtype=_wide(values)))
        if norms:
            read = torch.stack([norm.double() for norm in norms]).cpu().square()
            own[0].index_add_(0, torch.tensor(indices), read)
        total = own.to(self._device)
        if self._group.size > 1:
            self._group.all_reduce(total).wait()
        return total.cpu()


def layer_of(parameter: str) -> str:
    """The layer of a parameter: its name up to the first number, `blocks.3` of `blocks.3.attention.query.weight`; where
    there is none, without its last part."""
    parts: Sequence[str] = parameter.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or parameter


def _wide(values: Tensor) -> torch.dtype:
    """The type in which a norm is added up: float32 at least; of complex numbers, their own."""
    if values.is_complex():
        return values.dtype
    return torch.promote_types(values.dtype, torch.float32)


# How fast each replica computes: measured in every step, judged, and what follows from it.
#
# A rank notes the seconds that forward and backward of its samples took, waits for the wire left out. Replicas tell
# each other what they have noted, and `resilience.detection` finds those that are slow. Who stays slow is named once:
#
#   in lock-step            by an all-gather, every few steps
#   with steps of their own by a board, every few steps of each, since the next agreement may be far away; rank 0 names
#
# Where work is divided by speed, the samples of further steps follow, from an agreement on, because all replicas have
# to change at the same step: replica k with n_k samples in t_k seconds has the speed
#
#     v_k = n_k / t_k,     and gets the share v_k / (v_1 + ... + v_R)
#
# At the point where this settles all t_k are equal, also where a step costs something beside its samples. A division
# that would gain little stays, because noise would move it in every round.


EVERY_STEPS = 4
"""Steps between two exchanges, where replicas take every step together, and between two of a rank's notes to others."""
LAST_STEPS = 16
"""Steps before an agreement that speeds are taken of."""
LEAST_GAIN = 0.05
"""Part of a step's time that another division must save."""

Say = Callable[[str], None]


class Noted(NamedTuple):
    """What this rank did in a step: samples that it computed, and the seconds of their forward and backward."""

    samples: int
    seconds: float


@dataclass
class ReplicaSpeeds:
    """The speeds of the `replicas` that `ranks`, all ranks of the run, belong to; this rank is one of `replica`, or of
    none (None) if it computes no gradients.

    `divide` is told new speeds, in samples a second, when the division of work should follow them; None: it is even.
    `warn` hears of each replica that stays slow, as `lasting` says. `board`: where replicas that take steps of their
    own tell each other; None: they are in lock-step.
    """

    ranks: Collective
    replica: int | None
    replicas: int
    device: torch.device
    warn: Say
    divide: Callable[[Sequence[float]], None] | None = None
    stragglers: Stragglers = field(default_factory=Stragglers)
    lasting: Lasting = field(default_factory=Lasting)
    clock: Callable[[], float] = time.monotonic
    board: Board | None = None
    speeds: Sequence[float] = ()
    _own: deque[Noted] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    _since: int = 0
    _divided: Sequence[float] = ()

    def __post_init__(self) -> None:
        self._told = None if self.board is None else SpeedBoard(self.board, self.ranks.rank, self.ranks.size)
        self._sample_s: deque[float] = deque(maxlen=self.stragglers.steps)
        self._steps = 0

    def took(self, noted: Noted) -> None:
        """This rank has taken a step."""
        if noted.samples and noted.seconds > 0:
            self._own.append(noted)
            self._sample_s.append(noted.seconds / noted.samples)

    def after_step(self, *, agreed: bool) -> None:
        """After every step of every rank, skipped ones too. `agreed`: all replicas have ended it together."""
        self._since, self._steps = self._since + 1, self._steps + 1
        if self._told is not None and self._steps % EVERY_STEPS == 0:
            self._told.tell(self.replica, self._sample_s)
            if self.ranks.rank == 0:
                self._name(self.stragglers.among({str(k): row for k, row in self._told.heard().items()}))
        if agreed and self._since >= EVERY_STEPS:
            self._since = 0
            self._exchange()

    def figures(self) -> dict[str, float]:
        """Of this replica: its speed at the last exchange, in samples a second."""
        if self.replica is None or not self.speeds:
            return {}
        return {"replica/samples_per_second": self.speeds[self.replica]}

    def _exchange(self) -> None:
        rows = self._gathered()
        steps = min(len(row) for row in rows)
        if not steps:
            return
        last = [row[-steps:] for row in rows]
        for number in range(steps if self._told is None else 0):
            self._judge([row[number] for row in last])
        self.speeds = [1 / median(noted.seconds / noted.samples for noted in row) for row in last]
        if self.divide is not None and self._worth_it():
            self._divided = self.speeds
            self.divide(self.speeds)

    def _gathered(self) -> list[list[Noted]]:
        """What each replica has noted since the last exchange. A replica is as slow as the slowest of its ranks."""
        replica = -1.0 if self.replica is None else float(self.replica)
        told = [replica, float(len(self._own)), *(number for noted in self._own for number in noted)]
        told += [0.0] * (2 + 2 * LAST_STEPS - len(told))
        self._own.clear()
        row = torch.tensor(told, dtype=torch.float64, device=self.device)
        everyone = torch.empty(self.ranks.size * row.numel(), dtype=torch.float64, device=self.device)
        self.ranks.all_gather(everyone, row).wait()
        found: list[list[Noted]] = [[] for _ in range(self.replicas)]
        for replica, count, *numbers in everyone.view(self.ranks.size, -1).tolist():
            if replica < 0:
                continue
            own = [Noted(int(numbers[2 * n]), numbers[2 * n + 1]) for n in range(int(count))]
            held = found[int(replica)] or own
            found[int(replica)] = [max(pair, key=lambda noted: noted.seconds) for pair in zip(held, own, strict=False)]
        return found

    def _judge(self, step: Sequence[Noted]) -> None:
        """One step of all replicas. Seconds are those of a sample, so that who was given less work is not fast."""
        self._name(self.stragglers.took({str(k): noted.seconds / noted.samples for k, noted in enumerate(step)}))

    def _name(self, slow: Sequence[Slow]) -> None:
        """Warns of who has been slow for long."""
        for one in self.lasting.newly(slow, self.clock()):
            self.warn(one.sentence(ranks_of(int(one.replica), self.ranks.size // self.replicas)))

    def _worth_it(self) -> bool:
        """Whether steps would end earlier than under the present division, by enough."""
        present = self._divided or [1.0] * self.replicas
        now_s = max(share / speed for share, speed in zip(present, self.speeds, strict=True)) / sum(present)
        return now_s * sum(self.speeds) > 1 + LEAST_GAIN


@dataclass
class SpeedBoard:
    """What `rank` of `ranks` ranks tells the others, by `board`: the seconds of a sample in each of its last steps.

    Nobody waits: what a rank has told is there until it tells anew, and who reads sees the newest.
    """

    board: Board
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        self._silent = set(range(self.ranks))

    def tell(self, replica: int | None, sample_s: Sequence[float]) -> None:
        """`replica`: that of this rank; None: it computes nothing."""
        self.board.publish(str(self.rank), json.dumps([replica, *sample_s]))

    def heard(self) -> dict[int, list[float]]:
        """The seconds of each replica that has told of any. It is as slow as the slowest of its ranks; ranks of a
        replica are in lock-step, and their steps are counted from the last.
        """
        self._silent = {rank for rank in self._silent if not self.board.published(str(rank))}
        found: dict[int, list[float]] = {}
        for told in self.board.collect([str(rank) for rank in range(self.ranks) if rank not in self._silent]):
            replica, *own = json.loads(told)
            if replica is not None:
                held = found.get(replica, own)
                last = zip(reversed(held), reversed(own), strict=False)
                found[replica] = [max(pair) for pair in last][::-1]
        return found
