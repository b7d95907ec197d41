"""Rules between `[sparsity]`, `[freeze]`, `[adapter]`, `[quantisation]`, `[distillation]` and the other tables.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from shoal.models.config import PromptTuning
from shoal.models.huggingface.config import TransformersConfig
from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Rule, against, axes, in_order, only
from shoal.runfile.run_file import RunFile

_ONE_OF_TWO = "leave one of the two out"
_NOT_THERE = "the logits are not there to be compared with the teacher's"

# The teacher is whole on every rank, and sees whole samples there.
_DISTILLATION = against(
    facts.given("distillation"),
    *axes("pipeline context tensor", "no rank has whole logits beside its teacher's", "use layout.shard or replicate"),
    Rule(facts.kind_other_than("loss", "cross_entropy"), "a teacher gives classes", 'use "cross_entropy"'),
    Rule(Fact("memory.loss_chunks", lambda run_file: run_file.memory.loss_chunks > 1), _NOT_THERE, "leave it out"),
    Rule(
        Fact("run.compile", lambda run_file: run_file.run.compile not in (False, "blocks")), _NOT_THERE, "leave it out"
    ),
)


def _ends_dense(run_file: RunFile) -> str | None:
    config, steps = run_file.sparsity, run_file.run.steps
    if config is None or config.starts_sparse:
        return None
    for key, value in (("begin", config.schedule.begin), ("end", config.schedule.end or 0)):
        if value > steps:
            return (
                f"sparsity.schedule.{key} = {value} with run.steps = {steps}: the run would end before it has its "
                "density; lower it, or raise run.steps"
            )
    return None


_CHANGES = (
    Rule(facts.NOT_LOCKSTEP, "its replicas have no agreed gradient to leave a part out of"),
    Rule(facts.ELASTIC, "what is left out is not carried from one membership to the next"),
    Rule(facts.CODEC, "replicas send less of their gradients already"),
    Rule(facts.PRIORITY, "weights are updated before the whole gradient is there"),
    Rule(facts.PIPEDREAM, "stages are never at the same gradient"),
    Rule(facts.SENDS_MOMENTUM, "its ranks sum momenta of the whole model"),
)
"""Why what is trained cannot change in a run."""


def _averages_weights(run_file: RunFile) -> bool:
    return run_file.optimizer.average is not None or run_file.optimizer.keeps_average


def _packed_on_host(run_file: RunFile) -> bool:
    packed = run_file.sparsity is not None and run_file.sparsity.packed_state
    return packed and run_file.memory.offload.optimizer == "host"


_MASKS = against(
    Fact("[sparsity]", facts.kind("sparsity", bool, "")),
    *_CHANGES,
    *only(facts.kinds("sparsity", "grasp"), Rule(facts.NOISE, "it computes the gradient of a step three times")),
    Rule(facts.kinds("optimizer", "adamw_8bit"), "moments of masked weights share their scale with others"),
    *only(
        facts.kinds("sparsity", "top_kast"),
        Rule(
            Fact("an average of weights (optimizer)", _averages_weights),
            "it would be of weights that wait, too, and dense",
        ),
    ),
    Rule(facts.equal("memory.offload.optimizer", "disk"), "state on disk cannot be set to zero where masks change"),
    Rule(
        Fact('memory.offload.optimizer = "host" and packed_state', _packed_on_host),
        "state lies on the host, or is packed on the device",
    ),
    repair=_ONE_OF_TWO,
)


def _products(run_file: RunFile) -> str | None:
    products = "dense" if run_file.sparsity is None else run_file.sparsity.products
    return None if products == "dense" else f'sparsity.products = "{products}"'


# Layers compute with the kept half of their weights.
_PRODUCTS = against(
    Fact("sparsity.products", _products),
    Rule(facts.equal("run.device", "cpu"), "only GPUs from the A100 on have such products"),
    Rule(
        facts.kind_other_than("precision", "bfloat16", "float16", "bfloat16_params"),
        "they are of numbers of 16 bits, such as bfloat16",
    ),
    Rule(facts.axis("tensor"), "layers that ranks split compute by themselves"),
    Rule(facts.ZERO_3, "weights are gathered for one forward and let go"),
    Rule(facts.PARAMETERS_AWAY, "weights come for one forward and go"),
    Rule(facts.COMPILED, "a compiled program multiplies by itself"),
    Rule(facts.given("quantisation"), "a layer computes in one way"),
    repair='use "dense"',
)


def _cached(run_file: RunFile) -> bool:
    return run_file.freeze is not None and run_file.freeze.cache is not None


def _dropped(name: str) -> Fact:
    def found(run_file: RunFile) -> str | None:
        return f"model.{name} = {value}" if (value := getattr(run_file.model, name, 0.0)) else None

    return Fact(f"model.{name} > 0", found)


def _augmented(run_file: RunFile) -> str | None:
    augment = getattr(run_file.data, "augment", None)
    return f"data.augment = {json.dumps(augment)}" if augment else None


# Blocks have to give the same in each epoch, and may be left out.
_CACHE = against(
    Fact("freeze.cache", _cached),
    Rule(facts.MOE, "a router that is not computed adds nothing to the loss, and its bias stands still"),
    Rule(_dropped("dropout"), "blocks drop other features in every epoch"),
    Rule(_dropped("lora_dropout"), "blocks drop other features in every epoch"),
    Rule(Fact("data.augment", _augmented), "each epoch has other samples, so that none is found"),
    *axes("pipeline context tensor expert", "its ranks compute a block together"),
    Rule(facts.COMPILED, "a compiled program computes all blocks"),
    Rule(facts.ELASTIC, "a new membership builds its model anew"),
    Rule(facts.NOT_LOCKSTEP, "ranks ask each other for samples before every forward"),
    Rule(facts.BY_SPEED, "its ranks have other numbers of forwards"),
    repair=_ONE_OF_TWO,
)


def _freezes_later(run_file: RunFile) -> str | None:
    freeze = run_file.freeze
    if freeze is None or freeze.cache is not None or not freeze.changes:
        return None
    return "freeze.later" if freeze.later else "freeze.progress"


def _compares_outputs(run_file: RunFile) -> bool:
    progress = None if run_file.freeze is None else run_file.freeze.progress
    return _freezes_later(run_file) is not None and progress is not None and progress.criterion == "activations"


def _never_frozen(run_file: RunFile) -> str | None:
    progress = None if run_file.freeze is None or _cached(run_file) else run_file.freeze.progress
    steps = run_file.run.steps
    if progress is None or progress.first(steps) <= steps:
        return None
    return (
        f"[freeze.progress]: nothing can be frozen before step {progress.first(steps)}, and run.steps = {steps}: lower "
        "freeze.progress.every, patience or window"
    )


_WHOLE_MODEL = "no rank has the whole model"

_FREEZE = in_order(
    _CACHE,
    against(
        Fact("freeze.later or freeze.progress", _freezes_later),
        *_CHANGES,
        repair=f"use freeze.layers, or {_ONE_OF_TWO}",
    ),
    against(
        Fact('freeze.progress.criterion = "activations"', _compares_outputs),
        *axes("pipeline context tensor expert", _WHOLE_MODEL),
        Rule(facts.ZERO_3, _WHOLE_MODEL),
        Rule(facts.PARAMETERS_AWAY, _WHOLE_MODEL),
        Rule(facts.COMPILED, "a compiled program computes with its own weights"),
        Rule(facts.equal("batch.micro_samples", 1), "it compares samples with each other"),
        repair='use "movement"',
    ),
    _never_frozen,
)

# Adapters and rounding are in linear layers, which other tables replace by their own.


def _inside_layers(run_file: RunFile) -> str | None:
    return facts.given("adapter")(run_file) or facts.given("quantisation")(run_file)


def _prompted(run_file: RunFile) -> str | None:
    return 'adapter.kind = "prompt"' if isinstance(run_file.adapter, PromptTuning) else None


def _lora_of_its_own(run_file: RunFile) -> str | None:
    model = run_file.model
    if not isinstance(model, TransformersConfig) or model.lora_rank is None:
        return None
    return f"model.lora_rank = {model.lora_rank}"


def _prompts() -> Iterator[Rule]:
    for key in ("layout.pipeline", "layout.context", "memory.loss_chunks"):
        found = Fact(key, lambda run_file, large=facts.above(key, 1): large(run_file) is not None)
        yield Rule(found, "there, samples are as long as their targets", f"set {key} = 1")


_LAYERS = in_order(
    against(facts.given("adapter"), Rule(facts.given("quantisation"), "a layer has one of both", _ONE_OF_TWO)),
    against(
        Fact("[adapter] or [quantisation]", _inside_layers),
        Rule(facts.axis("tensor"), "layers that ranks split do not have it", "set layout.tensor = 1"),
    ),
    against(Fact('adapter.kind = "prompt"', _prompted), *_prompts()),
    against(
        Fact("[adapter] or [quantisation]", _inside_layers),
        Rule(facts.FLOAT8, ", whose layers do not have it", 'set it to "bfloat16"'),
        Rule(Fact("model.lora_rank", _lora_of_its_own), "", _ONE_OF_TWO),
    ),
)

partly_trained_refusal = in_order(_DISTILLATION, _ends_dense, _MASKS, _PRODUCTS, _FREEZE, _LAYERS)
