"""What `self.log` collects, over all ranks.

A value of an epoch is always that of all ranks: the mean over samples, the sum, the smallest or the largest, whatever
`sync_dist` says. One of a step is this rank's, as with Lightning, unless `sync_dist` asks for all. A copy of a sample,
which a rank computes that has none, weighs nothing in a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.lightning.package import part

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
else:
    result = part("trainer.connectors.logger_connector.result")
    _ResultCollection, _ResultMetric = result._ResultCollection, result._ResultMetric


class Results(_ResultCollection):
    """See above. `samples` gives those of the batch that this rank is at; None: as many as the batch has."""

    def __init__(self, *, training: bool, samples: Callable[[], int | None]) -> None:
        super().__init__(training)
        self._samples = samples

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        if self._samples() == 0:
            return 0
        return super()._extract_batch_size(value, batch_size, meta)

    @staticmethod
    def _get_cache(result_metric: _ResultMetric, on_step: bool) -> Tensor | None:
        sync = result_metric.meta.sync
        if on_step or not result_metric.is_tensor or sync.rank_zero_only or result_metric._computed is not None:
            return _ResultCollection._get_cache(result_metric, on_step)
        asked, sync.should = sync.should, True
        try:
            return _ResultCollection._get_cache(result_metric, on_step)
        finally:
            sync.should = asked

    def kept(self, reduce: Callable[..., Any]) -> list[dict[str, Any]]:
        """What was logged of an epoch that is open, over all ranks, for a checkpoint; `reduce` is the strategy's."""
        found = []
        for metric in self.values():
            meta = metric.meta
            if not metric.is_tensor or not meta.on_epoch or metric.has_reset or meta.enable_graph:
                continue
            name = meta.reduce_fx.__name__
            operation = "sum" if name == "mean" else name
            counted = reduce(metric.cumulated_batch_size, reduce_op="sum") if name == "mean" else None
            options = {each: getattr(meta, each) for each in _OPTIONS}
            options |= {"reduce_fx": name, "sync_dist": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
            value = metric.value if meta.sync.rank_zero_only else reduce(metric.value, reduce_op=operation)
            found.append({"options": options, "value": value, "counted": counted})
        return found

    def restore(self, kept: Sequence[Mapping[str, Any]], reduce: Callable[..., Any], *, first: bool) -> None:
        """Goes on from there. Of a sum the `first` rank has all, and the others begin at 0."""
        for each in kept:
            name, reduction, value = each["options"]["name"], each["options"]["reduce_fx"], each["value"]
            options = each["options"]
            self.log(**options, value=value, sync_dist_fn=reduce, batch_size=1)  # pyright: ignore
            (metric,) = [m for m in self.values() if m.meta.name == name and m.meta.fx == options["fx"]]
            metric.value = value if first or reduction in ("min", "max") else value * 0
            metric._forward_cache = None
            if each["counted"] is not None:
                metric.cumulated_batch_size = each["counted"] if first else each["counted"] * 0


_OPTIONS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)
