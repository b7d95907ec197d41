"""Keys of a `[model]` table about a module that Shoal did not write. Imports no torch.

How it is split, where it does not say so itself (`shoal split` proposes these), and which samples depend on each other,
in batch norms or in a loss.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.config.table import Positive, Table, says


class ForeignKeys(Table, frozen=True, kw_only=True):
    """Roles and counts for `tensor`, parts for `pipeline`; groups of samples."""

    roles: Annotated[
        dict[str, Literal["column", "row", "packed", "embedding", "head", "replicated"]],
        says(
            "Names of weights, or patterns of them, to what tensor parallelism does with them, for a module that "
            "declares no roles; `shoal split` proposes them."
        ),
    ] = msgspec.field(default_factory=dict)
    counts: Annotated[
        list[str],
        says(
            "Integer attributes of modules, or patterns of them, such as a number of heads, of which each rank of "
            "`layout.tensor` has its share; `shoal split` proposes them."
        ),
    ] = msgspec.field(default_factory=list)
    parts: Annotated[
        Literal["declared", "traced"] | list[list[str]],
        says(
            "Where a pipeline is cut: between the parts that the module declares or that tracing its forward finds, or "
            "lists of modules, one a part, in the order in which the forward calls them; `shoal split` proposes them."
        ),
    ] = "declared"
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
        if not isinstance(self.parts, str) and not (self.parts and all(self.parts)):
            raise ValueError("parts has no parts, or one without modules: let `shoal split` propose them")
        if self.batch_norm == "grouped" and self.group_samples is None:
            raise ValueError(
                'batch_norm = "grouped" without group_samples: say how many consecutive samples share statistics'
            )
        if self.batch_norm == "synchronised" and self.group_samples is not None:
            raise ValueError(
                f'batch_norm = "synchronised" with group_samples = {self.group_samples}: its statistics are those of '
                'all samples of a microbatch, not of groups; leave group_samples out, or set batch_norm = "grouped"'
            )
