"""Table `[sync]`: how replicas agree. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from shoal.config.table import Table


class AllReduceConfig(Table, frozen=True, tag_field="kind", tag="allreduce"):
    """The replicas' gradients are summed by all-reduce in every step, while the backward still runs."""

    implemented_by: ClassVar[str] = "shoal.sync.allreduce:AllReduceSync"


SyncConfig = AllReduceConfig
