"""How one step's positions are divided: over the replicas that are present, then into microbatches.

Both are contiguous cuts of an interval. Sizes may differ, by at most one group of samples: uneven is legal, because
the loss is a sum over a global denominator. A *group* is what batch statistics are taken over; no cut goes through one,
so that statistics do not depend on how many replicas there are.
"""

from __future__ import annotations

from shoal.data.interval import Interval
from shoal.errors import ConfigError


def share(interval: Interval, *, replicas: int, replica: int, group: int = 1) -> Interval:
    """The part of `interval` that replica `replica` of `replicas` computes; empty where groups run out.

    Raises:
        ConfigError: `interval` is not a whole number of groups.
        ValueError: `replica` is not one of 0 .. replicas - 1.
    """
    if not 0 <= replica < replicas:
        raise ValueError(f"replica {replica} of {replicas}: it must be in 0 .. {replicas - 1}")
    groups, rest = divmod(len(interval), group)
    if rest:
        raise ConfigError(
            f"A step of {len(interval)} samples does not divide into statistics groups of {group}: make "
            f"batch.global_samples a multiple of {group}."
        )
    bounds = [interval.start + group * (groups * edge // replicas) for edge in (replica, replica + 1)]
    return Interval(*bounds)


def microbatches(interval: Interval, micro_samples: int) -> list[Interval]:
    """Consecutive cuts of `micro_samples` positions, the last one maybe shorter; none of an empty interval.

    Raises:
        ValueError: `micro_samples` is not positive.
    """
    if micro_samples < 1:
        raise ValueError(f"microbatches of {micro_samples} samples: they need at least 1")
    starts = range(interval.start, interval.stop, micro_samples)
    return [Interval(start, min(start + micro_samples, interval.stop)) for start in starts]
