"""The rules between `[federated]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace as replace_table

from shoal.codec.config import NoCodec
from shoal.data.config import Mixture
from shoal.data.record_config import Stream
from shoal.engine.config import Float32, Float64
from shoal.errors import ConfigError, UsageError
from shoal.federated.config import DeviceConfig, FederatedClient, FederatedConfig, Iid
from shoal.memory.config import OffloadConfig
from shoal.models.config import GPTConfig, MoEConfig
from shoal.models.huggingface.config import TransformersConfig
from shoal.optim.config import SGD
from shoal.runfile.run_file import RunFile

ORDERING = ("augment", "stratify", "shuffle_window", "subset", "weights", "group_by_length")
"""Keys of `[data]` that change the samples of a run, or their order."""
OF_STEPS = {key: getattr(SGD(), key) for key in ("groups", "layer_decay", "transforms", "average", "lookahead")}
"""Keys of `[optimizer]` that change its steps, or what is kept beside them, as they are when they are left out."""
OF_ONE_WIDTH = (
    'it cannot be built at several widths; use model.kind "mlp" or "convnet", or a function of yours with an argument '
    "`width`, the part of the whole width"
)

NO_TABLE = 'the run file has no table [federated]: add it, with a strategy such as kind = "fedavg"'


def federated_refusal(run_file: RunFile) -> str | None:
    """One sentence if clients cannot train this run; None where they can, or without `[federated]`."""
    if run_file.federated is None:
        return _without_it(run_file)
    return next(_refusals(run_file, run_file.federated), None)


def without_clients(run_file: RunFile) -> RunFile:
    """The run as verbs other than `shoal federate` read it: nothing in it is of clients."""
    return replace_table(
        run_file, federated=None, partition=Iid(), devices=DeviceConfig(), secure_aggregation=None, privacy=None
    )


def ranks_of(run_file: RunFile, started: int = 1) -> int:
    """How many ranks a client of this run has; `started`: processes of a launcher such as torchrun."""
    return started if started > 1 else max(run_file.run.processes or 1, run_file.layout.default_processes or 1)


def is_replica(run_file: RunFile, started: int = 1) -> bool:
    """Whether a client of this run is a replica of several ranks, or on a GPU, and not one process on the CPU."""
    return ranks_of(run_file, started) > 1 or run_file.run.device == "cuda"


def require_client(run_file: RunFile, client: FederatedClient, started: int = 1) -> None:
    """Raises `UsageError` where the run has no such client, and `ConfigError` where its ranks cannot train this run as
    one process does. `started`: see `ranks_of`."""
    federated = run_file.federated
    if federated is None:
        raise ConfigError(NO_TABLE)
    if client.part is not None and not 0 <= client.part < federated.clients:
        raise UsageError(f"--part {client.part}: parts are 0 to federated.clients - 1 = {federated.clients - 1}")
    if client.width not in federated.all_widths:
        whole = f'federated.kind = "{federated.variant}" trains the whole model; leave it out, or use "heterofl"'
        there = f"models here have widths {', '.join(f'{width:g}' for width in federated.all_widths)}"
        raise UsageError(f"--width {client.width:g}: {there if len(federated.all_widths) > 1 else whole}")
    if (refused := _replica_refusal(run_file, started)) is not None:
        raise ConfigError(refused)


def _replica_refusal(run_file: RunFile, started: int) -> str | None:
    """One sentence if the ranks of a client cannot train this run as one process does; None where they can."""
    if not is_replica(run_file, started):
        what = "layout.auto = true with a federated client of one process: there is nothing to split"
        return f"{what}; set run.processes, or leave it out" if run_file.layout.auto else None
    unlike = {
        f'sync.kind = "{run_file.sync.variant}"': run_file.sync.variant != "allreduce",
        "[elastic]": run_file.elastic is not None,
        f'pipeline.schedule = "{run_file.pipeline.schedule}"': run_file.pipeline.asynchronous,
        'gradients.schedule = "priority"': run_file.gradients.schedule == "priority",
        "[memory.offload]": run_file.memory.offload != OffloadConfig(),
    }
    if (found := next((key for key, given in unlike.items() if given), None)) is not None:
        why = "they take each local step as one process does"
        return f"{found} with a federated client of several ranks: {why}; leave it out"
    if run_file.privacy is not None and run_file.privacy.unit == "sample":
        return (
            'privacy.unit = "sample" with a federated client of several ranks: gradients of single samples are taken '
            'in one process; set run.processes = 1, or privacy.unit = "client"'
        )
    return None


def _without_it(run_file: RunFile) -> str | None:
    tables = {
        "partition": run_file.partition != Iid(),
        "devices": run_file.devices != DeviceConfig(),
        "secure_aggregation": run_file.secure_aggregation is not None,
        "privacy": run_file.privacy is not None,
    }
    found = next((name for name, given in tables.items() if given), None)
    return (
        None
        if found is None
        else f"[{found}] without [federated]: only clients have use for it; add that, or leave it out"
    )


def _refusals(run_file: RunFile, federated: FederatedConfig) -> Iterator[str]:
    kind = federated.variant
    if not isinstance(run_file.optimizer, SGD):
        yield (
            f'optimizer.kind = "{run_file.optimizer.variant}" with [federated]: clients keep no moments between '
            'rounds; use "sgd" for their steps, and federated.kind = "fedopt" for Adam at the server'
        )
    elif changed := [key for key, usual in OF_STEPS.items() if getattr(run_file.optimizer, key) != usual]:
        yield f"optimizer.{changed[0]} with [federated]: clients take plain steps of SGD; leave it out"
    if run_file.run.warm_start_data:
        yield "run.warm_start_data with [federated]: clients take their samples in their own order; leave it out"
    if (scaling := getattr(run_file.model, "scaling", "standard")) != "standard":
        yield f'model.scaling = "{scaling}" with [federated]: clients step at one rate; leave it out'
    if not isinstance(run_file.precision, Float32 | Float64):
        precision = run_file.precision.variant
        yield f'precision.kind = "{precision}" with [federated]: updates are float32 or float64; use one'
    if getattr(run_file.model, "dropout", 0.0):
        yield "model.dropout with [federated]: its masks belong to positions of one run; set it to 0"
    if isinstance(run_file.model, MoEConfig):
        yield 'model.kind = "moe" with [federated]: its routers count the tokens of one run; use "gpt"'
    for name in ("sparsity", "freeze", "adapter", "distillation"):
        if getattr(run_file, name) is not None:
            yield f"[{name}] with [federated]: clients train all weights, on their targets; leave one out"
    if len(federated.all_widths) > 1 and isinstance(run_file.model, GPTConfig | MoEConfig | TransformersConfig):
        yield f'federated.kind = "{kind}" with model.kind = "{run_file.model.variant}": {OF_ONE_WIDTH}'
    if federated.asynchronous and federated.sampling != "uniform":
        yield f'federated.sampling = "{federated.sampling}" with kind = "{kind}": it draws no cohorts; leave it out'
    data = run_file.data
    if isinstance(data, Mixture | Stream):
        yield f'data.kind = "{data.variant}" with [federated]: clients divide the samples of one source; name one'
    elif (name := next((key for key in ORDERING if getattr(data, key)), None)) is not None:
        yield f"data.{name} with [federated]: clients read their samples as they are, in their own order; leave it out"
    if federated.asynchronous and (run_file.secure_aggregation is not None or run_file.privacy is not None):
        what = "secure_aggregation" if run_file.secure_aggregation is not None else "privacy"
        yield f'[{what}] with federated.kind = "{kind}": it needs rounds, in which a known cohort sends; use "fedavg"'
    if federated.ditto is not None and run_file.privacy is not None and run_file.privacy.unit == "sample":
        yield 'federated.ditto with privacy.unit = "sample": a model that never leaves needs no noise; leave one out'
    codec = run_file.codec
    if codec.codes_matrices or codec.of_all_ranks:
        yield f'codec.kind = "{codec.variant}" with [federated]: a client sends alone; use "blockwise" or "top_k"'
    if not isinstance(codec, NoCodec) and run_file.secure_aggregation is not None:
        yield f'codec.kind = "{codec.variant}" with [secure_aggregation]: masks hide plain numbers alone; leave it out'
    yield from _hidden(run_file, federated)


def _hidden(run_file: RunFile, federated: FederatedConfig) -> Iterator[str]:
    """Rules of secure aggregation and of privacy."""
    kind, secure, privacy = federated.variant, run_file.secure_aggregation, run_file.privacy
    if secure is not None:
        if not federated.sums:
            why = "it needs each update, and the server would see their sum alone"
            yield f'[secure_aggregation] with federated.kind = "{kind}": {why}; use "fedavg"'
        if federated.sampling == "importance":
            yield 'federated.sampling = "importance" with [secure_aggregation]: nobody sees norms; use "uniform"'
        if federated.largest_norm is not None:
            yield "federated.largest_norm with [secure_aggregation]: nobody sees the norm of an update; leave it out"
    if privacy is None:
        return
    if federated.models > 1:
        yield f'[privacy] with federated.kind = "{kind}": which model a client chose tells of its samples; use "fedavg"'
    if privacy.noise_by == "clients" and secure is None:
        yield 'privacy.noise_by = "clients" without [secure_aggregation]: each update has too little noise; add it'
    if privacy.unit == "client":
        if not federated.sums:
            why = "noise belongs to a sum of clipped updates"
            yield f'privacy.unit = "client" with federated.kind = "{kind}": {why}; use "fedavg"'
        if federated.weights != "equal":
            why = "a client that counts by its samples has no bound"
            yield f'privacy.unit = "client": {why}; set federated.weights = "equal"'
        if privacy.adaptive and secure is not None:
            yield "privacy.adaptive with [secure_aggregation]: nobody sees how many updates were cut; leave it out"
        if federated.sampling != "uniform" or federated.over_selection:
            why = "each client is drawn by itself"
            yield f'privacy.unit = "client": {why}; leave out federated.sampling and federated.over_selection'
    elif federated.sends_control:
        yield f'privacy.unit = "sample" with federated.kind = "{kind}": the control would tell gradients; use "fedavg"'
    elif run_file.optimizer.clip_norm is not None:
        yield "optimizer.clip_norm with privacy: privacy.clip bounds each sample's gradient; leave it out"
