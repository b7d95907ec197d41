"""The rules between `[federated]` and the other tables. Imports no torch."""

from __future__ import annotations

from msgspec.structs import replace as replace_table

from shoal.data.config import Mixture
from shoal.data.record_config import Stream
from shoal.errors import ConfigError, UsageError
from shoal.federated.config import DeviceConfig, FederatedClient, Iid
from shoal.memory.config import OffloadConfig
from shoal.models.config import GPTConfig
from shoal.models.huggingface.config import TransformersConfig
from shoal.optim.config import SGD
from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Rule, against, in_order
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


_LOCAL_STEPS = "they take each local step as one process does"

# The ranks of a client train as one process does.
_REPLICAS = against(
    Fact("a federated client of several ranks", lambda _: True),
    Rule(facts.kind_other_than("sync", "allreduce"), _LOCAL_STEPS),
    Rule(facts.ELASTIC, _LOCAL_STEPS),
    Rule(facts.PIPEDREAM, _LOCAL_STEPS),
    Rule(facts.PRIORITY, _LOCAL_STEPS),
    Rule(Fact("[memory.offload]", lambda run_file: run_file.memory.offload != OffloadConfig()), _LOCAL_STEPS),
    Rule(
        facts.equal("privacy.unit", "sample"),
        "gradients of single samples are taken in one process",
        'set run.processes = 1, or privacy.unit = "client"',
    ),
    repair="leave it out",
    found_first=True,
)


def _replica_refusal(run_file: RunFile, started: int) -> str | None:
    """One sentence if the ranks of a client cannot train this run as one process does; None where they can."""
    if is_replica(run_file, started):
        return _REPLICAS(run_file)
    what = "layout.auto = true with a federated client of one process: there is nothing to split"
    return f"{what}; set run.processes, or leave it out" if run_file.layout.auto else None


def _without_it(run_file: RunFile) -> str | None:
    tables = {
        "partition": run_file.partition != Iid(),
        "devices": run_file.devices != DeviceConfig(),
        "secure_aggregation": run_file.secure_aggregation is not None,
        "privacy": run_file.privacy is not None,
    }
    found = next((name for name, given in tables.items() if given), None)
    if found is None or run_file.federated is not None:
        return None
    return f"[{found}] without [federated]: only clients have use for it; add that, or leave it out"


def _of_steps(run_file: RunFile) -> str | None:
    usual = OF_STEPS.items() if isinstance(run_file.optimizer, SGD) else ()
    return next((f"optimizer.{key}" for key, value in usual if getattr(run_file.optimizer, key) != value), None)


def _ordered(run_file: RunFile) -> str | None:
    name = next((key for key in ORDERING if getattr(run_file.data, key, None)), None)
    return None if name is None or isinstance(run_file.data, Mixture | Stream) else f"data.{name}"


def _scaled(run_file: RunFile) -> str | None:
    scaling = getattr(run_file.model, "scaling", "standard")
    return None if scaling == "standard" else f'model.scaling = "{scaling}"'


_FEDERATED, _SECURE, _PRIVATE = (facts.given(name) for name in ("federated", "secure_aggregation", "privacy"))
_OF_A_CLIENT, _OF_A_SAMPLE = (facts.equal("privacy.unit", unit) for unit in ("client", "sample"))
_ASYNCHRONOUS = facts.kind("federated", lambda federated: federated.asynchronous, "without rounds")
_SUMS_NOTHING = facts.kind("federated", lambda federated: not federated.sums, "that takes no sum")
_WIDTHS = facts.kind("federated", lambda federated: len(federated.all_widths) > 1, "of several widths")
_SEVERAL_MODELS = facts.kind("federated", lambda federated: federated.models > 1, "of several models")
_CONTROL = facts.kind("federated", lambda federated: federated.sends_control, "that sends a control")

_OF_ALL_WEIGHTS = "clients train all weights, on their targets"
_OWN_ORDER = "clients take their samples in their own order"
_AS_THEY_ARE = "clients read their samples as they are, in their own order"
_IN_ROUNDS = "it needs rounds, in which a known cohort sends"


def _noise_alone(run_file: RunFile) -> str | None:
    privacy = run_file.privacy
    if privacy is None or privacy.noise_by != "clients" or run_file.secure_aggregation is not None:
        return None
    return 'privacy.noise_by = "clients" without [secure_aggregation]: each update has too little noise; add it'


