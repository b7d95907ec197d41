"""Bayesian search: its proposals lie in the space, follow from what is known, and come nearer than chance."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.errors import MissingExtra, UsageError
from shoal.experiments.search import Bayes, Known, Range, SweepFile, propose, trials
from shoal.experiments.search import Random as RandomSearch
from shoal.experiments.sweep import Sweep
from shoal.installation import install_command

PARAMETERS: dict[str, Any] = {
    "optimizer.lr": Range(low=1e-5, high=1.0, log=True),
    "model.width": Range(low=4, high=64, whole=True),
    "optimizer": ["sgd", "adam", {"kind": "muon"}],
}
TRIALS = 25


def sweep(**keys: Any) -> SweepFile:
    """A sweep of `PARAMETERS`."""
    return SweepFile(**({"name": "s", "run": "r", "objective": "o", "parameters": PARAMETERS} | keys))


def loss(parameters: Mapping[str, Any]) -> float:
    """A bowl in the logarithm of the rate and in the width, and one choice that is better; its least value is 0."""
    rate, width = math.log10(parameters["optimizer.lr"]) + 2.3, (parameters["model.width"] - 40) / 20
    return rate**2 + width**2 + (0.0 if parameters["optimizer"] == "adam" else 0.5)


def search(seed: int, **keys: Any) -> list[Known]:
    """All configurations of a search by itself."""
    file, known = sweep(search=Bayes(trials=TRIALS, seed=seed), **keys), []
    sign = 1 if file.goal == "minimize" else -1
    while len(known) < TRIALS:
        parameters = propose(file, known)
        known.append(Known(parameters, sign * loss(parameters)))
    return known


def test_it_comes_nearer_than_chance() -> None:
    """Over five seeds, the median of the best of 25 is less than half of that of random search; so it is when the sign
    and the goal are turned around."""
    seeds = [0, 100, 200, 300, 400]
    drawn = (trials(sweep(search=RandomSearch(trials=TRIALS, seed=seed))) for seed in seeds)
    chance = statistics.median(min(loss(trial.parameters) for trial in found) for found in drawn)
    for goal in ("minimize", "maximize"):
        found = statistics.median(min(abs(one.value or 0.0) for one in search(seed, goal=goal)) for seed in seeds)
        assert found < chance / 2


def test_what_is_proposed_lies_in_the_space_and_follows_from_what_is_known() -> None:
    """Bounds, whole numbers and choices are kept; the same past gives the same proposal, another past another."""
    known = search(7)
    for one in known:
        assert 1e-5 <= one.parameters["optimizer.lr"] <= 1.0
        assert one.parameters["model.width"] in range(4, 65)
        assert one.parameters["optimizer"] in PARAMETERS["optimizer"]
    file = sweep(search=Bayes(trials=TRIALS, seed=7))
    assert propose(file, known) == propose(file, known)
    assert propose(file, known[:-1]) != propose(file, known)


def test_configurations_that_run_failed_or_are_not_finite_do_not_stop_it() -> None:
    """None of them has a value that could be learned from."""
    known = search(1)[:8]
    file = sweep(search=Bayes(trials=TRIALS, seed=1))
    extra = [Known(known[0].parameters), Known(known[1].parameters, failed=True), Known(known[2].parameters, math.nan)]
    assert set(propose(file, [*known, *extra])) == set(PARAMETERS)


def test_a_range_of_whole_numbers_holds_one() -> None:
    """Between 0.2 and 0.8 there is none; what a range may have drawn is known."""
    with pytest.raises(ValueError, match=r"no whole number lies between low = 0\.2 and high = 0\.8"):
        Range(low=0.2, high=0.8, whole=True)
    assert Range(low=0.2, high=1.8, whole=True).holds(1)
    assert not Range(low=0.2, high=1.8, whole=True).holds(1.5)
    assert not Range(low=0.2, high=1.8).holds(2.0)


@pytest.mark.parametrize("proposed", [{"optimizer": "rmsprop"}, {"model.width": 65}, {"model.width": 8.5}])
def test_a_search_whose_space_was_edited_is_refused(tmp_path: Path, proposed: dict[str, Any]) -> None:
    """A proposal that the sweep file no longer has: one sentence, before anything starts."""
    first = {"optimizer.lr": 0.1, "model.width": 8, "optimizer": "sgd"}
    (tmp_path / "proposals.json").write_bytes(msgspec.json.encode([first | proposed]))
    made = Sweep(sweep(search=Bayes(trials=3)), tmp_path / "run.toml", tmp_path, say=print)
    with pytest.raises(UsageError, match="has other parameters, or other values of them, than the sweep file"):
        made.run()


def test_without_optuna_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=re.escape(install_command("sweep"))):
        propose(sweep(search=Bayes(trials=1)), [])
