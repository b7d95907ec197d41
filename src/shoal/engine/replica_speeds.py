"""How fast each replica computes: measured in every step, judged, and what follows from it.

A rank notes the seconds that forward and backward of its samples took, waits for the wire left out. Replicas tell each
other what they have noted, and `resilience.detection` finds those that are slow. Who stays slow is named once:

    in lock-step            by an all-gather, every few steps
    with steps of their own by a board, every few steps of each, since the next agreement may be far away; rank 0 names

Where work is divided by speed, the samples of further steps follow, from an agreement on, because all replicas have to
change at the same step: replica k with n_k samples in t_k seconds has the speed

    v_k = n_k / t_k,     and gets the share v_k / (v_1 + ... + v_R)

At the point where this settles all t_k are equal, also where a step costs something beside its samples. A division that
would gain little stays, because noise would move it in every round.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch

from shoal.comm.board import Board
from shoal.comm.collective import Collective
from shoal.resilience.detection import Lasting, Slow, Stragglers, ranks_of

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
