"""A batch that grows when its gradient has become noisy enough to pay for it (`batch.adaptive`).

With the noise scale B of the gradient (`cost.noise_scale`; arXiv:1812.06162), steps of far fewer samples than B waste
little of them, and steps of far more gain little. So steps begin small, and double while

    share x B >= twice their size

B is the ratio of two means over the readings so far. All ranks have the same readings, which are sums over all ranks,
and so take the same decision without a message. What was decided, and the means, are in checkpoints: a run that goes
on decides as one that was not interrupted.

The feed reads steps ahead of the one that is trained on. When the size changes it is opened again, where the run
stands: what it had read ahead is read once more, and no sample is left out or used twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from shoal.cost.noise_scale import Moments, MovingMoments
from shoal.data.config import AdaptiveBatch
from shoal.data.feed import FedStep, Feed
from shoal.observe.capsule import NEXT_SAMPLES

DECAY = 0.9
"""Of the means, for each reading: about ten of them."""


class BatchGrowth:
    """How large steps are now, `samples`, and what is known of their noise. `fed` is the size of the step that was
    handed over last: a decision that its reading makes counts from the next one on.
    """

    def __init__(self, config: AdaptiveBatch, *, largest: int) -> None:
        self._config, self._largest = config, largest
        self.samples = self.fed = config.first
        self._mean, self._readings = MovingMoments(decay=DECAY), 0

    def note(self, reading: Moments) -> None:
        """A step's noise was measured."""
        self._mean, self._readings = self._mean.after(reading), self._readings + 1
        scale = self._mean.mean.scale
        if self._readings < self._config.readings or not math.isfinite(scale) or self.samples == self._largest:
            return
        if self._config.share * scale >= 2 * self.samples:
            self.samples, self._readings = min(2 * self.samples, self._largest), 0

    def figures(self) -> dict[str, float]:
        """The samples of the step that follows."""
        return {NEXT_SAMPLES: float(self.samples)}

    def to_state(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        sums = self._mean.sums
        means = {"signal": sums.signal, "trace": sums.trace, "weight": self._mean.weight}
        return {"samples": self.samples, "readings": self._readings, **means}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, with steps no larger than they may be now."""
        self.samples = self.fed = min(int(state["samples"]), self._largest)
        self._readings = int(state["readings"])
        sums = Moments(signal=float(state["signal"]), trace=float(state["trace"]))
        self._mean = MovingMoments(decay=DECAY, sums=sums, weight=float(state["weight"]))


class GrowingFeed:
    """A feed whose steps are as large as `growth` says when they are asked for. `opened` opens one of steps of a size,
    where the run stands.
    """

    def __init__(self, growth: BatchGrowth, opened: Callable[[int], Feed]) -> None:
        self._growth, self._opened = growth, opened
        self._feed, self._samples = opened(growth.samples), growth.samples

    def next(self) -> FedStep:
        """The next step. Raises what `Feed.next` does."""
        if self._samples != self._growth.samples:
            self._feed.close()
            self._feed, self._samples = self._opened(self._growth.samples), self._growth.samples
        self._growth.fed = self._samples
        return self._feed.next()

    def sample_ids(self, positions: np.ndarray) -> np.ndarray:
        """As `Feed.sample_ids`."""
        return self._feed.sample_ids(positions)

    def close(self) -> None:
        """Stops reading."""
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
