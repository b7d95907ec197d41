"""What a run says first, and the table of `shoal verify`."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from shoal.assembly.job import said_of_parameters, used_twice_in_a_step
from shoal.data.config import BatchConfig
from shoal.engine.tolerances import Finding
from shoal.verification.verdict import IN_FLOAT32, Verdict


def test_parameters_that_do_not_train_are_told_apart() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    assert said_of_parameters(shapes, ()) == "10 parameters"
    assert said_of_parameters(shapes, {"b"}) == "6 of 10 parameters train"


def test_a_step_of_more_samples_than_there_are_is_warned_of_where_it_goes_on_into_the_next_epoch() -> None:
    """A shorter last step of an epoch has each sample once."""
    of_eight = BatchConfig(global_samples=8)
    assert "8, and the training data has 1 sample: each step uses" in str(used_twice_in_a_step(of_eight, 1))
    assert used_twice_in_a_step(of_eight, 8) is None
    assert used_twice_in_a_step(msgspec.structs.replace(of_eight, epoch_end="short"), 1) is None


def test_learning_rates_that_hold_are_one_line() -> None:
    """The worst of the whole run; one that does not hold is shown with its step."""
    rates = [Finding(step, "rate", f"of step {step}", 0, step * 1e-16, 1e-12) for step in (1, 2, 3)]
    losses = [Finding(step, "loss", "loss", -1, 0.0, 1e-5) for step in (1, 2)]
    verdict = Verdict("2 ranks", False, [*rates, *losses], {})
    table = [line.split()[:3] for line in verdict.lines()][2:-1]
    assert table == [["3", "rate", "3"], ["1", "loss", "1"], ["2", "loss", "1"]]
    broken = Verdict("2 ranks", False, [replace(rates[0], difference=1.0), *rates[1:], *losses], {})
    assert [line.split()[:3] for line in broken.lines()][2:5] == [[str(step), "rate", "1"] for step in (1, 2, 3)]


def test_differences_of_the_size_of_float32_are_said_to_be() -> None:
    """In float64 alone; not where one is larger, nor where all are much smaller."""
    for exact, gradient, loss, told in (
        (True, 6e-8, 6e-8, True),
        (True, 6e-8, 1e-3, False),
        (True, 1e-11, 1e-11, False),
        (False, 6e-8, 6e-8, False),
    ):
        findings = [Finding(1, "gradient", "a", 0, gradient, 1e-12), Finding(1, "loss", "loss", -1, loss, 1e-12)]
        assert (IN_FLOAT32 in Verdict("2 ranks", exact, findings, {}).sentence()) == told
