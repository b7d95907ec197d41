"""Which gradients share a bucket. Pure, but for the names of the ranks.

Gradients become ready roughly in the reverse order in which parameters were registered. So buckets are filled from the
reversed list; the first of each kind is small, so that the wire is busy early (Li et al., PyTorch Distributed, VLDB
2020, section 3.2.3). The members of a bucket depend on the parameters of its own kind and on the limits alone: ranks
that share a kind (its group is a part of it) fill it alike, whatever else each of them holds, and so does a resumed
run.

ZeRO-3 has one bucket for each unit, which is a block of the model, or everything outside of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.comm.exchanges.exchange import Segment
from shoal.gradients.flat import FlatLayout
from shoal.state.ownership import Trained
from shoal.topology.holding import Holding, Ranks

GradientRanks = Callable[[Holding], Ranks]
"""Which ranks sum the gradient of a part in every step; the choice of `[sync]`."""


@dataclass(frozen=True)
class Member:
    """A gradient: its index in the parameter list, its length, and what it can share a buffer with.

    `kind` is everything that must be equal within one bucket: dtype, device, the ranks over which it is summed.
    """

    index: int
    numel: int
    bytes: int
    kind: Hashable


@dataclass(frozen=True)
class BucketParameters:
    """The parameters of one bucket, by index, in the order in which they lie in it.

    `sums` are the ranks that sum it, `shard` those of them that divide it; `unit` counts blocks, -1 for the rest.
    """

    indices: tuple[int, ...]
    sums: Ranks
    shard: Ranks
    unit: int = -1


def fill_buckets(members: Sequence[Member], *, first_bytes: int, bytes_limit: int) -> list[list[Member]]:
    """The buckets, in the order in which they are sent. A gradient larger than the limit has a bucket of its own.

    A bucket is sent after those whose last gradient is ready before its own: a kind with few gradients, spread over the
    whole model, delays no other.
    """
    buckets: list[list[Member]] = []
    of_kind: dict[Hashable, list[list[Member]]] = {}
    for member in reversed(members):
        mine = of_kind.setdefault(member.kind, [])
        limit = first_bytes if len(mine) == 1 else bytes_limit
        if not mine or sum(m.bytes for m in mine[-1]) + member.bytes > limit:
            mine.append([])
            buckets.append(mine[-1])
        mine[-1].append(member)
    return sorted(buckets, key=lambda bucket: -bucket[-1].index)


def parts_by_size(
    trained: Sequence[Trained], ranks: GradientRanks, *, bytes_limit: int, first_bytes: int, divided: bool
) -> list[BucketParameters]:
    """Buckets of at most `bytes_limit`, in the order in which they are sent.

    `divided`: ZeRO divides them over `shard`, so that parameters divided over other ranks cannot share a bucket.
    """
    units, first_bytes = [-1] * len(trained), min(first_bytes, bytes_limit)
    return _parts(trained, units, ranks, first_bytes=first_bytes, bytes_limit=bytes_limit, divided=divided)


def parts_by_unit(trained: Sequence[Trained], units: Sequence[int], ranks: GradientRanks) -> list[BucketParameters]:
    """A bucket for each unit and kind, in the order in which they are sent; `units` has each parameter's unit."""
    no_limit = 1 + sum(t.parameter.nbytes for t in trained)
    return _parts(trained, units, ranks, first_bytes=no_limit, bytes_limit=no_limit, divided=True)


def segments_of(trained: Sequence[Trained], part: BucketParameters, layout: FlatLayout, *, rank: int) -> list[Segment]:
    """What lies where in the piece of `rank`: whole parameters in their own shape, others flat."""
    found = []
    for number, index in enumerate(part.indices):
        run, t = layout.run(number, rank), trained[index]
        if run is not None:
            is_whole = run.numel == t.parameter.numel()
            found.append(Segment(t.holding.name, run.at, tuple(t.parameter.shape) if is_whole else (run.numel,)))
    return found


def units_of(trained: Sequence[Trained], blocks: Sequence[nn.Module]) -> list[int]:
    """The block that each parameter belongs to; -1 if none or several."""
    homes: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            homes.setdefault(id(parameter), set()).add(number)
    found = [homes.get(id(t.parameter), set()) for t in trained]
    return [next(iter(home)) if len(home) == 1 else -1 for home in found]


def _parts(
    trained: Sequence[Trained],
    units: Sequence[int],
    ranks: GradientRanks,
    *,
    first_bytes: int,
    bytes_limit: int,
    divided: bool,
) -> list[BucketParameters]:
    members = []
    for index, t in enumerate(trained):
        shard = t.holding.shard if divided else ()
        kind = (t.parameter.dtype, t.parameter.device, ranks(t.holding), shard, units[index])
        members.append(Member(index, t.parameter.numel(), t.parameter.nbytes, kind))
    found = []
    for bucket in fill_buckets(members, first_bytes=first_bytes, bytes_limit=bytes_limit):
        indices = tuple(member.index for member in bucket)
        holding = trained[indices[0]].holding
        found.append(BucketParameters(indices, ranks(holding), holding.shard, units[indices[0]]))
    return found
