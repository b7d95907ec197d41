"""Every schedule at every size it takes can be run, and is the one that its name promises."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from shoal.errors import ConfigError, LayoutError
from shoal.schedules.build import NAMES, build
from shoal.schedules.table import ScheduleTable, forward_only
from shoal.schedules.timeline import check, in_flight, timeline

RANKS, MICROBATCHES, PER_RANK = (1, 2, 3, 4, 7, 8), (1, 2, 3, 4, 5, 6, 8, 9, 14, 16, 17), (1, 2, 3, 4)
FREE = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
ROUNDING = 1e-9  # sums of a few hundred durations
PROMISED = {  # makespan for F = I = W = 1 on 4 ranks x 8 microbatches x 1 stage (24 units of work) or 2 (48)
    "GPipe": 24 + 3 * 3,  # (P - 1)(F + I + W): arXiv:1811.06965
    "1F1B": 24 + 3 * 3,  # the same bubble, less memory
    "Interleaved1F1B": 48 + 3 * 3,  # the bubble of 1F1B in stages half as long: arXiv:2104.04473
    "LoopedBFS": 48 + 3 * 3,
    "InterleavedZeroBubble": 48 + 3 * 1,
    "ZB-H1": 24 + 3 * 1,  # (P - 1)(F + I - W): arXiv:2401.10241, table 2
    "ZB-H2": 24 + 3,  # no bubble, but ranks start P - 1 apart
    "ZBVZeroBubble": 48 + 3,
    "DualPipeV": 48 + 3,
    "PipeDream": 24 + 3 * 3,
}
STORED = {  # activations of whole ranks' worth of stages: the peak of arXiv:2401.10241's and 2006.09503's tables
    "GPipe": (8, 8, 8, 8),
    "1F1B": (4, 3, 2, 1),
    "ZB-H1": (4, 4, 4, 4),
    "ZB-H2": (7, 7, 7, 7),
    "ZBVZeroBubble": (8, 8, 8, 8),  # of half the size: as 1F1B's first rank
}


def sizes(name: str) -> Iterator[dict[str, int | None]]:
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            for per_rank in PER_RANK if name in FREE else (None,):
                yield {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": per_rank}


def unit_time(table: ScheduleTable):
    return timeline(table, forward_s=1, backward_input_s=1, backward_weight_s=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_runnable_or_refused_with_one_that_works(name: str) -> None:
    """No rank waits for ever, all work is done once; a refusal names the number found and a number that is taken."""
    for size in sizes(name):
        try:
            table = build(name, **size)  # pyright: ignore[reportArgumentType]
        except LayoutError as refusal:
            nearest = re.findall(r"\d+", re.split("nearest: |set ", str(refusal))[1])
            table = build(name, **{**size, "microbatches": int(nearest[0])})  # pyright: ignore[reportArgumentType]
        check(table)
        check(forward_only(table))


@pytest.mark.parametrize("name", PROMISED)
def test_bubble_is_that_of_the_literature(name: str) -> None:
    """Makespan in units of F = I = W."""
    assert unit_time(build(name, ranks=4, microbatches=8)).makespan_s == pytest.approx(PROMISED[name], rel=ROUNDING)


@pytest.mark.parametrize("name", STORED)
def test_stored_activations_are_those_of_the_literature(name: str) -> None:
    assert in_flight(build(name, ranks=4, microbatches=8)) == STORED[name]


def test_zb_h2_keeps_every_rank_busy_from_its_first_action_to_its_last() -> None:
    """The zero bubble of arXiv:2401.10241: idle only before a rank's first forward and after its last W."""
    for row in unit_time(build("ZB-H2", ranks=4, microbatches=12)).spans:
        assert row[-1][2] - row[0][1] == pytest.approx(3 * 12, rel=ROUNDING)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "1f1b", "ranks": 2, "microbatches": 2}, "did you mean '1F1B'"),
        ({"name": "1F1B", "ranks": 2, "microbatches": 0}, "0 microbatches"),
        ({"name": "1F1B", "ranks": 2, "microbatches": 2, "stages_per_rank": 2}, "exactly 1"),
        ({"name": "DualPipeV", "ranks": 4, "microbatches": 7}, "at least 8"),
        ({"name": "Interleaved1F1B", "ranks": 4, "microbatches": 9}, "nearest: 8 or 10"),
    ],
)
def test_refusals_name_the_number_and_the_repair(arguments: dict, sentence: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=re.escape(sentence)):
        build(**arguments)
