"""The rules between `[sync]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from shoal.codec.config import NoCodec
from shoal.engine.config import Float16
from shoal.models.config import MoEConfig
from shoal.optim.config import SGD
from shoal.runfile.run_file import RunFile, statistics_group
from shoal.sync.config import AllReduceConfig, GossipConfig, HogwildConfig, LocalConfig, ServerConfig


def sync_refusal(run_file: RunFile) -> str | None:
    """One sentence if the strategy cannot work with this layout or these keys."""
    sync = run_file.sync
    if isinstance(sync, AllReduceConfig):
        found = next(_against_canonical(run_file, sync), None) if run_file.sync.in_canonical_order else None
        return None if found is None else f'sync.order = "canonical" with {found[0]}: {found[1]}'
    found = next(chain(_of_kind(run_file), _against_replicas(run_file)), None)
    return None if found is None else f'sync.kind = "{run_file.sync.variant}" with {found[0]}: {found[1]}'


def _of_kind(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do), for what one kind alone asks."""
    sync, replicas = run_file.sync, _replicas(run_file)
    if isinstance(sync, GossipConfig) and replicas is not None:
        yield from _against_graph(sync, replicas)
    if isinstance(sync, GossipConfig) and sync.asynchronous:
        yield from _against_late_shares(run_file)
    if isinstance(sync, ServerConfig):
        yield from _against_backup(run_file, sync)
    if isinstance(sync, HogwildConfig):
        yield from _against_shared_state(run_file)


