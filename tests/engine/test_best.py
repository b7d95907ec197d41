"""The best of the evaluations so far: what is better, what is kept, and when a run is over before its last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.assembly.job import build_job, restore, run_start
from shoal.checkpoint.config import Goal
from shoal.checkpoint.inspect import listing
from shoal.checkpoint.objects import Places
from shoal.checkpoint.weights import weights_of
from shoal.engine.config import StopWhen
from shoal.engine.loop import train
from shoal.engine.save_policy import Best, Watch
from shoal.errors import ConfigError, Stopped
from shoal.observe.sink import Sinks
from shoal.runfile.observe_rules import watch_refusal
from tests.ranks import TestPlace
from tests.sync.steps import opened
from tests.verification.layouts import corpus, run_file_of


@pytest.mark.parametrize(("goal", "best_at"), [("minimize", 3), ("maximize", 5)])
def test_the_best_is_the_lowest_or_the_highest_and_never_nan(goal: Any, best_at: int) -> None:
    best = Best(Goal("loss/eval", goal))
    for step, value in enumerate([math.nan, 4.0, 2.0, math.nan, 7.0, 2.0, 7.0], start=1):
        best.note(step, value)
    assert (best.step, best.since) == (best_at, 7 - best_at)


def test_a_small_change_is_no_improvement() -> None:
    """And the best so far is what later ones are compared with: many small steps are one large one."""
    watch = Watch(stop=StopWhen("loss/eval", patience=3, least_change=0.1))
    for step, value in enumerate([1.0, 0.95, 0.92, 0.89, 0.85, 0.8], start=1):
        watch.note(step, {"loss/eval": value})
        assert watch.over is None
    watch.note(7, {"loss/eval": 0.795})
    assert watch.over is not None
    assert "loss/eval has not improved in 3 evaluations (the best is 0.89 of step 4)" in watch.over


def test_the_best_by_another_goal_does_not_count() -> None:
    watch = Watch(Goal("loss/eval"))
    watch.note(5, {"loss/eval": 1.0})
    other = Watch(Goal("accuracy/eval", "maximize"))
    other.load(watch.to_state())
    assert other.best is not None
    assert (other.best.value, other.evaluated) == (None, 5)


def test_a_measurement_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match=r"keep_best\.measurement = 'accuracy/eval' .* which is loss/eval"):
        Watch(Goal("accuracy/eval")).note(1, {"loss/eval": 1.0})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, "set observe.evaluate_every_steps"),
        ({"observe": {"evaluate_every_steps": 2}, "elastic": {"min": 1, "max": 2}}, "with [elastic]"),
        ({"observe": {"evaluate_every_steps": 2}, "sync": {"kind": "server"}}, 'with sync.kind = "server"'),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, tables: dict[str, Any], words: str) -> None:
    refused = watch_refusal(run_file_of(tmp_path, **{"run": {"stop_when": {}}, **tables}))
    assert refused is not None
    assert words in refused


VALUES = [5.0, 3.0, 4.0, 2.0, 6.0, 2.5, 9.0, 8.0, 1.0]
WATCHED: dict[str, Any] = {
    "checkpoint": {"keep_best": {}, "keep": 1, "every_steps": 0},
    "run": {"stop_when": {"patience": 3}},
    "observe": {"evaluate_every_steps": 1},
    "precision": {"kind": "float64"},
}


def watched(place: TestPlace, folder: str, name: str, stop_after: int | None) -> tuple[int, int, list[int]]:
    """Trains on values that are given, until a stop after step `stop_after`: the last step, the best, and the steps
    whose checkpoints are there then.
    """
    directory = Path(folder) / name
    tokens = str(Path(folder) / "tokens.bin")
    data = {"kind": "tokens", "path": tokens, "held_out": tokens, "dtype": "uint8"}
    run = opened(place, WATCHED | {"data": data}, folder, directory, len(VALUES))
    with ExitStack() as stack:
        sinks = stack.enter_context(Sinks())
        restore(run, directory, sinks)
        asked = lambda: run.state.progress.step + 1 == stop_after  # noqa: E731
        job = build_job(run, directory, sinks, stack, stop_requested=asked)
        job = replace(job, evaluate=lambda: {"loss/eval": VALUES[run.state.progress.step - 1]})
        stack.callback(job.saver.close)
        sinks.start(run_start(run))
        try:
            train(job)
        except Stopped:
            assert run.state.progress.step == stop_after
        run.mesh.world.barrier().wait()
    best = run.state.watch.best
    assert best is not None
    return run.state.progress.step, best.step, Places(directory).steps()


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(), (2,), (4,), (5, 6)])
def test_a_run_stops_early_at_the_same_step_however_it_was_interrupted(
    ranks, tmp_path: Path, stops: Sequence[int]
) -> None:
    """In another world too; the stop that comes before an evaluation does not take it away. The best checkpoint stays,
    with `keep = 1`, though four were saved after it or before.
    """
    corpus(tmp_path)
    for world, stop in zip((2, 1), [*stops, None], strict=False):
        told = ranks(world, watched, str(tmp_path), "run", stop)
    if len(stops) == 2:
        told = ranks(2, watched, str(tmp_path), "run", None)
    assert told == [(7, 4, [7, 4])] * len(told)
    directory = tmp_path / "run"
    assert [(row.step, row.best, row.verified) for row in listing(directory)] == [(7, False, True), (4, True, True)]
    best, newest = weights_of(Places(directory).best), weights_of(directory)
    assert any(not best[name].equal(newest[name]) for name in best)


def test_a_finished_early_run_has_nothing_to_train_until_patience_is_raised(ranks, tmp_path: Path) -> None:
    corpus(tmp_path)
    ranks(1, watched, str(tmp_path), "run", None)
    assert ranks(1, watched, str(tmp_path), "run", None) == [(7, 4, [7, 4])]
