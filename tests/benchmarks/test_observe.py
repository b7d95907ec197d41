"""What `benchmarks.observe` makes of its measurements, and that each way of observing is measured by what it does."""

from __future__ import annotations

from benchmarks.observe import (
    AGAIN,
    ALWAYS,
    BARE,
    LIVE,
    PAGE,
    PROMETHEUS,
    SHARE,
    TENSORBOARD,
    _address_in,
    _terminal,
    result_of,
)
from shoal.bench.report import Turns
from shoal.observe.sink import Ending, RunStart
from shoal.observe.terminal import LiveDisplay

STEP_S = 0.1
SIDES = (ALWAYS, LIVE, PROMETHEUS, TENSORBOARD, PAGE)


def test_a_side_that_costs_too_much_falls_short_and_the_others_hold() -> None:
    """Its share is the median over the turns, each beside the bare step of its turn: slow minutes change nothing."""
    for slow in SIDES:
        turns: Turns = [
            {BARE: pace * STEP_S, AGAIN: pace * STEP_S}
            | {side: pace * STEP_S * (1 + (3 * SHARE if side == slow else SHARE / 2)) for side in SIDES}
            for pace in (1.0, 4.0, 4.0, 1.0, 9.0)
        ]
        result = result_of(turns, dict.fromkeys(SIDES, 1e-4), name="own", ranks=2)
        short = [one["name"] for one in result["checks"] if not one["holds"]]
        assert short == [f"share of a step (median of pairs), {slow}, own, 2 ranks"]
        assert [row["observed_by"] for row in result["rows"][1:]] == list(SIDES)
        assert {row["share_of_a_step"] for row in result["rows"][1:]} == {3 * SHARE, SHARE / 2}
        assert result["rows"][0]["aa_median"] == 1.0


def test_time_inside_record_is_judged_by_itself() -> None:
    """However little the turns show."""
    turns: Turns = [dict.fromkeys((BARE, AGAIN, *SIDES), STEP_S)] * 10
    result = result_of(turns, {ALWAYS: 2 * SHARE * STEP_S}, name="own", ranks=2)
    assert [one["holds"] for one in result["checks"]] == [True, False]


def test_the_terminal_takes_all_that_a_live_line_draws() -> None:
    """More than its buffer holds, and it can be opened again for each step."""
    with _terminal() as stream:
        assert stream.isatty()
        live = LiveDisplay(stream)
        for step in range(1, 101):
            live.start(RunStart(name="own", total_steps=100))
            live.record(step, {"loss/train": 1.0}, time_s=float(step))
            live.finish(Ending("finished"))


def test_the_endpoint_is_found_in_what_its_sink_says() -> None:
    """With the port that was free."""
    said = "own: 10 steps\nmetrics for Prometheus: http://127.0.0.1:43211/metrics\n"
    assert _address_in(said) == "http://127.0.0.1:43211/metrics"
