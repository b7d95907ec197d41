"""When replicas that take steps of their own agree: every H steps, or with an H that follows the loss, or the link.

AdaComm (Wang, Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update
SGD", arXiv:1810.08313, equations 17 and 18): rare agreements serve while the loss is high, frequent ones at the end.
With the losses F and learning rates lr of the first interval (0) and of the last one (l),

    H_l = ceil(sqrt(lr_0 F_l / (lr_l F_0)) H_0),    and at most H_(l-1) / 2 if that is not below H_(l-1)

The intervals of the paper are seconds; here they are steps, so that a run repeats itself.

The period may follow the link instead (`LinkPace`). Where an agreement takes a and a step s seconds, agreements take
the share w of the time with a period of

    H = a (1 - w) / (w s)

Replicas agree on a and s, so they choose alike: a is that of the replica that came last, which waited for nobody, and
s that of the slowest. After a change of the link the old period counts once or twice more: the median of three.

With both, H is the longer one of what loss and link ask for. A young model, which rare agreements serve well, begins
with the longest period; one that has come near its goal agrees as often as the link allows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.comm.collective import Collective
from shoal.sync.config import LocalConfig
from shoal.sync.event_order import AsTheyCome, Rounds

MEDIAN_OF = 3
"""Agreements whose seconds say what the link does now."""


class Period:
    """Counts a replica's steps. Pure. `adapt_every`: steps of an interval; 0: the period stays, unless the link `moves`
    it.
    """

    def __init__(self, period: int, *, adapt_every: int = 0, moves: bool = False) -> None:
        self._period, self._first, self._adapt_every = period, period, adapt_every
        self._moves, self._least = moves or bool(adapt_every), 1
        self._agreed = self._adapted = 0
        self._start: tuple[float, float] | None = None

    @property
    def period(self) -> int:
        """Steps between two agreements."""
        return max(self._period, self._least)

    def follow(self, period: int) -> None:
        """The link asks for `period`: at least, where the period follows the loss, too."""
        if self._adapt_every:
            self._least = period
        else:
            self._period = period

    def due(self, step: int) -> bool:
        """Whether replicas agree after `step`."""
        return step - self._agreed >= self.period if self._moves else step % self.period == 0

    def agreed(self, step: int, *, loss: float, lr: float) -> None:
        """Replicas agreed after `step`; `loss` is the mean of theirs since the last agreement."""
        self._agreed = step
        if not self._adapt_every or not math.isfinite(loss) or loss <= 0 or lr <= 0:
            return
        if self._start is None:
            self._start = (loss, lr)
        if step - self._adapted < self._adapt_every:
            return
        self._adapted = step
        first_loss, first_lr = self._start
        wanted = math.ceil(math.sqrt(first_lr / lr * loss / first_loss) * self._first)
        self._period = max(1, wanted if wanted < self._period else self._period // 2)

    def to_state(self) -> dict[str, Any]:
        """For a checkpoint; nothing if the period stays."""
        if not self._moves:
            return {}
        return {
            "period": self._period, "least": self._least, "agreed": self._agreed, "adapted": self._adapted,
            "start": self._start,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_state`; a run whose period stays leaves it."""
        if not self._moves or not state:
            return
        self._period, self._agreed, self._adapted = state["period"], state["agreed"], state["adapted"]
        self._least = state.get("least", 1)
        self._start = None if state["start"] is None else (state["start"][0], state["start"][1])


class LinkPace:
    """Measures agreements and the steps between them on `replicas`, and says which period the link asks for.

    `rounds` records what is chosen, or repeats what was. `clock` counts seconds.
    """

    def __init__(
        self, config: LocalConfig, replicas: Collective, device: torch.device, *, rounds: Rounds | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._config, self._replicas, self._device = config, replicas, device
        self._rounds, self._clock = rounds, clock
        self._agreements_s: deque[float] = deque(maxlen=MEDIAN_OF)
        self._since_s = clock()

    def begin(self) -> None:
        """An agreement begins."""
        self._begun_s = self._clock()

    def end(self, step: int, steps: int) -> int:
        """The agreement after `step`, and `steps` since the last one, is over: the period from now on."""
        now_s = self._clock()
        # Negative: one maximum finds the longest step, and the shortest agreement, in which others wait for the last.
        own = [self._begun_s - now_s, (self._begun_s - self._since_s) / max(1, steps)]
        told = torch.tensor(own, dtype=torch.float64, device=self._device)
        self._replicas.all_reduce(told, "max").wait()
        less_agreement_s, step_s = told.tolist()
        self._agreements_s.append(-less_agreement_s)
        order = AsTheyCome() if self._rounds is None else self._rounds.begin()
        chosen = order.decided(f"p{by_link(self._config, statistics.median(self._agreements_s), step_s)}")
        if self._rounds is not None:
            self._rounds.end(step)
        self._since_s = self._clock()
        return int(chosen[1:])


def by_link(config: LocalConfig, agreement_s: float, step_s: float) -> int:
    """Steps between agreements of `agreement_s`, so that these take `config.wait_share` of the time."""
    share = config.wait_share
    wanted = agreement_s * (1 - share) / (share * max(step_s, 1e-9))
    return max(config.period, min(config.longest_period, math.ceil(wanted)))
