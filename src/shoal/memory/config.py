"""The table `[memory]` of the run file. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.config.table import Table, says


class MemoryConfig(Table, frozen=True):
    """What a rank keeps, and what it does without."""

    zero: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=3)] | None,
        says(
            "What the ranks of `layout.shard` split: 1 the optimizer's state, 2 gradients too, 3 parameters too "
            "(arXiv:1910.02054); default: 3 where `layout.shard` is more than 1."
        ),
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "operators", "full"],
        says(
            "Activations computed again in the backward: none, those of attention (arXiv:2205.05198), all but the "
            "outputs of attention and of every second matrix product (arXiv:2410.06511), or all."
        ),
    ] = "none"
    recompute_layers: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0)]] | None,
        says("The blocks that `recompute` is applied to, from 0; default: all."),
    ] = None
    loss_chunks: Annotated[
        int,
        says(
            "Parts of a microbatch's tokens whose logits and losses are computed one after the other in training, and "
            "again in the backward, so that logits of all tokens are never there; for large vocabularies.",
            ge=1,
            le=1 << 12,
        ),
    ] = 1
