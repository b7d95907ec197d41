"""The trials of a sweep, and who is stopped at a rung: pure functions of the sweep file and of what was seen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.experiments.results import interval
from shoal.experiments.search import ASHA, Range, SweepFile, goes_on, load_sweep, rungs, trials
from shoal.experiments.search import Random as RandomSearch
from shoal.experiments.trial_command import devices_of

FILE = 'name = "s"\nrun = "run.toml"\nobjective = "loss/train"\n'


def sweep(**keys: object) -> SweepFile:
    """A sweep over two keys."""
    parameters = {"optimizer.lr": [0.1, 0.2, 0.3], "model.width": [8, 16]}
    return SweepFile(**({"name": "s", "run": "r", "objective": "loss/train", "parameters": parameters} | keys))  # type: ignore[arg-type]


def test_a_grid_has_every_combination_once_with_every_seed() -> None:
    """3 values times 2 values times 2 seeds: 12 trials, all different, numbered in order."""
    found = trials(sweep(seeds=[4, 7]))
    assert [trial.number for trial in found] == list(range(12))
    assert (
        len({(trial.parameters["optimizer.lr"], trial.parameters["model.width"], trial.seed) for trial in found}) == 12
    )


def test_draws_are_the_same_again_and_lie_in_their_range() -> None:
    """A seed gives the same draws; another one others; logarithmic draws are even in the exponent."""
    parameters = {"a": Range(low=1e-4, high=1.0, log=True), "b": Range(low=1, high=9, whole=True), "c": ["x", "y"]}
    first, again, other = (
        [trial.parameters for trial in trials(sweep(parameters=parameters, search=RandomSearch(trials=400, seed=seed)))]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert all(1e-4 <= one["a"] <= 1 and one["b"] in range(1, 10) and one["c"] in "xy" for one in first)
    below = sum(one["a"] < 1e-2 for one in first)
    assert 150 < below < 250  # half of 400, 5 standard deviations of the binomial around it


def test_rungs_grow_by_the_factor_and_end_before_the_last_step() -> None:
    """50, 150, 450 of 1,000 steps; none where the first is as long as the run."""
    assert rungs(ASHA(first_steps=50, factor=3), 1000) == [50, 150, 450]
    assert rungs(ASHA(first_steps=50), 50) == []


@given(values=st.lists(st.floats(-10, 10) | st.just(math.nan), min_size=1, max_size=60), factor=st.integers(2, 4))
def test_at_most_a_share_of_those_seen_goes_on(values: list[float], factor: int) -> None:
    """Of distinct values, exactly max(1, n / factor) would go on, the best; a NaN never does."""
    distinct = list({value for value in values if value == value}) + [value for value in values if value != value]
    going = [value for value in distinct if goes_on(value, distinct, factor=factor, minimize=True)]
    finite = sorted(value for value in distinct if value == value)
    assert sorted(going) == finite[: max(1, len(distinct) // factor)]
    mirrored = [-value for value in distinct]
    assert [goes_on(-value, mirrored, factor=factor, minimize=False) for value in distinct] == [
        goes_on(value, distinct, factor=factor, minimize=True) for value in distinct
    ]


def test_the_interval_is_students() -> None:
    """Of 1, 2, 3: t(2) = 4.303, s = 1: 4.303 / sqrt(3); none for a single value."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert interval([1.0]) is None


def test_gpus_are_divided_between_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four visible GPUs and two slots: two each, by the names that the environment gives; fewer than slots: shared."""
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    monkeypatch.setattr("shoal.experiments.trial_command.gpus", lambda _: 4)
    assert [devices_of(slot, 2, environ)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["4,5", "6,7"]
    assert devices_of(0, 8, environ) == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('name = "s"\nrun = "run.toml"\n[parameters]\na = [1]\n', "objective"),
        (FILE + "[parameters]\n", "nothing to vary"),
        (FILE + "[parameters]\na = []\n", "parameters"),
        (FILE + "[parameters]\na = {low = 1.0, high = 2.0}\n", "a grid has no end"),
        (FILE + "[parameters]\na = {low = 2.0, high = 1.0}\n", "exchange them"),
        (FILE + "[parameters]\na = {low = 0.0, high = 1.0, log = true}\n", "has no logarithm"),
        (FILE + "seeds = [1, 1]\n[parameters]\na = [1]\n", "names one twice"),
        (FILE.replace("run.toml", "none.toml") + "[parameters]\na = [1]\n", "is not there: give the run file"),
        (FILE + '[search]\nkind = "hyperband"\n[parameters]\na = [1]\n', "kind"),
        (FILE + '[search]\nkind = "bayes"\n[parameters]\na = [1]\n', "trials"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """Before any trial starts, and naming the key."""
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "sweep.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_sweep(tmp_path / "sweep.toml")
    assert sentence in str(refused.value)
