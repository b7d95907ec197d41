"""Random layouts, small enough that every rank of every group is looked at."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from shoal.topology.layout import DENSE, EXPERT, Axis, Layout

ALL_AXES: tuple[Axis, ...] = (*DENSE, "expert_shard", "expert")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout whose axes have at most 3 ranks, `expert` any divisor of what it may use; at most 243 ranks."""
    replicate, pipeline, shard, context, tensor = (draw(st.integers(1, 3)) for _ in DENSE)
    shared = prod((shard, context, tensor))
    expert = draw(st.sampled_from([size for size in range(1, shared + 1) if shared % size == 0]))
    return Layout(replicate=replicate, pipeline=pipeline, shard=shard, context=context, tensor=tensor, expert=expert)


def readings() -> st.SearchStrategy[tuple[Axis, ...]]:
    """The dense reading or the experts'."""
    return st.sampled_from([DENSE, EXPERT])


@st.composite
def some_axes(draw: st.DrawFn) -> tuple[Axis, ...]:
    """Some axes of one reading, in any order."""
    reading = draw(readings())
    return tuple(draw(st.lists(st.sampled_from(reading), unique=True)))
