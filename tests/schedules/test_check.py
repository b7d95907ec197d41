"""A table that cannot be run is refused; durations and pictures follow from the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.errors import LayoutError
from shoal.schedules.build import NAMES, build
from shoal.schedules.table import Action, ScheduleTable
from shoal.schedules.timeline import check, completing, drawn, timeline

GOOD = build("ZB-H1", ranks=2, microbatches=3)


def with_row(rank: int, row: list[Action]) -> ScheduleTable:
    return replace(GOOD, rows=tuple(tuple(row) if r == rank else old for r, old in enumerate(GOOD.rows)))


def swapped(one: Action, other: Action) -> list[Action]:
    exchange = {one: other, other: one}
    return [exchange.get(action, action) for action in GOOD.rows[one.stage]]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (with_row(0, list(GOOD.rows[0][1:])), "stage 0 does I W on microbatch 0"),
        (with_row(0, [*GOOD.rows[0], GOOD.rows[0][0]]), "stands 2 times"),
        (with_row(0, [*GOOD.rows[0], Action("F", 1, 0)]), "which rank 1 holds"),
        (with_row(0, [*GOOD.rows[0], Action("F", 0, 3)]), "there are 2 stages and 3 microbatches"),
        (with_row(1, [*GOOD.rows[1], Action("B", 1, 0)]), "stage 1 does B F I W"),
        (with_row(1, swapped(Action("I", 1, 0), Action("W", 1, 0))), "rank 1 before W0 of stage 1"),
        (with_row(0, swapped(Action("F", 0, 0), Action("I", 0, 2))), "wait for each other"),
        (with_row(1, swapped(Action("F", 1, 1), Action("F", 1, 0))), "wait for each other"),
    ],
)
def test_planted_faults_are_found(table: ScheduleTable, sentence: str) -> None:
    """Work left out, doubled, misplaced, W before I, and two orders in which ranks wait for each other."""
    with pytest.raises(LayoutError, match=sentence):
        check(table)


def test_timeline_of_one_microbatch_is_the_chain_of_its_actions() -> None:
    """Forward down and backward up, one after the other, with a transfer at each hop."""
    table = build("1F1B", ranks=3, microbatches=1)
    times = timeline(table, forward_s=[1, 2, 3], backward_input_s=4, backward_weight_s=0.5, send_s=0.25)
    assert times.makespan_s == pytest.approx(1 + 2 + 3 + 3 * 4.5 + 4 * 0.25)
    assert times.busy_s == pytest.approx((5.5, 6.5, 7.5))
    assert times.bubble == pytest.approx(1 - 19.5 / (3 * times.makespan_s))


def test_no_transfer_is_paid_between_stages_of_one_rank() -> None:
    """One rank with several stages has no bubble, however slow the wire."""
    for name in NAMES:
        table = build(name, ranks=1, microbatches=3)
        times = timeline(table, forward_s=1, backward_input_s=1, backward_weight_s=1, send_s=100)
        assert times.bubble == 0


def test_a_stage_is_complete_after_its_last_weights_gradient() -> None:
    for name in NAMES:
        table = build(name, ranks=2, microbatches=4)
        for rank, row in enumerate(table.rows):
            for action, stage in completing(table, rank).items():
                rest = row[row.index(action) + 1 :]
                assert not [a for a in rest if a.stage == stage and a.kind != "F"]


def test_text_shows_each_action_at_its_time() -> None:
    """1F1B on 2 ranks, as papers draw it."""
    assert drawn(build("1F1B", ranks=2, microbatches=2)).splitlines() == [
        "1F1B: 2 ranks, 2 microbatches",
        "rank 0 | F0 F1 .. .. B0 -- .. B1 --",
        "rank 1 | .. F0 B0 -- F1 B1 -- .. ..",
        "idle: 33.3% 33.3% (mean 33.3%); stored activations, at most: 2 1",
    ]
