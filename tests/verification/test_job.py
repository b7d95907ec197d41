"""What a run says first, and the table of `shoal verify`."""

from __future__ import annotations

from dataclasses import replace

from shoal.assembly.job import said_of_parameters
from shoal.engine.tolerances import Finding
from shoal.verification.verdict import Verdict


def test_parameters_that_do_not_train_are_told_apart() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    assert said_of_parameters(shapes, ()) == "10 parameters"
    assert said_of_parameters(shapes, {"b"}) == "6 of 10 parameters train"


def test_learning_rates_that_hold_are_one_line() -> None:
    """The worst of the whole run; one that does not hold is shown with its step."""
    rates = [Finding(step, "rate", f"of step {step}", 0, step * 1e-16, 1e-12) for step in (1, 2, 3)]
    losses = [Finding(step, "loss", "loss", -1, 0.0, 1e-5) for step in (1, 2)]
    verdict = Verdict("2 ranks", False, [*rates, *losses], {})
    table = [line.split()[:3] for line in verdict.lines()][2:-1]
    assert table == [["3", "rate", "3"], ["1", "loss", "1"], ["2", "loss", "1"]]
    broken = Verdict("2 ranks", False, [replace(rates[0], difference=1.0), *rates[1:], *losses], {})
    assert [line.split()[:3] for line in broken.lines()][2:5] == [[str(step), "rate", "1"] for step in (1, 2, 3)]
