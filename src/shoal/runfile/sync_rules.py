"""The rules between `[sync]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from shoal.codec.config import AutoConfig, DGCConfig, NoCodec
from shoal.engine.config import Float16
from shoal.models.config import MoEConfig
from shoal.optim.config import SGD
from shoal.resilience.config import ElasticConfig
from shoal.runfile.run_file import RunFile, statistics_group, with_processes
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
    processes = run_file.run.processes or run_file.layout.default_processes
    return None if processes is None else processes - run_file.sync.serving_only


def divides_evenly(shards: int, replicas: int) -> bool:
    """Whether each of `replicas` holds a whole branch of the tree that adds `shards` in pairs."""
    each, rest = divmod(shards, replicas)
    return rest == 0 and (replicas == 1 or each & (each - 1) == 0)


def _replicas(run_file: RunFile) -> int | None:
    """None before the number of processes is known."""
    layout = run_file.layout
    processes = run_file.run.processes or layout.default_processes
    inside = layout.pipeline * layout.shard * layout.context * layout.tensor
    return None if processes is None else processes // inside


# The rules between `[elastic]` and the other tables. Imports no torch.


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


# What a codec cannot serve: rules between `[codec]`, `[shard_codec]` and the other tables. Imports no torch.


def codec_refusal(run_file: RunFile) -> str | None:
    """One sentence if `[codec]`, or an optimizer that sends its momentum coded, cannot serve this run.

    A codec works on whole buckets, in which ranks of one replica may hold copies of a parameter beside different
    others; copies decode to the same bits only where there are none. Residuals count what was not sent of the gradient
    itself, so its unit may not change from step to step.
    """
    sends_momentum = run_file.optimizer.sends_momentum
    of_uploads = run_file.federated is not None  # `shoal train` checks such a run file once more, without clients
    if (isinstance(run_file.codec, NoCodec) or of_uploads) and not sends_momentum:
        return None
    found = next(_against_momenta(run_file), None) if sends_momentum else None
    found = found or next(_against_codec(run_file), None)
    table, chosen = ("optimizer", run_file.optimizer) if sends_momentum else ("codec", run_file.codec)
    kind = chosen.variant
    return None if found is None else f'{table}.kind = "{kind}" with {found[0]}: {found[1]}'


def _against_codec(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout = run_file.layout
    processes = run_file.run.processes or layout.default_processes or 0
    for axis in ("tensor", "expert"):
        if getattr(layout, axis) > 1:
            why = f"copies of a parameter along {axis} would decode to different bits; leave one of them out"
            yield f"layout.{axis} = {getattr(layout, axis)}", why
    if not run_file.sync.takes_codec:
        kind = run_file.sync.variant
        why = "it codes gradients, or outer gradients, that replicas sum or push; leave one of the two out"
        yield f'sync.kind = "{kind}"', why
    elif run_file.sync.replicas_are == "workers" and run_file.codec.of_all_ranks:
        why = "its ranks choose or compute together what they send, and workers push alone; use blockwise or top_k"
        yield f'sync.kind = "{run_file.sync.variant}"', why
    if isinstance(run_file.codec, DGCConfig):
        yield from _against_velocities(run_file)
    if layout.shard > 1 and layout.context == 1 and processes == layout.shard * layout.pipeline:
        why = "it codes what replicas send each other, and there is one; use [shard_codec], or more replicas"
        yield f"layout.shard = {layout.shard} and one replica", why
    if isinstance(run_file.codec, AutoConfig):
        yield from _against_auto(run_file)
    if layout.pipeline > 1 and run_file.pipeline.asynchronous:
        why = "its stages update after each microbatch, and count residuals by step; choose another schedule"
        yield f"pipeline.schedule = {run_file.pipeline.schedule!r}", why
    if run_file.gradients.bucket == "auto":
        yield 'gradients.bucket = "auto"', "residuals lie as the buckets do, and stay; leave gradients.bucket out"
    if isinstance(run_file.precision, Float16) and (run_file.codec.feedback or run_file.optimizer.sends_momentum):
        repair = "" if run_file.optimizer.sends_momentum else ", or set codec.feedback = false"
        why = f"residuals are in units of the loss scale, which changes; use bfloat16{repair}"
        yield 'precision.kind = "float16"', why
    if run_file.observe.noise_every_steps:
        why = "the noise needs the gradient itself, and a codec changes it; measure it without a codec"
        yield f"observe.noise_every_steps = {run_file.observe.noise_every_steps}", why


def _against_momenta(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do), for an optimizer whose gradients are momenta most of the time."""
    if not isinstance(run_file.codec, NoCodec):
        kind = run_file.codec.variant
        yield f'codec.kind = "{kind}"', "the optimizer has a codec of its own; leave [codec] out"
    if run_file.optimizer.clip_norm is not None:
        why = "it would clip momenta; leave optimizer.clip_norm out"
        yield f"optimizer.clip_norm = {run_file.optimizer.clip_norm:g}", why
    if run_file.sync.replicas_are != "lockstep":
        why = 'its momentum is summed in every step; use sync.kind = "allreduce", or another optimizer'
        yield f'sync.kind = "{run_file.sync.variant}"', why
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "its momenta are summed bucket by bucket; leave the schedule out"
    if run_file.sync.in_canonical_order:
        yield 'sync.order = "canonical"', "what ranks send depends on how many there are; leave one of the two out"


