"""A run in a lab: as many ranks as the lab has; and for ranks that throttle themselves, the rates between hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.errors import ConfigError, UsageError
from shoal.launcher.environment import Place
from shoal.launcher.lab.lab_file import Lab
from shoal.launcher.lab.network import RATES
from shoal.runfile.run_file import RunConfig

if TYPE_CHECKING:
    from shoal.comm.conditions import Conditions


def processes_in(lab: Lab, run: RunConfig, place: Place | None) -> int:
    """The ranks of `lab`. Raises `UsageError` where another launcher is at work, or the run file asks for others."""
    if place is not None:
        raise UsageError(
            f"a lab starts its own ranks, and this process is a rank of {place.launcher}: start it without a launcher, "
            "or leave the lab out"
        )
    asked = run.processes
    if asked not in (None, lab.ranks):
        raise ConfigError(
            f"run.processes = {asked}, and the lab has {lab.ranks} ranks on {len(lab.hosts)} hosts: they have to be as "
            "many; leave run.processes out, or change lab.ranks_per_host"
        )
    return lab.ranks


def conditions_from(environ: Mapping[str, str]) -> Conditions | None:
    """What a throttled lab's ranks keep to; None everywhere else."""
    if RATES not in environ:
        return None
    from shoal.comm.conditions import Conditions, HostRates

    told = json.loads(environ[RATES])
    return Conditions(rates=HostRates(tuple(told["hosts"]), tuple(map(tuple, told["bytes_s"]))))
