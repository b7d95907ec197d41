"""A cluster and the program that runs on it: what operators and messages take there, whatever the model is."""

from __future__ import annotations

from shoal.cost.matmul import Rates
from shoal.cost.prices import Prices, RooflinePrices
from shoal.cost.wire import Links, group_of
from shoal.planner.predict.bill import Constants
from shoal.planner.predict.measured import Measured
from shoal.planner.predict.stack import Stack
from shoal.topology.cluster import Cluster


class Machine:
    """Prices by the roofline, or as they were measured. It keeps the groups it has looked up, and no other state."""

    def __init__(
        self, cluster: Cluster, *, stack: Stack, constants: Constants | None = None, measured: Measured | None = None
    ) -> None:
        self.cluster, self.stack = cluster, stack
        self.constants, self.measured = constants or Constants(), measured
        device, c = cluster.device, self.constants
        best = device.matmul_efficiency * c.compute
        self.rates = Rates(
            matmul_flops_s=device.peak_flops_s(stack.dtype) * best,
            memory_bytes_s=device.memory_bytes_s * c.memory_efficiency,
            units=device.units,
            tile=device.tile,
            kernel_s=c.kernel_s,
            peak_flops_s=device.peak_flops_s(stack.dtype),
            architecture=device.architecture,
            attention=stack.attention,
            float8_flops_s=None if stack.float8 == "none" else device.peak_flops_s("float8") * best,
        )
        self._roofline = RooflinePrices(self.rates)
        self._groups: dict[tuple[int, int, int], Links] = {}

    def prices(self, ranks: int) -> Prices:
        """What operators cost while `ranks` ranks are at work at once."""
        return self._roofline if self.measured is None else self.measured.prices(ranks)

    def group(self, ranks: int, *, stride: int, world: int) -> Links:
        """The group of `ranks` ranks of a world of `world` that lie `stride` apart, and its links."""
        key = (ranks, stride, world)
        if key not in self._groups:
            self._groups[key] = self._linked(ranks, stride, world)
        return self._groups[key]

    def _linked(self, ranks: int, stride: int, world: int) -> Links:
        if self.measured is not None:
            return self.measured.group(ranks, world)
        return group_of(self.cluster, ranks, stride=stride, world=world)
