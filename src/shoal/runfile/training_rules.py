"""Rules between tables that say how a model is trained: masters, optimizer, norms, float8, loss. Imports no torch."""

from __future__ import annotations

from shoal.memory.config import OffloadConfig
from shoal.optim.config import groups_refusal, kinds_whose
from shoal.optim.kinds import Searching
from shoal.optim.matrix_kinds import KFAC
from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Against, Rule, against, axes, in_order, only
from shoal.runfile.run_file import RunFile

_ONE_OF_TWO = "leave one of the two out"
_AUTOCAST = 'set precision.kind = "bfloat16"'
_WRITES = "it writes to weights, and knows of no masters"
_SEARCHING = facts.kind("optimizer", lambda optimizer: isinstance(optimizer, Searching), "of a line search")
_CURVED = facts.kind("optimizer", lambda optimizer: isinstance(optimizer, KFAC | Searching), "that measures curvature")
_NOT_ALLREDUCE = facts.kind_other_than("sync", "allreduce")


def _two_wires(run_file: RunFile) -> str | None:
    if getattr(run_file.precision, "reduce_dtype", "float32") == "float32" or run_file.codec.variant == "none":
        return None
    return f'precision.reduce_dtype = "bfloat16" and codec.kind = "{run_file.codec.variant}"'


# Weights in bfloat16 with float32 masters, and what writes to weights, or reads them, as if there were one of each.
masters_refusal = against(
    facts.kinds("precision", "bfloat16_params"),
    Rule(_CURVED, "it measures curvature by differences that bfloat16 rounds away", 'set precision.kind = "float32"'),
    Rule(facts.PRIORITY, "it updates the parameters that a forward is about to use"),
    Rule(facts.PIPEDREAM, "its stages keep older weights, without masters"),
    Rule(facts.NOT_LOCKSTEP, "replicas agree on the weights that they compute with"),
    Rule(facts.ELASTIC, "replicas give each other the weights that they compute with"),
    Rule(facts.given("sparsity"), _WRITES),
    Rule(facts.given("quantisation"), _WRITES),
    Rule(
        Fact(
            "freeze.later or freeze.progress",
            lambda run_file: run_file.freeze is not None and bool(run_file.freeze.changes),
        ),
        "it freezes weights that have masters",
    ),
    Rule(
        Fact("precision.reduce_dtype and a codec", _two_wires),
        "both say what gradients become on the wire",
        _ONE_OF_TWO,
    ),
    repair=_AUTOCAST,
)

# The rules between `[optimizer]` and the other tables.


def _transforms(run_file: RunFile) -> str | None:
    names = ", ".join(transform.variant for transform in run_file.optimizer.transforms)
    return f"optimizer.transforms ({names})" if names else None


_TRANSFORMS = against(
    Fact("optimizer.transforms", _transforms),
    Rule(facts.SENDS_MOMENTUM, "its ranks sum momenta, not gradients"),
    Rule(facts.PRIORITY, "parameters are updated before the whole gradient is there"),
    Rule(facts.PIPEDREAM, "stages are never at the same gradient"),
    Rule(facts.WORKERS, "its workers have a gradient of their own each, and no agreed one"),
    repair=_ONE_OF_TWO,
)

_AVERAGING = facts.kind("optimizer", lambda optimizer: optimizer.keeps_average, "that keeps an average")


def _of_the_model(run_file: RunFile) -> str | None:
    optimizer = run_file.optimizer
    if optimizer.keeps_average or optimizer.average is not None:
        return "an average of weights (optimizer)"
    return None if optimizer.lookahead is None else "optimizer.lookahead"


# The average is in the place of a decay; and it is that of the model, which replicas or servers may not have.
_AVERAGES = in_order(
    against(
        _AVERAGING,
        Rule(
            facts.other_than("schedule.kind", "constant"),
            "it averages in the place of a decay of the rate",
            'set schedule.kind = "constant" (with schedule.warmup_steps)',
        ),
    ),
    against(
        facts.named("optimizer.average"),
        Rule(_AVERAGING, ", which keeps an average of its own", "leave optimizer.average out"),
    ),
    against(
        Fact("optimizer.average or optimizer.lookahead", _of_the_model),
        Rule(
            facts.NOT_LOCKSTEP,
            "what its replicas have between two agreements is not the model's",
            'leave it out, or set sync.kind = "allreduce"',
        ),
    ),
)

