"""The rules between `[sync]` and the other tables. Imports no torch."""

from __future__ import annotations

from typing import Any

from shoal.codec.config import NoCodec
from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Rule, against, axes, in_order
from shoal.runfile.run_file import RunFile, statistics_group
from shoal.sync.config import GossipConfig


def _workers(run_file: RunFile) -> int | None:
    """Processes that compute gradients; None before their number is known."""
    processes = run_file.stated_processes
    return None if processes is None else processes - run_file.sync.serving_only


def _replicas(run_file: RunFile) -> int | None:
    """None before the number of processes is known."""
    processes = run_file.stated_processes
    return None if processes is None else processes // run_file.layout.replica_size


_ONE_RANK = "it is for replicas of one rank"
_ONE_OF_TWO = "leave one of the two out"
_ANY_CODEC = Fact("[codec]", lambda run_file: run_file.codec != NoCodec())
_GLOBAL_NOISE = Rule(facts.NOISE, "the noise is measured on gradients of the global batch", "leave it out")

# What would add in another order on another number of replicas.


def divides_evenly(shards: int, replicas: int) -> bool:
    """Whether each of `replicas` holds a whole branch of the tree that adds `shards` in pairs."""
    each, rest = divmod(shards, replicas)
    return rest == 0 and (replicas == 1 or each & (each - 1) == 0)


def _logical_shards(run_file: RunFile) -> int:
    return getattr(run_file.sync, "logical_shards", 1)


def _uneven_shards(run_file: RunFile) -> str | None:
    shards, samples = _logical_shards(run_file), run_file.batch.global_samples
    uneven = samples % (shards * statistics_group(run_file.model))
    return f"sync.logical_shards = {shards} and batch.global_samples = {samples}" if uneven else None


