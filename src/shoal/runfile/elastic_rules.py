"""The rules between `[elastic]` and the other tables. Imports no torch."""

from __future__ import annotations

from shoal.runfile import facts
from shoal.runfile.rule import Rule, against, in_order
from shoal.runfile.run_file import RunFile, statistics_group, with_processes
from shoal.runfile.sync_rules import sync_refusal


def _started(run_file: RunFile) -> str | None:
    """A run starts with whole replicas, from the fewest to the most."""
    ranks, processes, elastic = run_file.layout.replica_size, run_file.run.processes, run_file.elastic
    if elastic is None or processes in (None, *range(elastic.min * ranks, elastic.max * ranks + 1, ranks)):
        return None
    each = "" if ranks == 1 else f", each of {ranks} ranks"
    return (
        f"run.processes = {processes} with elastic.min = {elastic.min} and elastic.max = {elastic.max} replicas"
        f"{each}: the run starts with {elastic.min * ranks} to {elastic.max * ranks} processes; change one of them"
    )


def _every_number(run_file: RunFile) -> str | None:
    """The strategy works with each number of replicas that there may be."""
    elastic, ranks = run_file.elastic, run_file.layout.replica_size
    if elastic is None:
        return None
    for replicas in range(elastic.min, elastic.max + 1):
        if (refusal := sync_refusal(with_processes(run_file, replicas * ranks))) is not None:
            return f"[elastic] with {elastic.min} to {elastic.max} replicas: {refusal}"
    return None


def _samples(run_file: RunFile) -> str | None:
    if run_file.elastic is None:
        return None
    most, samples = run_file.elastic.max, run_file.batch.global_samples
    working = max(1, most - run_file.sync.serving_only)
    each = run_file.layout.shard * statistics_group(run_file.model)
    if samples >= working * each:
        return None
    return (
        f"batch.global_samples = {samples} with elastic.max = {most}: each replica needs at "
        f"least {each} of a step; raise it to {working * each} or more, or lower elastic.max"
    )


_MADE_WHOLE = "an update must be made whole, between two steps"

elastic_refusal = in_order(
    _started,
    against(
        facts.ELASTIC,
        Rule(
            facts.stated("layout.replicate"),
            "the number of replicas changes",
            "leave it out, and set elastic.min and elastic.max",
        ),
        Rule(facts.named("layout.auto"), "it plans for a fixed number of replicas", "leave it out"),
        Rule(facts.PIPEDREAM, _MADE_WHOLE, "choose a schedule that updates once a step"),
        Rule(
            facts.kinds("sync", "hogwild"),
            "its processes share one memory, which ends with them",
            "choose another sync.kind",
        ),
        found_first=True,
    ),
    _every_number,
    against(
        facts.ELASTIC,
        Rule(facts.SENDS_MOMENTUM, "a lost replica would take its error feedback along", 'use "adamw"'),
        Rule(facts.BY_SPEED, "replicas that come and go share evenly", "leave it out"),
        Rule(facts.PRIORITY, _MADE_WHOLE, "leave the schedule out"),
        found_first=True,
    ),
    _samples,
)
