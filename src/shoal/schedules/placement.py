"""Which rank holds which stage."""

from __future__ import annotations


def looped(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: every hop goes to the next rank, and from the last one back to the first."""
    return tuple(range(ranks)) * stages_per_rank


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again, two stages each: the first rank holds the first stage and the last one."""
    return tuple(range(ranks)) + tuple(reversed(range(ranks)))
