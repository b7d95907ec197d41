"""Which parameters share a flat buffer under ZeRO. Pure, but for the names of the ranks.

A chunk's parameters have one dtype, one device, one set of ranks over which their gradients add up, and one over which
they are cut. Stages 1 and 2 cut chunks by size, like any gradient bucket; stage 3 has one for each unit, which is a
block of the model, or all that is in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shoal.comm.buckets.cut import Member, cut
from shoal.gradients.config import GradientsConfig
from shoal.sync.owned import Trained, same_piece
from shoal.topology.holding import Ranks


@dataclass(frozen=True)
class Chunk:
    """Parameters, by index, in the order in which they lie in the buffer; `unit` counts blocks, -1 for the rest."""

    indices: tuple[int, ...]
    shard: Ranks
    others: Ranks
    unit: int = -1


def chunks_by_size(trained: Sequence[Trained], config: GradientsConfig) -> list[Chunk]:
    """For stages 1 and 2, in the order in which they are sent."""
    members = [_member(index, t, -1) for index, t in enumerate(trained)]
    plan = cut(members, first_bytes=config.first_bucket_bytes, bytes_limit=config.bucket_size)
    return [_chunk(trained, [member.index for member in bucket], -1) for bucket in plan]


def chunks_by_unit(trained: Sequence[Trained], units: Sequence[int]) -> list[Chunk]:
    """For stage 3, in the order in which they are sent; `units` says which unit each parameter belongs to."""
    members = [_member(index, t, units[index]) for index, t in enumerate(trained)]
    no_limit = 1 + sum(member.bytes for member in members)
    plan = cut(members, first_bytes=no_limit, bytes_limit=no_limit)
    return [_chunk(trained, [m.index for m in bucket], units[bucket[0].index]) for bucket in plan]


def units_of(trained: Sequence[Trained], blocks: Sequence[nn.Module]) -> list[int]:
    """The block that each parameter belongs to; -1 for one of none, or of several."""
    homes: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            homes.setdefault(id(parameter), set()).add(number)
    found = [homes.get(id(t.parameter), set()) for t in trained]
    return [next(iter(home)) if len(home) == 1 else -1 for home in found]


def _member(index: int, trained: Trained, unit: int) -> Member:
    parameter, holding = trained.parameter, trained.holding
    kind = (parameter.dtype, parameter.device, holding.sums, holding.shard, unit)
    return Member(index, parameter.numel(), parameter.numel() * parameter.element_size(), kind)


def _chunk(trained: Sequence[Trained], indices: Sequence[int], unit: int) -> Chunk:
    holding = trained[indices[0]].holding
    return Chunk(tuple(indices), holding.shard, same_piece(holding, holding.sums), unit)
