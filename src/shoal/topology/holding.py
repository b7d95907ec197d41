"""`Holding`: what one rank holds of one parameter of the unsplit model, and with whom it has to agree on it.

Every question about a split parameter has its answer here: gradient sync asks `sums`, ZeRO asks `shard`, the norm and
the parameter count ask `counts`, checkpoints ask `box`, messages ask `placement` for the axes.

    sums     ranks whose gradients of this part add up to the gradient of the global batch, this one included
    shard    those of them, inside one replica, over which ZeRO cuts this part and its optimizer state
    holders  ranks of one replica that hold the same numbers; the first of them counts them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.topology.axes import Kind, Placement, placed
from shoal.topology.box import Box, Dims, whole
from shoal.topology.layout import Layout

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """One parameter on one rank, by the name it has in the unsplit model. Ranks are those of the world, ascending."""

    name: str
    global_shape: Dims
    box: Box
    placement: Placement
    rank: int
    sums: Ranks
    shard: Ranks
    holders: Ranks

    @property
    def counts(self) -> bool:
        """Is this the rank of its replica at which these numbers are counted?"""
        return self.rank == self.holders[0]


def held(
    layout: Layout,
    rank: int,
    name: str,
    global_shape: Dims,
    *,
    kind: Kind = "dense",
    box: Box | None = None,
    twins: Iterable[int] | None = None,
    tensor_split: bool = False,
    tensor_partial: bool = False,
    tied: Iterable[int] = (),
) -> Holding:
    """The holding of a parameter.

    `box` is the part of it that this rank holds (None: all). For a dense parameter, `twins` are the places along
    `tensor` that hold the same part as this rank (default: itself alone where `tensor_split`, else all of them), and
    `tensor_partial` says that each of them computes one term of the gradient and not the whole. `tied` are the places
    along `pipeline` that hold this parameter, when several stages do: their gradients add up too.
    """
    if kind == "expert":
        placement = placed("expert")
        sums = layout.group(("replicate", "expert_shard"), rank)
        shard = layout.group("expert_shard", rank)
        return Holding(name, global_shape, box or whole(global_shape), placement, rank, sums, shard, shard)
    tensor, stage = layout.index("tensor", rank), layout.index("pipeline", rank)
    default = [tensor] if tensor_split else range(layout.tensor)
    same = sorted(default if twins is None else twins)
    stages = sorted({stage, *tied})
    summing = same if tensor_partial else [tensor]
    batch, inside = layout.group(("replicate", "shard", "context"), rank), layout.group(("shard", "context"), rank)
    placement = placed(
        "dense",
        sharded=("tensor",) if tensor_split else (),
        partial=(*(("tensor",) if tensor_partial else ()), *(("pipeline",) if len(stages) > 1 else ())),
    )
    return Holding(
        name,
        global_shape,
        box or whole(global_shape),
        placement,
        rank,
        sums=_at(layout, batch, stages, summing),
        shard=layout.group("shard", rank),
        holders=_at(layout, inside, stages, same),
    )


def _at(layout: Layout, ranks: Iterable[int], stages: Iterable[int], tensors: Iterable[int]) -> Ranks:
    """`ranks` moved to each of the given places along `pipeline` and `tensor`."""
    stages, tensors = set(stages), set(tensors)
    return tuple(
        sorted(
            other
            for rank in ranks
            for other in layout.group(("pipeline", "tensor"), rank)
            if layout.index("pipeline", other) in stages and layout.index("tensor", other) in tensors
        )
    )
