"""Which configurations are tried, and which are stopped early. Pure: the same file gives the same trials.

Bayesian search proposes its configurations while the sweep runs; the others are known before it starts.
"""

from __future__ import annotations

import importlib
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.config.check import Positive, Table, says
from shoal.config.load import load
from shoal.errors import ConfigError, MissingExtra

# The sweep file. Imports no torch: a bad key is refused before any trial starts.


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


# Bayesian search: the next configuration, from what those before it came to. Pure: the same values, the same draw.
#
# The tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011, section 4) divides the configurations that are
# known into the best share and the rest, fits a density to each, and takes of several draws the one with the largest
#
#     l(x) / g(x),        l: density of the best, g: density of the rest.
#
# The first `startup` configurations are drawn at random. Those that still run count as bad ones, so that trials side by
# side do not all try the same place. Optuna (arXiv:1907.10902) does the fitting.


@dataclass(frozen=True)
class Known:
    """A configuration that was tried. `value`: its objective, None while it runs; `failed`: it will have none."""

    parameters: Mapping[str, Any]
    value: float | None = None
    failed: bool = False


def propose(sweep: SweepFile, known: Sequence[Known]) -> dict[str, Any]:
    """The next configuration of a sweep whose search is `Bayes`. Raises `MissingExtra` without optuna."""
    optuna = import_optuna()
    search = sweep.search
    assert isinstance(search, Bayes), "only it proposes"
    spaces = {key: _space(optuna, values) for key, values in sweep.parameters.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar is called experimental
        sampler = optuna.samplers.TPESampler(
            seed=search.seed + len(known), n_startup_trials=search.startup, constant_liar=True, multivariate=True
        )
        # A study reports its own making; the sweep says what it starts.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=sampler, direction=sweep.goal)
        for one in known:
            study.add_trial(_trial(optuna, sweep, one, spaces))
        drawn = study.ask(spaces).params
    return {key: _value(sweep.parameters[key], drawn[key]) for key in sweep.parameters}


def import_optuna() -> Any:
    """The package. Raises `MissingExtra`."""
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise MissingExtra("optuna", extra="sweep", purpose='search.kind = "bayes"') from None


def _space(optuna: Any, values: list[Any] | Range) -> Any:
    distributions = optuna.distributions
    if isinstance(values, list):
        # By their place: optuna takes no tables and lists as choices.
        return distributions.CategoricalDistribution(list(range(len(values))))
    if values.whole:
        return distributions.IntDistribution(math.ceil(values.low), math.floor(values.high), log=values.log)
    return distributions.FloatDistribution(values.low, values.high, log=values.log)


def _trial(optuna: Any, sweep: SweepFile, known: Known, spaces: Mapping[str, Any]) -> Any:
    state = optuna.trial.TrialState
    params = {
        key: values.index(known.parameters[key]) if isinstance(values, list) else known.parameters[key]
        for key, values in sweep.parameters.items()
    }
    if known.failed or (known.value is not None and not math.isfinite(known.value)):
        return optuna.trial.create_trial(state=state.FAIL, params=params, distributions=dict(spaces))
    if known.value is None:
        return optuna.trial.create_trial(state=state.RUNNING, params=params, distributions=dict(spaces))
    return optuna.trial.create_trial(params=params, distributions=dict(spaces), value=known.value)


def _value(values: list[Any] | Range, drawn: Any) -> Any:
    if isinstance(values, list):
        return values[drawn]
    if values.whole:
        return int(drawn)
    return min(max(float(f"{drawn:.6g}"), values.low), values.high)


@dataclass(frozen=True)
class Trial:
    """One run of the sweep: a configuration and a seed."""

    number: int
    configuration: int
    parameters: Mapping[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """The name of its run and of its folder."""
        return f"trial-{self.number:04d}"


def trials(sweep: SweepFile, proposed: Sequence[Mapping[str, Any]] = ()) -> list[Trial]:
    """Every trial, the configurations in order and their seeds side by side; of a `Bayes` search, those `proposed`."""
    configurations = proposed if isinstance(sweep.search, Bayes) else _configurations(sweep)
    pairs = [(index, seed) for index in range(len(configurations)) for seed in sweep.seeds]
    return [Trial(number, index, configurations[index], seed) for number, (index, seed) in enumerate(pairs)]


# Asynchronous successive halving (Li et al., arXiv:1810.05934): a trial is judged at the rungs
#
#     first_steps * factor^k,    k = 0, 1, ...
#
# and stands still at a rung as long as its value is not among the best 1/factor of those that have been seen there so
# far. Nobody waits for others: the first trials to reach a rung go on, and one that stands still goes on when it is
# among the best of more.


def rungs(search: ASHA, steps: int) -> list[int]:
    """The steps at which trials of `steps` steps are judged; the last step is no rung."""
    found, rung = [], search.first_steps
    while rung < steps:
        found.append(rung)
        rung *= search.factor
    return found


def goes_on(value: float, seen: Sequence[float], *, factor: int, minimize: bool) -> bool:
    """Whether a trial with `value` at a rung is among the best 1/`factor` of `seen`, its own value included.

    A value that is not finite never goes on, and counts as the worst for the others.
    """
    if not math.isfinite(value):
        return False
    better = sum((other < value if minimize else other > value) for other in seen if math.isfinite(other))
    return better < max(1, len(seen) // factor)


def _configurations(sweep: SweepFile) -> list[dict[str, Any]]:
    search = sweep.search
    count = search.trials if isinstance(search, Random | ASHA) else None
    if count is None:
        return [dict(zip(sweep.parameters, values, strict=True)) for values in product(*_lists(sweep))]
    draw = random.Random(search.seed if isinstance(search, Random | ASHA) else 0)
    return [{key: _drawn(values, draw) for key, values in sweep.parameters.items()} for _ in range(count)]


def _lists(sweep: SweepFile) -> list[list[Any]]:
    return [values for values in sweep.parameters.values() if isinstance(values, list)]


def _drawn(values: list[Any] | Range, draw: random.Random) -> Any:
    if isinstance(values, list):
        return draw.choice(values)
    if values.log:
        value = math.exp(draw.uniform(math.log(values.low), math.log(values.high)))
    else:
        value = draw.uniform(values.low, values.high)
    return round(value) if values.whole else float(f"{value:.6g}")
