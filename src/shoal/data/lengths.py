"""Samples of like length side by side, so that a step that pads to its longest sample pads little.

Within an epoch the samples are permuted, and cut into windows of `WINDOW` steps. Each window is sorted by length and
cut into steps; its steps are permuted, and the samples within each of them, so that no rank always gets the longest.
Where a step goes on into the next epoch, that epoch begins with what completes it, of any lengths; so does a last step
end that is shorter.

A step of a window of S steps spans 1 / S of the lengths' distribution, whatever that is. Like every order, it is a pure
function of seed and position, and of the samples of a step: a run keeps those. It keeps one epoch in memory, 8 bytes a
sample, and the lengths.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from shoal.data.order import EpochInMemory, permuted
from shoal.errors import UserCodeError
from shoal.maths.counter import key_of, uniform

WINDOW = 64
"""Steps whose samples are sorted together."""


class LengthOrder(EpochInMemory):
    """The order of samples of which sample i has the length `lengths[i]`, in steps of `step` samples, which `straddle`
    the ends of epochs or not.
    """

    def __init__(self, lengths: np.ndarray, seed: int, *, step: int, straddle: bool = False) -> None:
        self._lengths, self._seed, self._step, self._straddle = lengths, seed, step, straddle

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return len(self._lengths)

    def _drawn(self, epoch: int) -> np.ndarray:
        key, samples, step = f"{self._seed}/{epoch}/lengths", self.samples, self._step
        ids = permuted(np.arange(samples, dtype=np.int64), samples, key=key)
        first = -epoch * samples % step if self._straddle else 0  # they complete the step before
        last = first + max(0, samples - first) // step * step
        whole = ids[first:last]
        numbers = np.arange(len(whole)) // step
        windows = numbers // WINDOW
        by_length = whole[np.lexsort((self._lengths[whole], windows))]
        of_steps, within = self._uniform(f"{key}/steps", -(-len(whole) // step)), self._uniform(key, len(whole))
        mixed = by_length[np.lexsort((within, of_steps[numbers], windows))]
        return np.concatenate([ids[:first], mixed, ids[last:]])

    def _uniform(self, key: str, count: int) -> np.ndarray:
        return uniform(key_of(self._seed, key), torch.arange(count), dtype=torch.float64).numpy()

    @property
    def digest(self) -> str:
        """Of the lengths and the steps that they are put into."""
        what = f"{self._step}/{self._straddle}/".encode() + np.ascontiguousarray(self._lengths).tobytes()
        return hashlib.blake2b(what, digest_size=8).hexdigest()


def lengths_of(values: object, samples: int) -> np.ndarray:
    """One length for each sample, float64 [samples]. Raises `UserCodeError` for anything else."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError, RuntimeError):
        found = np.empty(0)
    if found.shape != (samples,) or not np.isfinite(found).all():
        raise UserCodeError(
            f"data.group_by_length gives {list(found.shape)} for {samples} samples: it must be one finite number for "
            "each"
        )
    return found
