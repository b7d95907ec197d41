"""Keys of a `[model]` table about samples that depend on each other: in batch norms, or in a loss. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from shoal.config.table import Positive, Table, says


class SampleGroups(Table, frozen=True, kw_only=True):
    """What a model that Shoal did not write says about them."""

    group_samples: Annotated[
        Positive | None,
        says(
            "Consecutive samples that depend on each other, as in a contrastive loss; no rank and no microbatch cuts "
            "such a group, and a microbatch is one group by default."
        ),
    ] = None
    batch_norm: Annotated[
        Literal["refused", "grouped", "synchronised"],
        says(
            "Batch norms of the module: refused where ranks or microbatches would cut their batch; replaced by ones "
            "over groups of `group_samples` samples; or by ones over a microbatch of all ranks together, as PyTorch's "
            "`SyncBatchNorm`."
        ),
    ] = "refused"

    def __post_init__(self) -> None:
        if self.batch_norm == "grouped" and self.group_samples is None:
            raise ValueError(
                'batch_norm = "grouped" without group_samples: say how many consecutive samples share statistics'
            )
        if self.batch_norm == "synchronised" and self.group_samples is not None:
            raise ValueError(
                f'batch_norm = "synchronised" with group_samples = {self.group_samples}: its statistics are those of '
                'all samples of a microbatch, not of groups; leave group_samples out, or set batch_norm = "grouped"'
            )