def _nearest_samples(run_file: RunFile) -> str:
    unit, samples = _logical_shards(run_file) * statistics_group(run_file.model), run_file.batch.global_samples
    down = max(1, samples // unit) * unit
    return f"nearest global_samples: {down} or {down + unit}"


def _other_microbatch(run_file: RunFile) -> bool:
    return run_file.batch.micro_samples != run_file.batch.global_samples // _logical_shards(run_file)


def _cut_branches(run_file: RunFile) -> str | None:
    replicas = _replicas(run_file)
    cut = replicas is not None and not divides_evenly(_logical_shards(run_file), replicas)
    return f"{replicas} replicas" if cut else None


def _whole_branches(run_file: RunFile) -> str:
    shards = _logical_shards(run_file)
    return f"use {', '.join(str(n) for n in range(1, shards + 1) if divides_evenly(shards, n))}"


_CANONICAL = against(
    facts.CANONICAL,
    *axes(facts.ALL_AXES, _ONE_RANK, "use layout.replicate"),
    Rule(Fact("shards of several sizes", _uneven_shards), "logical shards must be equally large", _nearest_samples),
    Rule(facts.MICRO_SAMPLES.where(_other_microbatch), "a microbatch is one logical shard there", "leave it out"),
    Rule(
        Fact("replicas that cut a branch of the tree", _cut_branches),
        lambda run_file: f"each replica must add whole branches of the tree of {_logical_shards(run_file)}",
        _whole_branches,
    ),
    Rule(_ANY_CODEC, "a codec's sum depends on the ranks that encode", _ONE_OF_TWO),
    Rule(facts.PRIORITY, "its partitions are summed by all-reduce", _ONE_OF_TWO),
    Rule(facts.BUCKET_SEARCH, "the norm is added up by bucket", "leave gradients.bucket out"),
    Rule(
        Fact('model.norm = "batch"', lambda run_file: getattr(run_file.model, "norm", None) == "batch"),
        "running statistics are summed over ranks by all-reduce",
        "choose another norm",
    ),
    Rule(facts.MOE, "loads of experts are summed over ranks by all-reduce", "choose another model"),
    Rule(facts.NOISE, "it takes the first of a rank's microbatches, which are another", "leave it out"),
)

# What one kind alone asks.


def _of_kind(name: str, holds: Any = lambda _: True) -> Fact:
    return facts.kind("sync", lambda sync: sync.variant == name and holds(sync), f'= "{name}"')


def _graph_error(run_file: RunFile) -> str | None:
    sync, replicas = run_file.sync, _replicas(run_file)
    if isinstance(sync, GossipConfig) and replicas is not None:
        try:
            sync.matrices(replicas)
        except ValueError as error:
            return str(error)
    return None


def _no_graph(run_file: RunFile) -> str | None:
    return f'graph = "{getattr(run_file.sync, "graph", None)}"' if _graph_error(run_file) is not None else None


def _backup(run_file: RunFile) -> str | None:
    backup, workers = getattr(run_file.sync, "backup", None), _workers(run_file)
    if backup is None or workers is None or workers < 1 or backup < workers:
        return None
    return f"backup = {backup}" if workers > 1 or run_file.sync.serving_only else None


def _of_one_worker(run_file: RunFile) -> str | None:
    return _backup(run_file) if _workers(run_file) == 1 else None


_KINDS = in_order(
    against(
        _of_kind("gossip"),
        Rule(Fact("a graph that these replicas cannot be", _no_graph), lambda run_file: _graph_error(run_file) or ""),
    ),
    against(
        _of_kind("gossip", lambda sync: sync.asynchronous),
        *axes(
            facts.ALL_AXES,
            "with asynchronous = true a replica is one rank",
            "use layout.replicate, or leave asynchronous out",
        ),
        Rule(facts.CUDA, "with asynchronous = true it runs on processors so far", "leave one of them out"),
    ),
    against(
        _of_kind("server"),
        Rule(
            Fact("backup of one worker", _of_one_worker),
            "of one worker none would be left to count",
            "use more, or another admission",
        ),
        Rule(
            Fact("backup of all workers", _backup),
            lambda run_file: f"of {_workers(run_file)} workers none would be left to count",
            lambda run_file: f"backup must be at most {(_workers(run_file) or 1) - 1}",
        ),
    ),
    against(
        _of_kind("hogwild"),
        Rule(facts.NOT_SGD, "its state would be shared too", 'use optimizer.kind = "sgd"'),
        Rule(facts.MOMENTUM, "it would be shared too", "leave optimizer.momentum out"),
    ),
)

# What replicas of the strategy's form cannot work with.


def _one_replica(run_file: RunFile) -> str | None:
    return "one replica" if _replicas(run_file) == 1 else None


def _lone_worker(run_file: RunFile) -> str | None:
    return "one replica" if _workers(run_file) == 1 and not run_file.sync.serving_only else None


def _no_worker(run_file: RunFile) -> str | None:
    workers = _workers(run_file)
    return f"servers = {run_file.sync.serving_only}" if workers is not None and workers < 1 else None


def _uneven_shares(run_file: RunFile) -> str | None:
    workers, samples = _workers(run_file), run_file.batch.global_samples
    uneven = workers is not None and workers > 0 and samples % workers and run_file.batch.division == "even"
    return f"batch.global_samples = {samples}" if uneven else None


_OWN_STEPS = against(
    facts.OWN_STEPS,
    Rule(
        Fact("one replica", _one_replica), "there is no other to agree with", "raise layout.replicate or run.processes"
    ),
    Rule(facts.PRIORITY, "replicas send no gradients", "leave it out"),
    Rule(facts.PIPEDREAM, "", "choose a schedule that updates once a step"),
    Rule(facts.FLOAT16, "each replica would have a loss scale of its own", "use bfloat16"),
    _GLOBAL_NOISE,
)

_ADASUM = against(
    _of_kind("local", lambda sync: sync.merge == "adasum"),
    *axes(facts.ALL_AXES, 'merge = "adasum" takes inner products of whole parameters', "use layout.replicate"),
    Rule(_ANY_CODEC, 'merge = "adasum" sends what replicas changed as it is', _ONE_OF_TWO),
    Rule(facts.BY_SPEED, 'merge = "adasum" counts all replicas the same', _ONE_OF_TWO),
)

_WORKERS = against(
    facts.WORKERS,
    *axes(facts.ALL_AXES, "its workers are replicas of one rank", "leave it out, or choose another sync.kind"),
    Rule(
        Fact("as many servers as processes", _no_worker),
        lambda run_file: f"of {run_file.stated_processes} processes none would be left to work",
        "lower it, or raise run.processes",
    ),
    Rule(
        Fact("one replica", _lone_worker), "there is no other to work with", "raise layout.replicate or run.processes"
    ),
    Rule(
        Fact("batch.global_samples in unequal shares", _uneven_shares),
        lambda run_file: f"every worker's gradient counts the same, so {_workers(run_file)} workers need equal shares",
        lambda run_file: f'use a multiple of {_workers(run_file)}, or batch.division = "by_speed"',
    ),
    Rule(facts.PRIORITY, "replicas sum no gradients", "leave it out"),
    Rule(facts.FLOAT16, "each worker would have a loss scale of its own", "use bfloat16"),
    _GLOBAL_NOISE,
    Rule(facts.CUDA, "it runs on processors so far", "leave run.device out"),
)

sync_refusal = in_order(_CANONICAL, _KINDS, _OWN_STEPS, _ADASUM, _WORKERS)

division_refusal = against(
    facts.BY_SPEED,
    Rule(
        facts.kind("sync", lambda sync: not sync.weighs_samples, "that counts replicas alike"),
        "it counts all replicas the same, whatever they computed",
        "use allreduce, local or server",
    ),
    Rule(facts.CANONICAL, "its logical shards are equal parts", _ONE_OF_TWO),
    *axes(facts.ALL_AXES, _ONE_RANK, "use layout.replicate"),
    Rule(facts.NOISE, "the noise is measured on equal shares", "leave it out"),
)