def shard_codec_refusal(run_file: RunFile) -> str | None:
    """One sentence if `[shard_codec]` cannot serve this run."""
    config, layout = run_file.shard_codec, run_file.layout
    chosen = [(key, value) for key in ("weights", "gradients") if (value := getattr(config, key)) != "none"]
    if not chosen:
        return None
    said = " and ".join(f'shard_codec.{key} = "{value}"' for key, value in chosen)
    if layout.shard == 1:
        return f"{said} with layout.shard = 1: no rank divides the model with another; set layout.shard, or use [codec]"
    for axis in ("tensor", "expert"):
        if getattr(layout, axis) > 1:
            return (
                f"{said} with layout.{axis} = {getattr(layout, axis)}: copies of a parameter along {axis} would decode "
                "to different bits; leave one of them out"
            )
    if config.weights != "none" and run_file.memory.zero in (1, 2):
        return (
            f'shard_codec.weights = "{config.weights}" with memory.zero = {run_file.memory.zero}: ranks update the '
            "parameters that they compute with, which have to stay exact; set memory.zero = 3, or leave weights out"
        )
    if config.gradients != "none" and run_file.observe.noise_every_steps:
        return (
            f'shard_codec.gradients = "{config.gradients}" with observe.noise_every_steps = '
            f"{run_file.observe.noise_every_steps}: the noise needs the gradient itself; measure it without a codec"
        )
    return None


def pipeline_codec_refusal(run_file: RunFile) -> str | None:
    """One sentence if `pipeline.codec` has nothing to code."""
    layout, codec = run_file.layout, run_file.pipeline.codec
    if codec == "none" or layout.auto or layout.pipeline > 1:
        return None
    return (
        f'pipeline.codec = "{codec}" with layout.pipeline = 1: no activation leaves a rank; set layout.pipeline, or '
        "use [codec] for gradients"
    )


def _against_auto(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do): ranks measure together before a step, all at the same place."""
    if run_file.sync.replicas_are != "lockstep":
        why = "it chooses for sums of every step; name a codec"
        yield f'sync.kind = "{run_file.sync.variant}"', why
    if run_file.gradients.schedule == "priority":
        why = "it looks at the link between two steps, when that is busy; name a codec"
        yield 'gradients.schedule = "priority"', why
    if run_file.run.device not in ("auto", "cpu"):
        yield f'run.device = "{run_file.run.device}"', "it measures processors and their links so far; name a codec"


def _against_velocities(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do), for a codec that sends velocities instead of gradients."""
    optimizer, sync = run_file.optimizer, run_file.sync
    if not isinstance(optimizer, SGD):
        why = 'it would take velocities for gradients; use optimizer.kind = "sgd", or another codec'
        yield f'optimizer.kind = "{optimizer.variant}"', why
    elif optimizer.momentum:
        why = "the codec has the momentum; set optimizer.momentum = 0"
        yield f"optimizer.momentum = {optimizer.momentum:g}", why
    if optimizer.clip_norm is not None:
        why = "it would clip sums of velocities; set codec.clip_norm instead"
        yield f"optimizer.clip_norm = {optimizer.clip_norm:g}", why
    if sync.replicas_are != "lockstep":
        why = 'outer gradients have a momentum of their own; use sync.kind = "allreduce", or another codec'
        yield f'sync.kind = "{sync.variant}"', why
