"""Samples of like length side by side, so that a step that pads to its longest sample pads little.

Within an epoch the samples are permuted, and cut into windows of `WINDOW` steps. Each window is sorted by length and
cut into steps; its steps are permuted, and the samples within each of them, so that no rank always gets the longest.
The last step of an epoch may be shorter, as in any order; it is the last one of its window, of any lengths.

A step of a window of S steps spans 1 / S of the lengths' distribution, whatever that is. Like every order, it is a pure
function of seed and position; it keeps one epoch in memory, 8 bytes a sample, and the lengths.
"""

from __future__ import annotations

import numpy as np

from shoal.data.order import permuted
from shoal.errors import UserCodeError

WINDOW = 64
"""Steps whose samples are sorted together."""


class LengthOrder:
    """The order of samples of which sample i has the length `lengths[i]`, in steps of `step` samples."""

    def __init__(self, lengths: np.ndarray, seed: int, *, step: int) -> None:
        self._lengths, self._seed, self._step = lengths, seed, step
        self._epoch: tuple[int, np.ndarray] | None = None

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return len(self._lengths)

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at global positions, int64 of the shape of `positions` (int64, none negative)."""
        epochs, indices = np.divmod(np.asarray(positions, dtype=np.int64), self.samples)
        ids = np.empty_like(indices)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = self._in_epoch(int(epoch))[indices[here]]
        return ids

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epoch in which each position falls, int64."""
        return np.asarray(positions, dtype=np.int64) // self.samples

    def _in_epoch(self, epoch: int) -> np.ndarray:
        """The ids of an epoch in order, int64 [samples]. Several threads may ask: the newest is kept."""
        kept = self._epoch
        if kept is None or kept[0] != epoch:
            kept = self._epoch = epoch, self._drawn(f"{self._seed}/{epoch}/lengths")
        return kept[1]

    def _drawn(self, key: str) -> np.ndarray:
        ids, size = _permutation(self.samples, key), WINDOW * self._step
        windows = [self._window(ids[at : at + size], f"{key}/{at}") for at in range(0, self.samples, size)]
        return np.concatenate(windows)

    def _window(self, ids: np.ndarray, key: str) -> np.ndarray:
        by_length = ids[np.argsort(self._lengths[ids], kind="stable")]
        whole = len(ids) // self._step * self._step
        spare = np.sort(_permutation(len(ids), f"{key}/spare")[: len(ids) - whole])  # of any length, for a short step
        kept = np.delete(by_length, spare).reshape(-1, self._step)
        steps = kept[_permutation(len(kept), f"{key}/steps")]
        mixed = [step[_permutation(self._step, f"{key}/{number}")] for number, step in enumerate(steps)]
        return np.concatenate([*mixed, by_length[spare]])


def _permutation(length: int, key: str) -> np.ndarray:
    return permuted(np.arange(length, dtype=np.int64), length, key=key) if length else np.empty(0, dtype=np.int64)


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
