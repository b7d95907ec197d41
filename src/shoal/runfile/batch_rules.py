"""The rules between `[batch]`, `[data]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.data.config import DataConfig, Mixture, StdlibText, TextFiles
from shoal.data.record_config import Records, Stream
from shoal.models.config import GPTConfig
from shoal.models.huggingface.config import TransformersConfig, vocabulary_of
from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Rule, against, in_order, only
from shoal.runfile.run_file import RunFile, statistics_group, synchronises_norms


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


def _no_epoch(run_file: RunFile) -> str | None:
    if run_file.batch.epoch_end == "straddle" or not isinstance(run_file.data, Mixture | Stream):
        return None
    return f'batch.epoch_end = "{run_file.batch.epoch_end}": a mixture or a stream has no epoch; leave it out'


def _same_microbatches(run_file: RunFile) -> bool:
    return run_file.pipeline.asynchronous or run_file.sync.in_canonical_order


_SHORT_STEPS = against(
    facts.equal("batch.epoch_end", "short"),
    Rule(
        Fact('pipeline.schedule = "PipeDream" or sync.order = "canonical"', _same_microbatches),
        "every step has the same microbatches there",
        'set it to "drop" or "straddle"',
    ),
)


def _sizes(run_file: RunFile) -> str | None:
    if not run_file.batch.smaller_sizes:
        return None
    return "batch.schedule" if run_file.batch.adaptive is None else "batch.adaptive"


def _phases_rule(run_file: RunFile) -> str | None:
    """Every rank has samples in every phase, and where replicas are split, as many as the others."""
    batch, layout, group = run_file.batch, run_file.layout, statistics_group(run_file.model)
    key, shares = _sizes(run_file), run_file.batch_shares
    if key is None:
        return None
    split = layout.pipeline * layout.context * layout.tensor * layout.shard > 1 or synchronises_norms(run_file.model)
    for samples in batch.smaller_sizes:
        if samples < shares * group or samples % group:
            return (
                f"{key} has a phase of {samples} samples for {shares} shares of groups of {group}: each "
                f"needs a whole group; use a multiple of {group} from {shares * group} on"
            )
    sizes = [batch.global_samples, *batch.smaller_sizes]
    odd = next((size for size in sizes if split and size % (shares * group)), None)
    if odd is None:
        return None
    return (
        f"{key} with steps of {odd} samples over {shares} shares of a split model: ranks must have as "
        f"many as one another; use multiples of {shares * group} for global_samples and every phase"
    )


def _of_clients(run_file: RunFile) -> bool:
    return run_file.federated is not None or run_file.privacy is not None


_ONE_OF_TWO = "leave one of the two out"

_SCHEDULES = against(
    Fact("batch.schedule or batch.adaptive", _sizes),
    Rule(facts.NOT_LOCKSTEP, "replicas count steps by themselves", 'set it to "allreduce"'),
    Rule(facts.CANONICAL, "every step has the same logical shards", _ONE_OF_TWO),
    Rule(facts.PIPEDREAM, "every step has the same microbatches", "use 1F1B"),
    Rule(facts.ELASTIC, "replicas are compared by steps of one size", _ONE_OF_TWO),
    Rule(facts.BY_SPEED, "speeds are measured on steps of one size", _ONE_OF_TWO),
    *only(
        Fact("batch.adaptive", lambda run_file: run_file.batch.adaptive is not None),
        Rule(facts.equal("observe.noise_every_steps", 0), "the noise decides", "set it to 5, say"),
        Rule(facts.kinds("data", "stream"), "a feed of several sizes is opened again", "use batch.schedule"),
    ),
    Rule(Fact("[federated] or [privacy]", _of_clients), "clients and accountants count steps of one size", _ONE_OF_TWO),
)


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


def _tables_of_data(data: DataConfig) -> Iterator[tuple[str, DataConfig]]:
    """`[data]` and, of a mixture, the tables of its sources, each with its key."""
    yield "data", data
    if isinstance(data, Mixture):
        yield from ((f"data.sources.{name}", source) for name, source in data.sources.items())


def _packed(run_file: RunFile) -> str | None:
    packed = (key for key, data in _tables_of_data(run_file.data) if getattr(data, "packing", None) == "documents")
    return next((f'{key}.packing = "documents"' for key in packed), None)


def _weighted(run_file: RunFile) -> str | None:
    tables = _tables_of_data(run_file.data)
    weighted = (key for key, data in tables if getattr(data, "loss_weights", None) is not None)
    return next((f"{key}.loss_weights" for key in weighted), None)


def _limited(run_file: RunFile) -> bool:
    return getattr(run_file.model, "capacity_factor", None) is not None


batch_refusal = in_order(
    _shares_rule,
    _groups_rule,
    _no_epoch,
    _SHORT_STEPS,
    _phases_rule,
    _SCHEDULES,
    _vocabulary_rule,
    against(
        Fact('data.packing = "documents"', _packed),
        Rule(
            Fact("model.capacity_factor", _limited),
            "an expert takes the first tokens of a sequence, and positions that restart do not say which are first",
            "leave capacity_factor out, or pack otherwise",
        ),
    ),
    against(
        Fact("data.loss_weights", _weighted),
        Rule(facts.equal("batch.denominator", "samples", "tokens"), ", which passes weights over", _ONE_OF_TWO),
    ),
)
