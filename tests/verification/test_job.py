"""What a run says first."""

from __future__ import annotations

from shoal.assembly.job import said_of_parameters


def test_parameters_that_do_not_train_are_told_apart() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    assert said_of_parameters(shapes, ()) == "10 parameters"
    assert said_of_parameters(shapes, {"b"}) == "6 of 10 parameters train"
