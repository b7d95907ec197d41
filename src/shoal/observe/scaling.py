"""How much faster a run is than one rank alone (Amdahl, AFIPS 1967).

    speed-up    S = r / r_1,    r samples per second of the run, r_1 of a run of the same model on one rank
    efficiency  E = S / n,      n ranks

Rates, not times: so both also hold where the run has a larger batch than the one rank had (weak scaling).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.load import read as read_tables
from shoal.errors import ConfigError, UsageError
from shoal.observe.events import read_events, series
from shoal.observe.facts import number_of, read_facts
from shoal.observe.series import median
from shoal.observe.settings import differing_keys

RATE = "throughput/samples_per_second"
SPEED_UP, EFFICIENCY = "scaling/speed_up", "scaling/efficiency"


@dataclass(frozen=True)
class Scaling:
    """What the rates of a run on `ranks` ranks are compared with: `one_rank`, samples per second."""

    one_rank: float
    ranks: int

    def figures(self, rate: float) -> dict[str, float]:
        """Speed-up and efficiency of a step at `rate` samples per second."""
        speed_up = rate / self.one_rank
        return {SPEED_UP: speed_up, EFFICIENCY: speed_up / self.ranks}


def one_rank_rate(directory: Path, model: Mapping[str, Any]) -> float:
    """The median samples per second of the later half of that run's steps.

    Raises `UsageError` where `directory` holds no such run: it had other ranks, or another `model` than this table.
    """
    found = series(read_events(directory), RATE)[1]
    rate = median(found[len(found) // 2 :])
    if not rate:
        raise UsageError(
            f"observe.one_rank = {str(directory)!r} has no steps to compare with: name the directory of a run that "
            "trained on one rank"
        )
    ranks = number_of(read_facts(directory).get("world"))
    if ranks != 1:
        said = "does not say how many ranks it had" if ranks is None else f"had {ranks:g} ranks"
        raise UsageError(
            f"observe.one_rank = {str(directory)!r} {said}: speed-up is told against one rank; train the run with "
            "run.processes=1 into a directory of its own, and name that"
        )
    for key, (here, there) in differing_keys([{"model": dict(model)}, {"model": _model(directory)}]).items():
        raise UsageError(
            f"observe.one_rank = {str(directory)!r} trained another model ({key} was {there!r}, here it is {here!r}): "
            "train this one on one rank, and name that directory"
        )
    return rate


def _model(directory: Path) -> dict[str, Any]:
    try:
        found = read_tables(directory / "run.toml").get("model")
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}
