"""Table `[sync]`: how replicas agree. Imports no torch."""

from __future__ import annotations

from shoal.config.table import Table


class AllReduce(Table, frozen=True, tag_field="kind", tag="allreduce"):
    """The replicas' gradients are summed by all-reduce in every step, while the backward still runs."""


SyncConfig = AllReduce
