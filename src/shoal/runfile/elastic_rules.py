"""The rules between `[elastic]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.resilience.config import ElasticConfig
from shoal.runfile.run_file import RunFile, statistics_group, with_processes
from shoal.runfile.sync_rules import sync_refusal
from shoal.sync.config import HogwildConfig


def elastic_refusal(run_file: RunFile) -> str | None:
    """One sentence if replicas of this run cannot come and go; None where they can, or without `[elastic]`."""
    return None if run_file.elastic is None else next(_refusals(run_file, run_file.elastic), None)


def _refusals(run_file: RunFile, elastic: ElasticConfig) -> Iterator[str]:
    run, layout, most, sync = run_file.run, run_file.layout, elastic.max, run_file.sync
    ranks, working = layout.replica_size, max(1, most - sync.serving_only)
    fewest = working * layout.shard * statistics_group(run_file.model)
    if run.processes is not None and run.processes not in range(elastic.min * ranks, most * ranks + 1, ranks):
        each = "" if ranks == 1 else f", each of {ranks} ranks"
        yield (
            f"run.processes = {run.processes} with elastic.min = {elastic.min} and elastic.max = {most} replicas"
            f"{each}: the run starts with {elastic.min * ranks} to {most * ranks} processes; change one of them"
        )
    if layout.replicate is not None:
        yield (
            f"layout.replicate = {layout.replicate} with [elastic]: the number of replicas changes; leave it out, and "
            "set elastic.min and elastic.max"
        )
    if layout.auto:
        yield "layout.auto with [elastic]: it plans for a fixed number of replicas; leave it out"
    if run_file.pipeline.asynchronous:
        yield (
            f"pipeline.schedule = {run_file.pipeline.schedule!r} with [elastic]: an update must be made whole, between "
            "two steps; choose a schedule that updates once a step"
        )
    if isinstance(sync, HogwildConfig):
        yield (
            'sync.kind = "hogwild" with [elastic]: its processes share one memory, which ends with them; choose '
            "another sync.kind"
        )
    for replicas in range(elastic.min, most + 1):
        if (refusal := sync_refusal(with_processes(run_file, replicas * ranks))) is not None:
            yield f"[elastic] with {elastic.min} to {most} replicas: {refusal}"
    if run_file.optimizer.sends_momentum:
        kind = run_file.optimizer.variant
        why = 'a lost replica would take its error feedback along; use "adamw"'
        yield f'optimizer.kind = "{kind}" with [elastic]: {why}'
    if run_file.batch.division == "by_speed":
        yield 'batch.division = "by_speed" with [elastic]: replicas that come and go share evenly; leave it out'
    if run_file.gradients.schedule == "priority":
        yield (
            'gradients.schedule = "priority" with [elastic]: an update must be made whole, between two steps; leave '
            "the schedule out"
        )
    if run_file.batch.global_samples < fewest:
        yield (
            f"batch.global_samples = {run_file.batch.global_samples} with elastic.max = {most}: each replica needs at "
            f"least {fewest // working} of a step; raise it to {fewest} or more, or lower elastic.max"
        )
