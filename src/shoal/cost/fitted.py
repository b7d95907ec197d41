"""Groups whose collectives were measured on this machine: alpha + beta S, as `topology.calibration` counts S."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.topology.calibration import CollectiveFit


@dataclass(frozen=True, kw_only=True)
class FittedGroup:
    """The same questions as `cost.wire.Group` answers. `fits` by operation; `crowd` multiplies all of them."""

    ranks: int
    fits: Mapping[str, CollectiveFit]
    crowd: float = 1.0

    @property
    def local(self) -> int:
        """All are on one node."""
        return self.ranks

    @property
    def spans_nodes(self) -> bool:
        """All are on one node."""
        return False

    @property
    def bytes_s(self) -> float:
        """Of a long message from one rank to the next."""
        return 1 / max(self.crowd * self.fits["send"].beta_s, 1e-15)

    def all_reduce(self, size: float) -> float:
        """Seconds to sum `size` bytes over the group."""
        return self._seconds("all_reduce", size)

    def all_gather(self, size: float) -> float:
        """Seconds until every rank has all `size` bytes."""
        return self._seconds("all_gather", size)

    def reduce_scatter(self, size: float) -> float:
        """Seconds until every rank has its part of the sum of `size` bytes."""
        return self._seconds("reduce_scatter", size)

    def all_to_all(self, size: float) -> float:
        """Seconds to exchange `size` bytes of every rank with all others."""
        return self._seconds("all_to_all", size)

    def send(self, size: float) -> float:
        """Seconds for `size` bytes from one rank to the next."""
        return self._seconds("send", size)

    def _seconds(self, operation: str, size: float) -> float:
        if self.ranks == 1:
            return 0.0
        fit = self.fits[operation]
        return self.crowd * (fit.alpha_s + fit.beta_s * size)
