"""The rules between tables of a run file: what no table can know by itself. Imports no torch.

A rule returns one sentence, with what was found, the rule and the repair, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.data.config import DataConfig, Mixture, StdlibText, TextFiles
from shoal.data.record_config import Records, Stream
from shoal.engine.config import CrossEntropy, Float8, Float16
from shoal.errors import ConfigError
from shoal.models.config import GPTConfig, MoEConfig
from shoal.models.huggingface.config import TransformersConfig, vocabulary_of
from shoal.runfile.federated_rules import federated_refusal
from shoal.runfile.layout_rules import layout_refusal, microbatch_sizes, most_samples
from shoal.runfile.memory_rules import memory_refusal
from shoal.runfile.run_file import RunFile, statistics_group, synchronises_norms
from shoal.runfile.sparsity_rules import partly_trained_refusal
from shoal.runfile.sync_rules import (
    codec_refusal,
    division_refusal,
    elastic_refusal,
    pipeline_codec_refusal,
    shard_codec_refusal,
    sync_refusal,
)
from shoal.runfile.training_rules import masters_refusal, norm_refusal, optimizer_refusal


def check_across(run_file: RunFile, *, file: str) -> None:
    """The rules between tables. Raises `ConfigError` for the first that is broken."""
    sentence = refusal(run_file)
    if sentence is not None:
        raise ConfigError(f"{file}: {sentence}")


def refusal(run_file: RunFile) -> str | None:
    """The first rule between the tables that is broken, as a sentence; None where all hold."""
    for rule in (
        _batch_rule,
        _groups_rule,
        _epoch_end_rule,
        _batch_schedule_rule,
        _vocabulary_rule,
        _packing_rule,
        _weights_rule,
        layout_refusal,
        norm_refusal,
        _float8_rule,
        masters_refusal,
        loss_chunks_refusal,
        memory_refusal,
        pipedream_refusal,
        noise_refusal,
        layer_norms_refusal,
        gradients_refusal,
        codec_refusal,
        shard_codec_refusal,
        pipeline_codec_refusal,
        wire_refusal,
        sync_refusal,
        division_refusal,
        watch_refusal,
        elastic_refusal,
        optimizer_refusal,
        partly_trained_refusal,
        federated_refusal,
    ):
        sentence = rule(run_file)
        if sentence is not None:
            return sentence
    return None


def watch_refusal(run_file: RunFile) -> str | None:
    """One sentence where evaluations cannot be compared, as `run.stop_when` and `checkpoint.keep_best` ask for."""
    keys = {"run.stop_when": run_file.run.stop_when, "checkpoint.keep_best": run_file.checkpoint.keep_best}
    key = next((key for key, table in keys.items() if table is not None), None)
    if key is None:
        return None
    if not run_file.observe.evaluate_every_steps:
        return f"{key} compares evaluations, and there is one at the end alone: set observe.evaluate_every_steps"
    if run_file.elastic is not None or run_file.federated is not None:
        table = "elastic" if run_file.elastic is not None else "federated"
        return f"{key} with [{table}]: it needs ranks that evaluate together from the first step on; leave one out"
    if run_file.run.stop_when is not None and (
        run_file.sync.serving_only or run_file.sync.variant in ("server", "hogwild")
    ):
        return (
            f'run.stop_when with sync.kind = "{run_file.sync.variant}": its ranks count the steps to the last one by '
            "themselves; leave it out"
        )
    return None


def _batch_rule(run_file: RunFile) -> str | None:
    layout, samples = run_file.layout, run_file.batch.global_samples
    processes = run_file.run.processes or layout.default_processes or 1
    shares = max(1, processes // (layout.pipeline * layout.context * layout.tensor) - run_file.sync.serving_only)
    fewest = shares * statistics_group(run_file.model)
    if samples < fewest:
        what = f"{shares} replicas" if layout.shard == 1 else f"{shares} shares (replicate x shard)"
        return (
            f"batch.global_samples = {samples} for {what}: each needs at least "
            f"{statistics_group(run_file.model)} of a step; raise it to {fewest} or more, or use fewer processes"
        )
    return None


def _groups_rule(run_file: RunFile) -> str | None:
    group = statistics_group(run_file.model)
    for name, value in (
        ("global_samples", run_file.batch.global_samples),
        ("micro_samples", run_file.batch.micro_samples),
    ):
        if value is not None and value % group:
            down = max(group, value - value % group)
            return (
                f"batch.{name} = {value}: the model takes groups of {group} samples together (model.group_samples), so "
                f"it must be a multiple of {group}; nearest: {down} or {value - value % group + group}"
            )
    return None


def _epoch_end_rule(run_file: RunFile) -> str | None:
    end, written = run_file.batch.epoch_end, f'batch.epoch_end = "{run_file.batch.epoch_end}"'
    if end == "straddle":
        return None
    if isinstance(run_file.data, Mixture | Stream):
        return f"{written}: a mixture or a stream has no epoch; leave it out"
    if end == "short" and (run_file.pipeline.asynchronous or run_file.sync.in_canonical_order):
        return (
            f'{written} with pipeline.schedule = "PipeDream" or sync.order = "canonical": every step has the same '
            'microbatches there; set it to "drop" or "straddle"'
        )
    return None


def _batch_schedule_rule(run_file: RunFile) -> str | None:
    """Every rank has samples in every phase, and where replicas are split, as many as the others."""
    batch, layout, group = run_file.batch, run_file.layout, statistics_group(run_file.model)
    if not batch.smaller_sizes:
        return None
    key = "batch.schedule" if batch.adaptive is None else "batch.adaptive"
    processes = run_file.run.processes or layout.default_processes or 1
    shares = max(1, processes // (layout.pipeline * layout.context * layout.tensor))
    split = layout.pipeline * layout.context * layout.tensor * layout.shard > 1 or synchronises_norms(run_file.model)
    for samples in batch.smaller_sizes:
        if samples < shares * group or samples % group:
            return (
                f"{key} has a phase of {samples} samples for {shares} shares of groups of {group}: each "
                f"needs a whole group; use a multiple of {group} from {shares * group} on"
            )
    sizes = [batch.global_samples, *batch.smaller_sizes]
    odd = next((size for size in sizes if split and size % (shares * group)), None)
    if odd is not None:
        return (
            f"{key} with steps of {odd} samples over {shares} shares of a split model: ranks must have as "
            f"many as one another; use multiples of {shares * group} for global_samples and every phase"
        )
    found = next(_against_batch_schedule(run_file), None)
    return None if found is None else f"{key} with {found[0]}: {found[1]}"


def _against_batch_schedule(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    sync = run_file.sync
    if sync.replicas_are != "lockstep":
        yield f'sync.kind = "{sync.variant}"', 'replicas count steps by themselves; set it to "allreduce"'
    if sync.in_canonical_order:
        yield 'sync.order = "canonical"', "every step has the same logical shards; leave one of the two out"
    if run_file.pipeline.asynchronous:
        yield f"pipeline.schedule = {run_file.pipeline.schedule!r}", "every step has the same microbatches; use 1F1B"
    if run_file.elastic is not None:
        yield "[elastic]", "replicas are compared by steps of one size; leave one of the two out"
    if run_file.batch.division == "by_speed":
        yield 'batch.division = "by_speed"', "speeds are measured on steps of one size; leave one of the two out"
    if run_file.batch.adaptive is not None and not run_file.observe.noise_every_steps:
        yield "observe.noise_every_steps = 0", "the noise decides; set it to 5, say"
    if run_file.batch.adaptive is not None and isinstance(run_file.data, Stream):
        yield 'data.kind = "stream"', "a feed of several sizes is opened again; use batch.schedule"
    if run_file.federated is not None or run_file.privacy is not None:
        yield "[federated] or [privacy]", "clients and accountants count steps of one size; leave one of the two out"


def _vocabulary_rule(run_file: RunFile) -> str | None:
    model = run_file.model
    reads_bytes = any(_reads_bytes(data) for _, data in _tables_of_data(run_file.data))
    key, vocabulary = "model.vocabulary", model.vocabulary if isinstance(model, GPTConfig) else None
    if reads_bytes and isinstance(model, TransformersConfig):
        key, vocabulary = "model.config.vocab_size", vocabulary_of(model)
    if reads_bytes and vocabulary is not None and vocabulary < 256:
        return f"{key} = {vocabulary}: text is read as bytes, so it must be at least 256"
    return None


def _reads_bytes(data: DataConfig) -> bool:
    if isinstance(data, TextFiles | Records):
        return data.tokenizer is None and (isinstance(data, TextFiles) or data.text is not None)
    return isinstance(data, StdlibText)


def _packing_rule(run_file: RunFile) -> str | None:
    model = run_file.model
    limited = isinstance(model, MoEConfig) and model.capacity_factor is not None
    for key, data in _tables_of_data(run_file.data):
        if getattr(data, "packing", None) == "documents" and limited:
            return (
                f'{key}.packing = "documents" with model.capacity_factor: an expert takes the first tokens of a '
                "sequence, and positions that restart do not say which are first; leave capacity_factor out, or pack "
                "otherwise"
            )
    return None


def _weights_rule(run_file: RunFile) -> str | None:
    denominator = run_file.batch.denominator
    for key, data in _tables_of_data(run_file.data):
        if getattr(data, "loss_weights", None) is not None and denominator in ("samples", "tokens"):
            return (
                f'{key}.loss_weights with batch.denominator = "{denominator}", which passes weights over: leave one of '
                "the two out"
            )
    return None


def _tables_of_data(data: DataConfig) -> Iterator[tuple[str, DataConfig]]:
    """`[data]` and, of a mixture, the tables of its sources, each with its key."""
    yield "data", data
    if isinstance(data, Mixture):
        yield from ((f"data.sources.{name}", source) for name, source in data.sources.items())


def _float8_rule(run_file: RunFile) -> str | None:
    if not isinstance(run_file.precision, Float8) or run_file.layout.tensor == 1:
        return None
    return (
        f'precision.kind = "float8" with layout.tensor = {run_file.layout.tensor}: layers that ranks split have no '
        'float8 products; set layout.tensor = 1, or precision.kind = "bfloat16"'
    )


def loss_chunks_refusal(run_file: RunFile) -> str | None:
    """One sentence if the loss cannot be taken of a part of the tokens at a time."""
    chunks, loss = run_file.memory.loss_chunks, run_file.loss
    if chunks == 1:
        return None
    if not isinstance(loss, CrossEntropy):
        return (
            f'memory.loss_chunks = {chunks} with loss.kind = "{loss.variant}": only the cross-entropy of each token is '
            "known to need no other token; leave memory.loss_chunks out"
        )
    if run_file.run.compile not in (False, "blocks"):
        return (
            f"memory.loss_chunks = {chunks} with {run_file.run.compile_said}: a compiled forward ends "
            'with its logits; leave one of the two out, or set run.compile = "blocks"'
        )
    return None


def pipedream_refusal(run_file: RunFile) -> str | None:
    """One sentence if PipeDream, which updates after each microbatch, cannot run; None for other schedules.

    Refused is what needs one version of the weights, or a moment when all stages hold the gradient of one microbatch.
    """
    if not run_file.pipeline.asynchronous:
        return None
    found = next(_against_pipedream(run_file), None)
    return None if found is None else f'pipeline.schedule = "PipeDream" with {found[0]}: {found[1]}'


def _against_pipedream(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout, model, optimizer = run_file.layout, run_file.model, run_file.optimizer
    if layout.pipeline == 1:
        yield "layout.pipeline = 1", "it is another computation than training without a pipeline; set it to 2 or more"
    if layout.shard > 1:
        yield f"layout.shard = {layout.shard}", "each stage keeps older weights, whole; use layout.replicate"
    if layout.expert > 1:
        yield f"layout.expert = {layout.expert}", "its older weights are proved with whole experts only; set it to 1"
    if isinstance(model, MoEConfig):
        yield 'model.kind = "moe"', "experts are balanced once a step; choose another schedule"
    if getattr(model, "tied", False):
        yield "model.tied = true", "the two ends of the pipeline are at different updates; set it to false"
    if isinstance(run_file.precision, Float16):
        yield 'precision.kind = "float16"', "its loss scale needs a vote of all stages; use bfloat16"
    if run_file.pipeline.microbatches is not None and run_file.batch.micro_samples is not None:
        yield "pipeline.microbatches and batch.micro_samples", "each says how many updates a step makes; leave one out"
    elif (other := _other_number(run_file)) is not None:
        yield f"pipeline.microbatches = {run_file.pipeline.microbatches}", other
    if optimizer.lr_for_samples is not None:
        yield "optimizer.lr_for_samples", "an update is a microbatch there; set optimizer.lr alone"


def _other_number(run_file: RunFile) -> str | None:
    """Why the written number of updates is not that which a step would make; None where it is, or none is written.

    Microbatches are of one size, of `s` groups of samples: the numbers that come out are ceil(groups / s).
    """
    layout, wanted = run_file.layout, run_file.pipeline.microbatches
    processes = run_file.run.processes or layout.default_processes or 1
    shares = max(1, processes // (layout.pipeline * layout.context * layout.tensor))
    sizes, most = microbatch_sizes(run_file, shares=shares), most_samples(run_file, shares=shares)
    if wanted is None or sizes.in_flight == wanted:
        return None
    smaller = sizes.samples - statistics_group(run_file.model)
    nearest = [sizes.in_flight] if smaller == 0 else [sizes.in_flight, -(-most // smaller)]
    return (
        f"{most} samples in microbatches of {sizes.samples} make {sizes.in_flight} updates a step; "
        f"nearest: {' or '.join(map(str, nearest))}"
    )


def noise_refusal(run_file: RunFile) -> str | None:
    """One sentence if the gradient noise scale cannot be measured under this layout.

    It compares the gradient of a part of the batch, before any sum, with that of the whole batch.
    """
    if not run_file.observe.noise_every_steps:
        if run_file.observe.noise_by_layer:
            return "observe.noise_by_layer = true and observe.noise_every_steps = 0: say how often, such as 10"
        return None
    split = _split_gradient(run_file)
    if split is not None:
        return (
            f"observe.noise_every_steps with {split}: there a rank's gradient is no gradient of samples of its own "
            "before it is summed; measure the noise under replicate, shard, tensor or an untied pipeline"
        )
    return _no_parts(run_file)


def layer_norms_refusal(run_file: RunFile) -> str | None:
    """One sentence if there is no gradient of a step whose layers could be measured."""
    every = run_file.observe.layer_norms_every_steps
    if not every or not (run_file.layout.pipeline > 1 and run_file.pipeline.asynchronous):
        return None
    return (
        f"observe.layer_norms_every_steps = {every} with pipeline.schedule = {run_file.pipeline.schedule!r}: every "
        "microbatch is an update of its own there, and a step has no gradient; leave the key out"
    )


def _split_gradient(run_file: RunFile) -> str | None:
    """The choice by which ranks of one replica add parts of one sample's gradient, or others' samples."""
    layout = run_file.layout
    if layout.pipeline > 1 and run_file.pipeline.asynchronous:
        return f"pipeline.schedule = {run_file.pipeline.schedule!r}"
    if layout.context > 1:
        return f"layout.context = {layout.context}"
    if layout.expert > 1:
        return f"layout.expert = {layout.expert}"
    if layout.sequence_parallel and layout.tensor > 1:
        return "layout.sequence_parallel = true"
    if layout.pipeline > 1 and getattr(run_file.model, "tied", False):
        return f"layout.pipeline = {layout.pipeline} and model.tied = true"
    return None


def _no_parts(run_file: RunFile) -> str | None:
    """One share of the samples in one microbatch is the whole batch, first of the smallest steps. Unknown before the
    number of processes is.
    """
    layout, batch = run_file.layout, run_file.batch
    processes = run_file.run.processes or layout.default_processes
    if processes is None or processes > layout.pipeline * layout.context * layout.tensor:
        return None
    least = min((batch.global_samples, *batch.smaller_sizes))
    if layout.pipeline == 1 and batch.micro_samples is not None and batch.micro_samples < least:
        return None
    where = f"a step of {least} samples has" if batch.smaller_sizes else "here is"
    repair = "use two shares (layout.replicate or layout.shard)"
    if layout.pipeline == 1:
        repair = f"set batch.micro_samples to {least // 2} or less" if least > 1 else "give every step two samples"
    return f"observe.noise_every_steps compares a part of the batch with all of it, and {where} one part: {repair}"


def gradients_refusal(run_file: RunFile) -> str | None:
    """One sentence if `[gradients]` asks for what this run cannot do.

    With `schedule = "priority"` parameters are updated one after the other while other gradients are on the wire, so
    whatever needs the whole gradient before any update is refused, and whatever has more than one group of ranks.
    """
    if run_file.gradients.bucket == "auto" and (found := next(_against_search(run_file), None)):
        return f'gradients.bucket = "auto" with {found[0]}: {found[1]}; leave gradients.bucket out'
    if run_file.gradients.schedule == "priority" and (found := next(_against_priority(run_file), None)):
        return f'gradients.schedule = "priority" with {found[0]}: {found[1]}'
    return None


def _against_search(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not)"""
    if run_file.layout.shard > 1:
        yield f"layout.shard = {run_file.layout.shard}", "there optimizer state lies as its buckets do, and stays"
    if run_file.layout.pipeline > 1 and run_file.pipeline.asynchronous:
        yield f"pipeline.schedule = {run_file.pipeline.schedule!r}", "its stages have no step in common to be timed"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "it has partitions (gradients.partition_bytes) and no buckets"