_SPLIT_BACKWARDS = facts.key(
    "pipeline.schedule",
    lambda name: name not in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"),
    "with backwards in two parts",
).where(lambda run_file: run_file.layout.pipeline > 1)
_ONE_BY_ONE = Rule(facts.PRIORITY, "parameters are updated one after the other", 'use "order"')

_DRAWN_TARGETS = against(
    Fact(
        'optimizer.fisher = "sampled"',
        lambda run_file: isinstance(run_file.optimizer, KFAC) and run_file.optimizer.fisher == "sampled",
    ),
    *axes("pipeline context", "no rank has all outputs", 'split the model by shard, or set it to "empirical"'),
    Rule(
        Fact("memory.zero = 3", lambda run_file: run_file.layout.shard > 1 and run_file.memory.zero in (None, 3)),
        "weights come for one backward",
        'use 1 or 2, or set it to "empirical"',
    ),
    Rule(facts.RECOMPUTED, "a block is computed again for one backward"),
    Rule(facts.CHUNKED, "outputs are never there at once"),
    Rule(
        Fact("memory.offload", lambda run_file: run_file.memory.offload != OffloadConfig()),
        "what blocks save comes back for one backward",
    ),
    repair='leave it out, or set it to "empirical"',
    found_first=True,
)
"""Where a forward has no second backward, or not all of its outputs."""


def _layers(subject: Fact, *, reduces: bool) -> Against:
    """What an optimizer that measures layers does not go with: it has to see whole ones, in one backward, on all ranks.

    `reduces`: it takes all positions of a sample together.
    """
    no_positions = "no rank has all positions of a sample"
    return against(
        subject,
        *axes("tensor expert", "it measures whole layers", "split the model by shard"),
        *(axes("context", no_positions, 'set optimizer.weight_sharing = "expand"') if reduces else ()),
        Rule(_SPLIT_BACKWARDS, "its backwards come in two parts, or are stale", "use 1F1B"),
        _ONE_BY_ONE,
        Rule(_NOT_ALLREDUCE, "ranks sum what they measure in every step", 'use "allreduce"'),
        Rule(facts.ELASTIC, "what ranks measure is not carried over a loss", _ONE_OF_TWO),
        Rule(facts.COMPILED, "compiled layers cannot be seen", "leave run.compile out"),
        found_first=True,
    )


def _kfac(sharing: str) -> Fact:
    return facts.kind(
        "optimizer",
        lambda optimizer: isinstance(optimizer, KFAC) and optimizer.weight_sharing == sharing,
        f'= "kfac" (weight_sharing = "{sharing}")',
    )


_LAYERS = in_order(_layers(_kfac("reduce"), reduces=True), _layers(_kfac("expand"), reduces=False))


def layers_refusal(run_file: RunFile, optimizer: str, *, reduces: bool) -> str | None:
    """One sentence if `optimizer`, which measures layers, does not see whole ones, in one backward, on all ranks.

    `reduces`: it takes all positions of a sample together.
    """
    return _layers(Fact(optimizer, lambda _: True), reduces=reduces)(run_file)


_DIFFERENCES = 'set optimizer.hessian = "differences"'
_EXACT = Fact('optimizer.hessian = "exact"', lambda run_file: getattr(run_file.optimizer, "hessian", "") == "exact")