def _no_bound(run_file: RunFile) -> str | None:
    federated, said = run_file.federated, _OF_A_CLIENT(run_file)
    if said is None or federated is None or federated.weights == "equal":
        return None
    return f'{said}: a client that counts by its samples has no bound; set federated.weights = "equal"'


def _drawn_together(run_file: RunFile) -> str | None:
    federated, said = run_file.federated, _OF_A_CLIENT(run_file)
    if said is None or federated is None or (federated.sampling == "uniform" and not federated.over_selection):
        return None
    return f"{said}: each client is drawn by itself; leave out federated.sampling and federated.over_selection"


federated_refusal = in_order(
    _without_it,
    against(
        _FEDERATED,
        Rule(
            facts.NOT_SGD,
            "clients keep no moments between rounds",
            'use "sgd" for their steps, and federated.kind = "fedopt" for Adam at the server',
        ),
        Rule(Fact(f"optimizer.{', '.join(OF_STEPS)}", _of_steps), "clients take plain steps of SGD", "leave it out"),
        Rule(facts.named("run.warm_start_data"), _OWN_ORDER, "leave it out"),
        Rule(Fact('model.scaling = "mup"', _scaled), "clients step at one rate", "leave it out"),
        Rule(facts.kind_other_than("precision", "float32", "float64"), "updates are float32 or float64", "use one"),
        Rule(
            Fact("model.dropout", lambda run_file: bool(getattr(run_file.model, "dropout", 0.0))),
            "its masks belong to positions of one run",
            "set it to 0",
        ),
        Rule(facts.MOE, "its routers count the tokens of one run", 'use "gpt"'),
        *(
            Rule(facts.given(name), _OF_ALL_WEIGHTS, "leave one out")
            for name in ("sparsity", "freeze", "adapter", "distillation")
        ),
        found_first=True,
    ),
    against(
        _WIDTHS,
        Rule(
            facts.kind(
                "model", lambda model: isinstance(model, GPTConfig | TransformersConfig), '= "gpt" or "transformers"'
            ),
            OF_ONE_WIDTH,
        ),
    ),
    against(
        facts.other_than("federated.sampling", "uniform"), Rule(_ASYNCHRONOUS, "it draws no cohorts", "leave it out")
    ),
    against(
        _FEDERATED,
        Rule(facts.kinds("data", "mixture", "stream"), "clients divide the samples of one source", "name one"),
        Rule(Fact(f"data.{', '.join(ORDERING)}", _ordered), _AS_THEY_ARE, "leave it out"),
        found_first=True,
    ),
    against(_SECURE, Rule(_ASYNCHRONOUS, _IN_ROUNDS, 'use "fedavg"')),
    against(_PRIVATE, Rule(_ASYNCHRONOUS, _IN_ROUNDS, 'use "fedavg"')),
    against(
        facts.named("federated.ditto"), Rule(_OF_A_SAMPLE, "a model that never leaves needs no noise", "leave one out")
    ),
    against(
        _FEDERATED,
        Rule(
            facts.kind(
                "codec", lambda codec: codec.codes_matrices or codec.of_all_ranks, "of matrices or of all ranks"
            ),
            "a client sends alone",
            'use "blockwise" or "top_k"',
        ),
        found_first=True,
    ),
    against(facts.CODEC, Rule(_SECURE, "masks hide plain numbers alone", "leave it out")),
    against(
        _SECURE, Rule(_SUMS_NOTHING, "it needs each update, and the server would see their sum alone", 'use "fedavg"')
    ),
    against(
        _SECURE,
        Rule(facts.equal("federated.sampling", "importance"), "nobody sees norms", 'use "uniform"'),
        Rule(facts.named("federated.largest_norm"), "nobody sees the norm of an update", "leave it out"),
        found_first=True,
    ),
    against(_PRIVATE, Rule(_SEVERAL_MODELS, "which model a client chose tells of its samples", 'use "fedavg"')),
    _noise_alone,
    against(_OF_A_CLIENT, Rule(_SUMS_NOTHING, "noise belongs to a sum of clipped updates", 'use "fedavg"')),
    _no_bound,
    against(facts.named("privacy.adaptive"), Rule(_SECURE, "nobody sees how many updates were cut", "leave it out")),
    _drawn_together,
    against(_OF_A_SAMPLE, Rule(_CONTROL, "the control would tell gradients", 'use "fedavg"')),
    against(
        facts.named("optimizer.clip_norm"),
        Rule(_OF_A_SAMPLE, "privacy.clip bounds each sample's gradient", "leave it out"),
    ),
)
"""Whether clients can train this run."""