def _against_priority(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout, clip_norm = run_file.layout, run_file.optimizer.clip_norm
    for axis in ("pipeline", "shard", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "it is for replicas of one rank; use layout.replicate"
    if clip_norm is not None and math.isfinite(clip_norm):
        why = "the norm of the whole gradient is known only when updates are made; set optimizer.clip_norm = inf"
        yield f"optimizer.clip_norm = {clip_norm:g}", why
    if run_file.optimizer.works_on == "matrices":
        why = 'it updates whole matrices in buckets, and here parameters come one by one; use "order"'
        yield f'optimizer.kind = "{run_file.optimizer.variant}"', why
    if run_file.optimizer.average is not None or run_file.optimizer.lookahead is not None:
        yield "optimizer.average or optimizer.lookahead", "they follow whole updates; leave them out"
    if isinstance(run_file.precision, Float16):
        yield 'precision.kind = "float16"', "an overflow shows only when updates are made; use bfloat16"
    if run_file.observe.noise_every_steps:
        yield (
            f"observe.noise_every_steps = {run_file.observe.noise_every_steps}",
            ("the noise needs the norm of the step that it was measured in; measure it under the schedule by order"),
        )
    if run_file.wire.check_collectives:
        why = "it looks at one wait of a rank at a time, and here a second thread waits; leave it out"
        yield "wire.check_collectives = true", why
    if run_file.run.compile:
        yield run_file.run.compile_said, "a compiled model does not say which module it comes to; leave run.compile out"
    if run_file.run.device == "cuda":
        yield 'run.device = "cuda"', "a credit of bytes on the wire is kept between processors only so far"


def wire_refusal(run_file: RunFile) -> str | None:
    """One sentence if the algorithm cannot run on the transport, or ranks of one GPU cannot talk over it."""
    algorithm, transport, layout = run_file.wire.algorithm, run_file.wire.transport, run_file.layout
    if run_file.run.share_gpus and transport != "gloo":
        return (
            f'run.share_gpus = true with wire.transport = "{transport}": NCCL refuses two ranks on one GPU; set '
            'wire.transport = "gloo"'
        )
    if run_file.run.share_gpus and layout.pipeline * layout.context > 1:
        key = "pipeline" if layout.pipeline > 1 else "context"
        return (
            f"run.share_gpus = true with layout.{key} = {getattr(layout, key)}: its ranks send tensors to each other, "
            "and Gloo sends those of the CPU alone; set it to 1, or give each rank a GPU"
        )
    if algorithm != "backend" and transport not in ("auto", "gloo"):
        return (
            f'wire.algorithm = "{algorithm}" with wire.transport = "{transport}": algorithms are for groups over Gloo; '
            'set wire.transport = "gloo", or leave one of them out'
        )
    return None
