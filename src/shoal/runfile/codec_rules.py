"""The rules between `[codec]`, `[shard_codec]`, `pipeline.codec` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.codec.config import AutoConfig, DGCConfig, NoCodec
from shoal.engine.config import Float16
from shoal.optim.config import SGD
from shoal.runfile.run_file import RunFile


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
    processes = run_file.stated_processes or 0
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