# A line search sees one loss and its exact gradient, the same on all ranks.
_LINE_SEARCH = against(
    _SEARCHING,
    Rule(
        facts.other_than("schedule.kind", "constant"),
        "its line search finds how far to go",
        'set schedule.kind = "constant"',
    ),
    Rule(_NOT_ALLREDUCE, "all ranks search along one line", 'use "allreduce"'),
    Rule(facts.ELASTIC, "a rank lost in a search leaves the others on their way", _ONE_OF_TWO),
    Rule(facts.CODEC, "its gradient is not that of the loss", "leave [codec] out"),
    Rule(facts.PIPEDREAM, "stages are never at the same weights", "use 1F1B"),
    _ONE_BY_ONE,
    Rule(facts.FLOAT16, "the loss is scaled", 'use "bfloat16" or "float32"'),
    Rule(facts.NOISE, "a search has several gradients", _ONE_OF_TWO),
    *only(
        _EXACT,
        *axes("tensor context pipeline expert", "its exchanges have no second derivative", _DIFFERENCES),
        Rule(facts.ZERO_3, "its weights are gathered for one backward", "set memory.zero = 2"),
        Rule(facts.RECOMPUTED, "it computes one backward", _DIFFERENCES),
        Rule(facts.CHUNKED, "its gradient is there before the backward", _DIFFERENCES),
        Rule(facts.COMPILED, "compiled code has no second derivative", "leave run.compile out"),
    ),
    Rule(facts.given("sparsity"), "a search moves every weight", _ONE_OF_TWO),
    Rule(facts.given("freeze"), "a search moves every weight", _ONE_OF_TWO),
    found_first=True,
)


def width_key(run_file: RunFile) -> str | None:
    """The key of `[model]` by which rates follow the width; None: they do not."""
    if getattr(run_file.model, "scaling", "standard") != "standard":
        return 'scaling = "mup"'
    return "base" if getattr(run_file.model, "base", {}) else None


def _follows_width(run_file: RunFile) -> str | None:
    return f"model.{name}" if (name := width_key(run_file)) is not None else None


# muP needs an optimizer of which it is known how its rates follow the width.
_WIDTHS = against(
    Fact('model.scaling = "mup" or model.base', _follows_width),
    Rule(
        facts.kind("optimizer", lambda optimizer: optimizer.width_rule is None, "without a rule for widths"),
        "its rates at other widths are not known",
        f"use {kinds_whose(lambda table: table.width_rule is not None)}, or leave it out",
    ),
)

optimizer_refusal = in_order(
    lambda run_file: groups_refusal(run_file.optimizer),
    _TRANSFORMS,
    _AVERAGES,
    _DRAWN_TARGETS,
    _LAYERS,
    _LINE_SEARCH,
    _WIDTHS,
)

# Ranks take statistics together in every forward.
norm_refusal = against(
    facts.SYNCHRONISED,
    *axes(
        "pipeline context tensor expert",
        "its ranks have to hold whole samples and all layers",
        "use layout.replicate and layout.shard",
    ),
    Rule(facts.NOT_LOCKSTEP, "replicas at different steps have no microbatch in common", 'set it to "allreduce"'),
    Rule(
        facts.CANONICAL, "the samples of a microbatch follow the number of replicas", 'set model.batch_norm = "grouped"'
    ),
    Rule(facts.BY_SPEED, "all ranks need as many microbatches", _ONE_OF_TWO),
    Rule(
        facts.ELASTIC, "the statistics follow the number of replicas, which changes", 'set model.batch_norm = "grouped"'
    ),
    Rule(facts.COMPILED, "a compiled forward holds no exchange between ranks", "leave it out"),
)

float8_refusal = against(
    facts.FLOAT8,
    Rule(
        facts.axis("tensor"),
        "layers that ranks split have no float8 products",
        'set layout.tensor = 1, or precision.kind = "bfloat16"',
    ),
)

loss_chunks_refusal = against(
    facts.CHUNKED,
    Rule(
        facts.kind_other_than("loss", "cross_entropy"),
        "only the cross-entropy of each token is known to need no other token",
        "leave memory.loss_chunks out",
    ),
    Rule(
        facts.COMPILED_WHOLE, "a compiled forward ends with its logits", f'{_ONE_OF_TWO}, or set run.compile = "blocks"'
    ),
)
