"""The rules between `[batch]`, `[data]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.data.config import DataConfig, Mixture, StdlibText, TextFiles
from shoal.data.record_config import Records, Stream
from shoal.models.config import GPTConfig, MoEConfig
from shoal.models.huggingface.config import TransformersConfig, vocabulary_of
from shoal.runfile.run_file import RunFile, statistics_group, synchronises_norms


def batch_refusal(run_file: RunFile) -> str | None:
    """One sentence if ranks cannot share out the samples of a step, or the data is not what the model reads."""
    rules = (
        _shares_rule,
        _groups_rule,
        _epoch_end_rule,
        _batch_schedule_rule,
        _vocabulary_rule,
        _packing_rule,
        _weights_rule,
    )
    return next((found for rule in rules if (found := rule(run_file)) is not None), None)


def _shares_rule(run_file: RunFile) -> str | None:
    layout, samples = run_file.layout, run_file.batch.global_samples
    shares = max(1, run_file.batch_shares - run_file.sync.serving_only)
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
    shares = run_file.batch_shares
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
