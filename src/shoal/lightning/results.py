"""What `self.log` collects, over all ranks.

A value of an epoch is always that of all ranks: the mean over samples, the sum, the smallest or the largest, whatever
`sync_dist` says. One of a step is this rank's, as with Lightning, unless `sync_dist` asks for all. A copy of a sample,
which a rank computes that has none, adds nothing: to means and sums, and to metric objects of torchmetrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.lightning import exchange
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

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        meta = self[key].meta
        if self._samples() == 0 and isinstance(value, Tensor) and (meta.is_mean_reduction or meta.is_sum_reduction):
            value = torch.zeros_like(value)
        super().update_metrics(key, value, batch_size)  # pyright: ignore[reportAttributeAccessIssue]

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

    def kept(self) -> list[dict[str, Any]]:
        """What was logged of an epoch that is open, for a checkpoint: each rank's part of it."""
        found = []
        for metric in self.values():
            meta = metric.meta
            if not metric.is_tensor or not meta.on_epoch or metric.has_reset or meta.enable_graph:
                continue
            options = {each: getattr(meta, each) for each in _OPTIONS}
            options |= {"reduce_fx": meta.reduce_fx.__name__, "sync_dist": meta.sync.should}
            options |= {"rank_zero_only": meta.sync.rank_zero_only}
            counted = exchange.of_each(metric.cumulated_batch_size) if meta.is_mean_reduction else None
            found.append({"options": options, "value": exchange.of_each(metric.value), "counted": counted})
        return found

    def restore(self, kept: Sequence[Mapping[str, Any]], reduce: Callable[..., Any]) -> None:
        """Goes on from there, each rank with its part; `reduce` is the strategy's."""
        for each in kept:
            options = each["options"]
            self.log(**options, value=each["value"][0], sync_dist_fn=reduce, batch_size=1)  # pyright: ignore
            (metric,) = [m for m in self.values() if (m.meta.name, m.meta.fx) == (options["name"], options["fx"])]
            metric.value, metric._forward_cache = exchange.part_of(each["value"], options["reduce_fx"]), None
            if each["counted"] is not None:
                metric.cumulated_batch_size = exchange.part_of(each["counted"], "sum")


_OPTIONS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)


@contextmanager
def metrics_unchanged(owners: Sequence[Any]) -> Iterator[None]:
    """Behind it, the metric objects of modules and callbacks have counted what they had before."""
    metrics = [each for owner in owners for each in _metrics_of(owner)]
    before = [({n: _copied(getattr(each, n)) for n in each._defaults}, each._update_count) for each in metrics]
    yield
    for each, (states, count) in zip(metrics, before, strict=True):
        for name, value in states.items():
            setattr(each, name, value)
        each._update_count, each._computed = count, None


def _metrics_of(owner: Any) -> list[Any]:
    from torchmetrics import Metric

    modules = [owner] if isinstance(owner, nn.Module) else [m for m in vars(owner).values() if isinstance(m, nn.Module)]
    return [each for one in modules for each in one.modules() if isinstance(each, Metric)]


def _copied(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.detach().clone()