def _against_replicas(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """What replicas of the strategy's form cannot work with."""
    of = {"lockstep": lambda _: iter(()), "own_steps": _against_own_steps, "workers": _against_workers}
    return of[run_file.sync.replicas_are](run_file)


def division_refusal(run_file: RunFile) -> str | None:
    """One sentence if work cannot be divided by speed."""
    if run_file.batch.division == "even":
        return None
    found = next(_against_division(run_file), None)
    return None if found is None else f'batch.division = "by_speed" with {found[0]}: {found[1]}'


def _against_division(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout = run_file.layout
    if not run_file.sync.weighs_samples:
        why = "it counts all replicas the same, whatever they computed; use allreduce, local or server"
        yield f'sync.kind = "{run_file.sync.variant}"', why
    if run_file.sync.in_canonical_order:
        yield 'sync.order = "canonical"', "its logical shards are equal parts; leave one of the two out"
    for axis in ("pipeline", "shard", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "it is for replicas of one rank; use layout.replicate"
    if run_file.observe.noise_every_steps:
        yield "observe.noise_every_steps", "the noise is measured on equal shares; leave it out"


def _against_own_steps(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do), for strategies under which replicas take steps of their own."""
    replicas = _replicas(run_file)
    if replicas == 1:
        yield "one replica", "there is no other to agree with; raise layout.replicate or run.processes"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "replicas send no gradients; leave it out"
    if run_file.pipeline.asynchronous:
        yield f"pipeline.schedule = {run_file.pipeline.schedule!r}", "choose a schedule that updates once a step"
    if isinstance(run_file.precision, Float16):
        yield 'precision.kind = "float16"', "each replica would have a loss scale of its own; use bfloat16"
    if run_file.observe.noise_every_steps:
        yield "observe.noise_every_steps", "the noise is measured on gradients of the global batch; leave it out"
    if isinstance(run_file.sync, LocalConfig) and run_file.sync.merge == "adasum":
        yield from _against_adasum(run_file)


def _against_adasum(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do): it asks for whole changes, each of which counts the same."""
    for axis in ("pipeline", "shard", "context", "tensor", "expert"):
        if getattr(run_file.layout, axis) > 1:
            why = 'merge = "adasum" takes inner products of whole parameters; use layout.replicate'
            yield f"layout.{axis} = {getattr(run_file.layout, axis)}", why
    if run_file.codec != NoCodec():
        yield "[codec]", 'merge = "adasum" sends what replicas changed as it is; leave one of the two out'
    if run_file.batch.division != "even":
        yield 'batch.division = "by_speed"', 'merge = "adasum" counts all replicas the same; leave one of the two out'


def _against_graph(sync: GossipConfig, replicas: int) -> Iterator[tuple[str, str]]:
    try:
        sync.matrices(replicas)
    except ValueError as error:
        yield f'graph = "{sync.graph}"', str(error)


def _against_late_shares(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do): ranks of one replica would add shares at other moments."""
    for axis in ("pipeline", "shard", "context", "tensor", "expert"):
        if getattr(run_file.layout, axis) > 1:
            why = "with asynchronous = true a replica is one rank; use layout.replicate, or leave asynchronous out"
            yield f"layout.{axis} = {getattr(run_file.layout, axis)}", why
    if run_file.run.device == "cuda":
        yield 'run.device = "cuda"', "with asynchronous = true it runs on processors so far; leave one of them out"


def _against_canonical(run_file: RunFile, sync: AllReduceConfig) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do): what would add in another order on another number of replicas."""
    layout, batch, shards = run_file.layout, run_file.batch, sync.logical_shards
    for axis in ("pipeline", "shard", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "it is for replicas of one rank; use layout.replicate"
    group = statistics_group(run_file.model)
    if batch.global_samples % (shards * group):
        down = max(1, batch.global_samples // (shards * group)) * shards * group
        why = f"logical shards must be equally large; nearest global_samples: {down} or {down + shards * group}"
        yield f"sync.logical_shards = {shards} and batch.global_samples = {batch.global_samples}", why
    if batch.micro_samples not in (None, batch.global_samples // shards):
        yield f"batch.micro_samples = {batch.micro_samples}", "a microbatch is one logical shard there; leave it out"
    replicas = _replicas(run_file)
    if replicas is not None and not divides_evenly(shards, replicas):
        fitting = [str(n) for n in range(1, shards + 1) if divides_evenly(shards, n)]
        why = f"each replica must add whole branches of the tree of {shards}; use {', '.join(fitting)}"
        yield f"{replicas} replicas", why
    if run_file.codec != NoCodec():
        yield "[codec]", "a codec's sum depends on the ranks that encode; leave one of the two out"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "its partitions are summed by all-reduce; leave one of the two out"
    if run_file.gradients.bucket == "auto":
        yield 'gradients.bucket = "auto"', "the norm is added up by bucket; leave gradients.bucket out"
    if getattr(run_file.model, "norm", None) == "batch":
        yield 'model.norm = "batch"', "running statistics are summed over ranks by all-reduce; choose another norm"
    if isinstance(run_file.model, MoEConfig):
        yield 'model.kind = "moe"', "loads of experts are summed over ranks by all-reduce; choose another model"
    if run_file.observe.noise_every_steps:
        yield (
            "observe.noise_every_steps",
            "it takes the first of a rank's microbatches, which are another; leave it out",
        )


def _against_backup(run_file: RunFile, sync: ServerConfig) -> Iterator[tuple[str, str]]:
    workers = _workers(run_file)
    if workers is None or workers < 1 or sync.backup is None or sync.backup < workers:
        return
    if workers > 1:
        why = f"of {workers} workers none would be left to count; backup must be at most {workers - 1}"
        yield f"backup = {sync.backup}", why
    elif sync.servers:
        yield f"backup = {sync.backup}", "of one worker none would be left to count; use more, or another admission"


def _against_shared_state(run_file: RunFile) -> Iterator[tuple[str, str]]:
    optimizer = run_file.optimizer
    if not isinstance(optimizer, SGD):
        why = 'its state would be shared too; use optimizer.kind = "sgd"'
        yield f'optimizer.kind = "{optimizer.variant}"', why
    elif optimizer.momentum:
        yield f"optimizer.momentum = {optimizer.momentum:g}", "it would be shared too; leave optimizer.momentum out"


def _against_workers(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """What neither servers nor shared parameters can work with: (key and value, why not and what to do)"""
    layout = run_file.layout
    for axis in ("pipeline", "shard", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            why = "its workers are replicas of one rank; leave it out, or choose another sync.kind"
            yield f"layout.{axis} = {getattr(layout, axis)}", why
    workers = _workers(run_file)
    if workers is not None:
        yield from _against_shares(run_file, workers)
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "replicas sum no gradients; leave it out"
    if isinstance(run_file.precision, Float16):
        yield 'precision.kind = "float16"', "each worker would have a loss scale of its own; use bfloat16"
    if run_file.observe.noise_every_steps:
        yield "observe.noise_every_steps", "the noise is measured on gradients of the global batch; leave it out"
    if run_file.run.device == "cuda":
        yield 'run.device = "cuda"', "it runs on processors so far; leave run.device out"


def _against_shares(run_file: RunFile, workers: int) -> Iterator[tuple[str, str]]:
    serving = run_file.sync.serving_only
    if workers < 1:
        why = f"of {workers + serving} processes none would be left to work; lower it, or raise run.processes"
        yield f"servers = {serving}", why
    elif workers == 1 and not serving:
        yield "one replica", "there is no other to work with; raise layout.replicate or run.processes"
    elif run_file.batch.division == "even" and run_file.batch.global_samples % workers:
        why = (
            f"every worker's gradient counts the same, so {workers} workers need equal shares; "
            f'use a multiple of {workers}, or batch.division = "by_speed"'
        )
        yield f"batch.global_samples = {run_file.batch.global_samples}", why


def _workers(run_file: RunFile) -> int | None:
    """Processes that compute gradients; None before their number is known."""
    processes = run_file.stated_processes
    return None if processes is None else processes - run_file.sync.serving_only


def divides_evenly(shards: int, replicas: int) -> bool:
    """Whether each of `replicas` holds a whole branch of the tree that adds `shards` in pairs."""
    each, rest = divmod(shards, replicas)
    return rest == 0 and (replicas == 1 or each & (each - 1) == 0)


def _replicas(run_file: RunFile) -> int | None:
    """None before the number of processes is known."""
    processes = run_file.stated_processes
    return None if processes is None else processes // run_file.layout.replica_size
