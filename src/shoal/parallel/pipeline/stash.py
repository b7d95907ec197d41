"""`Stash`: older versions of a stage's weights, one for each microbatch whose backward is still to come.

A backward is right only with the weights that its forward saw. So weights that a stored forward used are never written:
an update first gives the parameters storage of their own, and a backward gets the old storage back for as long as it
lasts. Versions that several microbatches share are stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class Stash:
    """Of the parameters of one stage."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = tuple(weights)
        self._latest = self._storage()
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    @property
    def versions(self) -> int:
        """Different versions stored, the latest included."""
        return len({id(version) for version in [self._latest, *self._kept.values()]})

    def keep(self, microbatch: int) -> None:
        """The latest weights are those of this microbatch."""
        self._kept[microbatch] = self._latest

    @contextmanager
    def restored(self, microbatch: int) -> Iterator[None]:
        """The weights are those that `microbatch` saw; afterwards the latest again."""
        self._point_to(self._kept[microbatch])
        try:
            yield
        finally:
            self._point_to(self._latest)

    def drop(self, microbatch: int) -> None:
        """The backward of this microbatch is done."""
        del self._kept[microbatch]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The weights may be written in place.

        Autograd refuses a backward through tensors that were written since; what it guards against cannot happen, for
        the storage that was seen is not the one that is written, so their versions are left as they were.
        """
        if any(version is self._latest for version in self._kept.values()):
            self._latest = tuple(weight.clone() for weight in self._latest)
            self._point_to(self._latest)
        with _unsafe_preserve_version_counter(self._weights):
            yield

    def _storage(self) -> tuple[Tensor, ...]:
        return tuple(weight.data for weight in self._weights)

    def _point_to(self, version: tuple[Tensor, ...]) -> None:
        for weight, data in zip(self._weights, version, strict=True):
            weight.data = data
