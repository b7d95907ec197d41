"""Bayesian search: the next configuration, from what those before it came to. Pure: the same values, the same draw.

The tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011, section 4) divides the configurations that are
known into the best share and the rest, fits a density to each, and takes of several draws the one with the largest

    l(x) / g(x),        l: density of the best, g: density of the rest.

The first `startup` configurations are drawn at random. Those that still run count as bad ones, so that trials side by
side do not all try the same place. Optuna (arXiv:1907.10902) does the fitting.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import MissingExtra
from shoal.experiments.config import Bayes, Range, SweepFile


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
