"""What a job asks its scheduler for, by the run file's own plan on a cluster file: hosts, devices, cores, memory.

A plan that the cluster cannot hold is refused before anything is submitted, with the nearest keys that would fit.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import EnvironmentFault, LayoutError, UsageError
from shoal.observe.facts import differing_keys
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import search
from shoal.planning.answer import predictor_on
from shoal.planning.plan_file import runnable, with_plan, written_plan
from shoal.runfile.run_file import RunFile, with_processes
from shoal.topology.cluster import Cluster
from shoal.topology.cluster_file import load_cluster
from shoal.units import plural

GIB = 1 << 30
LAUNCHER_BYTES = GIB
"""Of a host, for the launcher and what starts beside the ranks."""


@dataclass(frozen=True)
class JobRequest:
    """`nodes` hosts with `ranks_per_node` ranks each, on as many GPUs (`gpus_per_node`; 0 on cores). `memory_gib` of a
    host holds its ranks; None on GPUs, where the prediction is of the GPUs' own memory. `cpus_per_rank`: on cores the
    one that the plan gives each rank; beside a GPU one for the thread that trains, and one for each of its readers.
    """

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    memory_gib: int | None


def job_request(run_file: RunFile, cluster: Path, *, world_size: int) -> JobRequest:
    """The request of `world_size` ranks.

    Raises `EnvironmentFault` where the cluster has too few devices, or too little memory for this plan; `UsageError`
    for ranks that do not fill whole hosts; `ConfigError` and `LayoutError` for what cannot be priced.
    """
    whole = load_cluster(cluster)
    if world_size > whole.devices:
        raise EnvironmentFault(
            f"the run has {plural(world_size, 'rank')}, and {whole.name} has {plural(whole.devices, 'device')}: set "
            "run.processes or the axes of [layout] to fewer"
        )
    try:
        part = whole.with_devices(world_size)
    except ValueError as error:
        raise UsageError(f"{world_size} ranks on {whole.name}: {error}") from None
    run_file = with_processes(run_file, world_size)
    predictor = predictor_on(run_file, part)
    found = predictor.predict(written_plan(run_file, part))
    if not found.fits:
        raise EnvironmentFault(_does_not_fit(run_file, predictor, found, cluster))
    each, on_cores = world_size // part.nodes, part.machine.scale_up.kind == "memory"
    memory_gib = math.ceil((each * found.memory_bytes + LAUNCHER_BYTES) / GIB) if on_cores else None
    cpus = 1 if on_cores else 1 + run_file.data.readers
    return JobRequest(part.nodes, each, 0 if on_cores else each, cpus, memory_gib)


def _does_not_fit(run_file: RunFile, predictor: Predictor, found: Prediction, cluster: Path) -> str:
    part = predictor.cluster
    needed = (
        f"the run's fullest rank needs {found.memory_bytes / GIB:.1f} GiB, and a device of {part.name} has "
        f"{part.device.memory_bytes / GIB:.1f}"
    )
    ask = f"shoal plan RUN.toml --cluster {cluster} shows more"
    fitting = _keys_that_fit(run_file, predictor, part)
    if not fitting:
        return f"{needed}: no layout of {plural(part.devices, 'rank')} fits; {ask}"
    return f"{needed}: {fitting} would fit; {ask}"


def _keys_that_fit(run_file: RunFile, predictor: Predictor, part: Cluster) -> str:
    """As overrides of the command line; "" where nothing fits."""
    try:
        best = search(predictor, Allowed(), keep=1, legal=runnable(run_file, part)).best[0]
    except LayoutError:
        return ""
    other = with_plan(run_file, best.plan)
    tables = [
        {name: msgspec.to_builtins(getattr(one, name)) for name in ("layout", "memory", "pipeline", "batch")}
        for one in (run_file, other)
    ]
    return " ".join(f"{key}={json.dumps(now)}" for key, (_, now) in differing_keys(tables).items() if now is not None)
