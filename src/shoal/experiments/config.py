"""The sweep file. Imports no torch: a bad key is refused before any trial starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.config.load import load
from shoal.config.table import Positive, Table, says
from shoal.errors import ConfigError


class Range(Table, frozen=True):
    """Values between two bounds."""

    low: Annotated[float, says("The smallest value.")]
    high: Annotated[float, says("The largest value.")]
    log: Annotated[bool, says("Draw the logarithm evenly.")] = False
    whole: Annotated[bool, says("Whole numbers alone.")] = False

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low = {self.low:g} is not below high = {self.high:g}: exchange them")
        if self.log and self.low <= 0:
            raise ValueError(f"low = {self.low:g} has no logarithm: take a low above 0, or log = false")
        if self.whole and math.ceil(self.low) > math.floor(self.high):
            raise ValueError(
                f"no whole number lies between low = {self.low:g} and high = {self.high:g}: widen the range, or take "
                "whole = false"
            )

    def holds(self, value: Any) -> bool:
        """Whether `value` may have been drawn from this range."""
        is_number = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high


Choices = Annotated[list[Any], msgspec.Meta(min_length=1)]


class Grid(Table, frozen=True, tag_field="kind", tag="grid"):
    """Every combination of the listed values."""


class Random(Table, frozen=True, tag_field="kind", tag="random"):
    """Independent draws (Bergstra and Bengio, JMLR 2012)."""

    trials: Annotated[Positive, says("Configurations that are drawn.")]
    seed: Annotated[int, says("The draws follow from it.", ge=0)] = 0


class ASHA(Table, frozen=True, tag_field="kind", tag="asha"):
    """Draws, of which the worse are stopped early: asynchronous successive halving (arXiv:1810.05934)."""

    first_steps: Annotated[Positive, says("Steps of the first rung, at which a trial is first judged.")]
    factor: Annotated[
        int, says("One of so many goes on at each rung, and each rung is so many times longer.", ge=2)
    ] = 3
    trials: Annotated[Positive | None, says("Configurations that are drawn; default: the whole grid.")] = None
    seed: Annotated[int, says("The draws follow from it.", ge=0)] = 0


class Bayes(Table, frozen=True, tag_field="kind", tag="bayes"):
    """Draws near what was good so far: the tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011)."""

    trials: Annotated[Positive, says("Configurations that are drawn.")]
    startup: Annotated[Positive, says("The first of them are drawn at random.")] = 5
    seed: Annotated[int, says("The draws follow from it.", ge=0)] = 0


class SweepFile(Table, frozen=True):
    """Many runs of one run file."""

    name: Annotated[
        str, says("Name of the sweep; its folder is `sweeps/<name>`.", pattern=r"^[A-Za-z0-9][\w.-]{0,100}$")
    ]
    run: Annotated[str, says("The run file, relative to the sweep file.")]
    objective: Annotated[str, says('The measurement that is compared, such as "loss/eval".', min_length=1)]
    parameters: Annotated[dict[str, Choices | Range], says("Keys of the run file: values to try, or a range.")]
    search: Annotated[Grid | Random | ASHA | Bayes, says("Which configurations are tried, and how long.")] = Grid()
    goal: Annotated[Literal["minimize", "maximize"], says("What is better.")] = "minimize"
    seeds: Annotated[list[int], says("Each configuration is trained with each of these seeds.", min_length=1)] = (
        msgspec.field(default_factory=lambda: [0])
    )
    parallel: Annotated[Positive, says("Trials that run side by side; GPUs are divided between them.")] = 1

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("there is nothing to vary: give [parameters] at least one key of the run file")
        drawn = isinstance(self.search, Random | Bayes) or (
            isinstance(self.search, ASHA) and self.search.trials is not None
        )
        ranges = [key for key, value in self.parameters.items() if isinstance(value, Range)]
        if ranges and not drawn:
            raise ValueError(
                f"{ranges[0]} is a range, of which a grid has no end: list its values, or draw search.trials of them"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds = {self.seeds} names one twice: each trains the same run again")


def load_sweep(path: Path) -> SweepFile:
    """The sweep file `path`. Raises `ConfigError`."""
    found = load(SweepFile, path)
    if not (path.parent / found.run).is_file():
        raise ConfigError(f"{path}: run = {found.run!r} is not there: give the run file, relative to the sweep file")
    return found
