"""`layout.auto = true`: the planner picks what the run file leaves open, before any rank starts.

Every process of the run comes to the same choice by itself: the search is exact, and all of them read the same run file
and the same cluster file. What was chosen is written to the run directory with the rest of the run file, and a run that
goes on keeps it, as long as it is the same work on as many processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from shoal import units
from shoal.config.load import load
from shoal.cost.plan import Zero
from shoal.cost.transformer import Recompute
from shoal.errors import ConfigError, LayoutError
from shoal.launcher.devices import gpus
from shoal.launcher.environment import Place
from shoal.planner.predict.predictor import Predictor
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import Found, search
from shoal.planning.answer import predictor_of, predictor_on
from shoal.planning.plan_file import chunk_choices, runnable, with_plan
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile, run_directory
from shoal.topology.cluster import Cluster
from shoal.topology.cluster_file import load_cluster
from shoal.topology.config import LayoutConfig
from shoal.topology.layout import DENSE


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A run file whose layout is known, and one sentence on what was chosen and why."""

    run_file: RunFile
    why: str


def with_layout(run_file: RunFile, place: Place | None) -> Chosen:
    """The run file, whose number of processes is known, by the fastest plan that fits.

    `place` is this process's where a launcher has started it. Raises `ConfigError` for a model that the planner does
    not know, and `LayoutError` where nothing fits.
    """
    _check_hosts(run_file.layout, place)
    return _kept(run_file) or _searched(run_file)


def _check_hosts(layout: LayoutConfig, place: Place | None) -> None:
    """On several hosts, what this machine is like says nothing of the others."""
    if place is not None and not place.one_host and layout.cluster is None:
        raise ConfigError(
            "layout.auto = true on several hosts: say what the machine is with layout.cluster = 'C.toml' (a file that "
            "all hosts read alike), or write the layout once with shoal plan RUN.toml --cluster C.toml --emit OUT.toml"
        )


def _searched(run_file: RunFile) -> Chosen:
    predictor = _predictor(run_file)
    found = search(predictor, _allowed(run_file), keep=2, legal=runnable(run_file, predictor.cluster))
    return Chosen(run_file=with_plan(run_file, found.best[0].plan), why=_why(found, predictor.cluster))


def _why(found: Found, cluster: Cluster) -> str:
    best, *others = found.best
    second = f"; next is {others[0].plan.describe()}, {others[0].step_s / best.step_s - 1:+.1%}" if others else ""
    return (
        f"layout.auto: {best.plan.describe()}: the fastest of {found.fitting} plans that fit on {cluster.name} "
        f"({units.seconds(best.step_s)} a step and {units.memory_size(best.memory_bytes)} of "
        f"{units.memory_size(cluster.device.memory_bytes)} predicted){second}"
    )


def _predictor(run_file: RunFile) -> Predictor:
    """For the cluster file's devices, or this machine's cores, one for each process."""
    path = run_file.layout.cluster
    if path is None and run_file.run.device == "auto" and gpus(os.environ):
        raise ConfigError(
            "layout.auto = true on GPUs: say which machine this is with layout.cluster = 'C.toml' (in it [cluster], "
            'nodes = 1, machine = "dgx-h100" or another), or train on the cores with run.device = "cpu"'
        )
    if path is None:
        return predictor_of(run_file, None)
    try:
        return predictor_on(run_file, load_cluster(Path(path)).with_devices(run_file.run.processes or 1))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; set run.processes to one of these") from None


def _given(run_file: RunFile) -> dict[str, Any]:
    """What the run file decides by itself, by the name that `Allowed` has for it: values other than the defaults."""
    layout, pipeline, memory = run_file.layout, run_file.pipeline, run_file.memory
    sizes = {axis: getattr(layout, axis) for axis in (*DENSE, "expert")}
    given: dict[str, Any] = {axis: size for axis, size in sizes.items() if size not in (None, 1)}
    if layout.replicate is not None:
        given["replicate"] = layout.replicate
    numbers = {
        "microbatch": run_file.batch.micro_samples,
        "microbatches": pipeline.microbatches,
        "virtual_stages": pipeline.stages_per_rank,
        "zero": memory.zero,
    }
    given |= {name: number for name, number in numbers.items() if number is not None}
    if memory.recompute == "budget":
        raise LayoutError(
            'memory.recompute = "budget" with a layout that is searched: what blocks save differs from layout to '
            'layout; search with "full" or without the key, then set the budget'
        )
    if memory.recompute != "none":
        given["recompute"] = memory.recompute
    if pipeline.schedule != "1F1B":
        given["schedule"] = pipeline.schedule
    return given


def _allowed(run_file: RunFile) -> Allowed:
    """The search's freedom: everything but what is given."""
    given = _given(run_file)
    schedule = given.pop("schedule", None)
    everything = Allowed()
    return Allowed(
        zero=(cast(Zero, given.pop("zero")),) if "zero" in given else everything.zero,
        recompute=(cast(Recompute, given.pop("recompute")),) if "recompute" in given else everything.recompute,
        loss_chunks=chunk_choices(run_file),
        schedules=(schedule,) if schedule else everything.schedules,
        **given,
    )


def _kept(run_file: RunFile) -> Chosen | None:
    """The layout that the run directory holds; None where it holds none, or that of other work.

    Raises `ConfigError` for a resolved run file that cannot be read: whether to train on is then the user's to say.
    """
    path = run_directory(run_file) / "run.toml"
    if run_file.layout.replan or not path.exists():
        return None
    saved = load(RunFile, path)
    kept = msgspec.structs.replace(
        run_file,
        layout=msgspec.structs.replace(saved.layout, auto=False),
        pipeline=saved.pipeline,
        memory=saved.memory,
        batch=msgspec.structs.replace(run_file.batch, micro_samples=saved.batch.micro_samples),
    )
    asked, has = _given(run_file), _given(kept)
    same_work = (kept.model, kept.batch, kept.precision) == (saved.model, saved.batch, saved.precision)
    if saved.run.processes != run_file.run.processes or not same_work or refusal(kept) is not None:
        return None
    if any(has.get(name) != value for name, value in asked.items()):
        return None
    layout = kept.layout.layout(run_file.run.processes or 1)
    return Chosen(run_file=kept, why=f"layout.auto: {layout.describe()}, kept from {path} (layout.replan=true: anew)")
