"""What `benchmarks.random_faults` concludes from a record, on records made by hand."""

from __future__ import annotations

import signal

from benchmarks.random_faults import (
    BOUND_S,
    ELASTIC,
    RESTARTED,
    Trial,
    checks_of,
    expected_ids,
    hangs_of,
    misused,
    row_of,
    schedule,
)
from benchmarks.random_faults_job import BATCH, Used

STEPS = 20
HALF = BATCH // 2


def record(ids: list[int], *, again: int = 0) -> list[Used]:
    """Two ranks, a step a second, from second 1 on; step `again` is begun by the first rank alone, and then anew."""
    lines: list[Used] = []
    for step in range(1, len(ids) // BATCH + 1):
        own = ids[(step - 1) * BATCH : step * BATCH]
        lines += [Used(float(step), step, own[:HALF])] if step == again else []
        lines += [Used(float(step), step, own[:HALF]), Used(float(step), step, own[HALF:])]
    return lines


def row(lines: list[Used]) -> dict:
    """The row of an elastic trial which was stopped in step `STEPS`, and so has taken one less."""
    trial = Trial(ELASTIC, record=lines, begin_s=3.0, end_s=float(STEPS), exit_code=75)
    return row_of(trial, "0", 1.0)


def holds(found: dict) -> bool:
    return all(one["holds"] for one in checks_of([found]))


def test_a_step_that_is_taken_again_repeats_no_sample() -> None:
    """Its last time counts; the first one is `taken_again`."""
    for side in (ELASTIC, RESTARTED):
        ids = expected_ids(side, STEPS)
        assert misused(record(ids, again=7), STEPS - 1, ids[:-BATCH]) == (0, 0)
    found = row(record(expected_ids(ELASTIC, STEPS), again=7))
    assert holds(found)
    assert (found["steps"], found["taken_again"], found["longest_gap_s"]) == (STEPS - 1 - 3, 1, 1.0)


def test_a_sample_that_is_lost_or_repeated_is_a_violation() -> None:
    """In place of one sample another one, and a step that is left out."""
    ids = expected_ids(ELASTIC, STEPS)
    for wrong, misuse in (
        ([*ids[: 5 * BATCH], ids[3], *ids[5 * BATCH + 1 :]], (1, 1)),
        ([*ids[: 5 * BATCH], *ids[6 * BATCH :], *expected_ids(ELASTIC, STEPS + 1)[-BATCH:]], (BATCH, BATCH)),
    ):
        found = row(record(wrong))
        assert (found["samples_twice"], found["samples_never"]) == misuse
        assert not holds(found)


def test_steps_in_which_replicas_may_be_apart_are_not_counted() -> None:
    """Where one replica has taken four steps more than the other, their samples are no loss."""
    lines = record(expected_ids(ELASTIC, STEPS))
    ahead = [used for used in lines if used.step <= STEPS - 4 or used.ids[0] == lines[2 * used.step - 2].ids[0]]
    trial = Trial(ELASTIC, record=ahead, begin_s=3.0, end_s=float(STEPS), exit_code=75)
    assert not holds(row_of(trial, "0", 1.0))
    assert holds(row_of(trial, "0", 1.0, apart=4))


def test_hangs_orphans_and_bad_ends_are_violations() -> None:
    """Each alone."""
    fine = row(record(expected_ids(ELASTIC, STEPS)))
    assert holds(fine)
    for wrong in ({"hangs": 1}, {"orphans": 1}, {"exit_code": 3}, {"exit_code": None}):
        assert not holds(fine | wrong), wrong
    assert holds(fine | {"ended_unstruck": 1}), "a replica may be fenced for being slow"


def test_a_fault_after_which_no_step_begins_in_time_is_a_hang() -> None:
    """A step just after the fault does not count, nor does a fault that another one follows within the bound."""
    late = BOUND_S + 1
    assert hangs_of([100.0], [90.0, 105.0]) == 0
    assert hangs_of([100.0], [90.0, 100.2, 100 + late]) == 1
    assert hangs_of([100.0, 110.0], [90.0, 111 + BOUND_S - 2]) == 0
    assert hangs_of([100.0, 110.0], [90.0, 110 + late]) == 1
    assert hangs_of([], [90.0]) == 0


def test_a_seed_is_one_schedule_of_both_signals() -> None:
    """Drawn again it is the same; nothing strikes after the end."""
    drawn = [schedule(seed, 50, 12) for seed in range(40)]
    assert drawn == [schedule(seed, 50, 12) for seed in range(40)]
    faults = [fault for faults in drawn for fault in faults]
    assert {fault.signal for fault in faults} == {signal.SIGKILL, signal.SIGSTOP}
    assert all(0 < fault.at_s < 50 and 0 <= fault.share < 1 for fault in faults)
