"""When replicas that take steps of their own agree: every H steps, or with an H that follows the loss. Pure.

AdaComm (Wang, Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update
SGD", arXiv:1810.08313, equations 17 and 18): rare agreements serve while the loss is high, frequent ones at the end.
With the losses F and learning rates lr of the first interval (0) and of the last one (l),

    H_l = ceil(sqrt(lr_0 F_l / (lr_l F_0)) H_0),    and at most H_(l-1) / 2 if that is not below H_(l-1)

The intervals of the paper are seconds; here they are steps, so that a run repeats itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Period:
    """Counts a replica's steps. `adapt_every`: steps of an interval; 0: the period stays."""

    def __init__(self, period: int, *, adapt_every: int = 0) -> None:
        self.period, self._first, self._adapt_every = period, period, adapt_every
        self._agreed = self._adapted = 0
        self._start: tuple[float, float] | None = None

    def due(self, step: int) -> bool:
        """Whether replicas agree after `step`."""
        return step % self.period == 0 if not self._adapt_every else step - self._agreed >= self.period

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
        self.period = max(1, wanted if wanted < self.period else self.period // 2)

    def to_state(self) -> dict[str, Any]:
        """For a checkpoint; nothing if the period stays."""
        if not self._adapt_every:
            return {}
        return {"period": self.period, "agreed": self._agreed, "adapted": self._adapted, "start": self._start}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_state`; a run whose period stays leaves it."""
        if not self._adapt_every or not state:
            return
        self.period, self._agreed, self._adapted = state["period"], state["agreed"], state["adapted"]
        self._start = None if state["start"] is None else (state["start"][0], state["start"][1])
