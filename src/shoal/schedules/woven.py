"""The family of 1F1B: some forwards first, then forwards and backwards in turn.

A row follows from two orders and two numbers. The orders say in which sequence a rank forwards its microbatches
through its stages, and in which it takes them back; `warmup` is how many forwards come before the first backward, and
`lag` how many gradients of weights are put off, where the backward is split:

    F ... F | F B F B ... F B | B ... B            whole backward
    F ... F | F I F I F I W ... F I W | I W ... | W ... W    split, W number k right after I number k + lag

More warm-up fills the pipeline at the price of more stored activations; more lag keeps weights' gradients for the time
when the pipeline drains. With one stage a rank, of P, and rank r:

    schedule   warmup             lag   source
    GPipe      all                -     arXiv:1811.06965
    1F1B       P - 1 - r          -     PipeDream-flush, arXiv:2006.09503
    ZB-H1      P - 1 - r          r     arXiv:2401.10241, section 2
    ZB-H2      2 (P - 1 - r)      2 r   arXiv:2401.10241, section 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.schedules.action import Action

Visit = tuple[int, int]
"""(stage, microbatch)."""


def woven(
    forwards: Sequence[Visit], backwards: Sequence[Visit], *, warmup: int, lag: int | None = None
) -> tuple[Action, ...]:
    """One rank's row. `warmup` is cut to the forwards that there are; `lag` None: the backward is whole."""
    ahead = min(warmup, len(forwards))
    row = [Action("F", *visit) for visit in forwards[:ahead]]
    taken_back = _taken_back(backwards, lag)
    for visit in forwards[ahead:]:
        row += [Action("F", *visit), *next(taken_back)]
    for actions in taken_back:
        row += actions
    if lag is not None:
        row += [Action("W", *visit) for visit in backwards[max(0, len(backwards) - lag) :]]
    return tuple(row)


def _taken_back(backwards: Sequence[Visit], lag: int | None) -> Iterator[list[Action]]:
    for number, visit in enumerate(backwards):
        if lag is None:
            yield [Action("B", *visit)]
        else:
            late = [Action("W", *backwards[number - lag])] if number >= lag else []
            yield [Action("I", *visit), *late]


def in_rounds(stages: Sequence[int], microbatches: int, *, round_size: int) -> list[Visit]:
    """Depth first (arXiv:2104.04473): `round_size` microbatches through each of `stages`, then the next ones."""
    return [
        (stage, microbatch)
        for start in range(0, microbatches, round_size)
        for stage in stages
        for microbatch in range(start, start + round_size)
    ]
