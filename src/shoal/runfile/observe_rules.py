"""The rules between `[observe]`, evaluations that stop or keep a run, and the other tables. Imports no torch."""

from __future__ import annotations

from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Rule, against, axes, in_order
from shoal.runfile.run_file import RunFile


def _watching(run_file: RunFile) -> str | None:
    keys = {"run.stop_when": run_file.run.stop_when, "checkpoint.keep_best": run_file.checkpoint.keep_best}
    return next((key for key, table in keys.items() if table is not None), None)


def _one_evaluation(run_file: RunFile) -> str | None:
    if (key := _watching(run_file)) is None or run_file.observe.evaluate_every_steps:
        return None
    return f"{key} compares evaluations, and there is one at the end alone: set observe.evaluate_every_steps"


_TOGETHER = "it needs ranks that evaluate together from the first step on"

watch_refusal = in_order(
    _one_evaluation,
    against(
        Fact("run.stop_when or checkpoint.keep_best", _watching),
        Rule(facts.ELASTIC, _TOGETHER, "leave one out"),
        Rule(facts.given("federated"), _TOGETHER, "leave one out"),
    ),
    against(
        facts.named("run.stop_when"),
        Rule(
            facts.kind(
                "sync", lambda sync: sync.serving_only or sync.variant in ("server", "hogwild"), "of workers or servers"
            ),
            "its ranks count the steps to the last one by themselves",
            "leave it out",
        ),
    ),
)
"""Where evaluations cannot be compared, as `run.stop_when` and `checkpoint.keep_best` ask for."""


_NO_GRADIENT = "there a rank's gradient is no gradient of samples of its own before it is summed"


def _tied_ends(run_file: RunFile) -> str | None:
    pipeline = run_file.layout.pipeline
    tied = pipeline > 1 and getattr(run_file.model, "tied", False)
    return f"layout.pipeline = {pipeline} and model.tied = true" if tied else None


def _how_often(run_file: RunFile) -> str | None:
    if run_file.observe.noise_every_steps or not run_file.observe.noise_by_layer:
        return None
    return "observe.noise_by_layer = true and observe.noise_every_steps = 0: say how often, such as 10"


def _no_parts(run_file: RunFile) -> str | None:
    """One share of the samples in one microbatch is the whole batch, first of the smallest steps. Unknown before the
    number of processes is.
    """
    if not run_file.observe.noise_every_steps:
        return None
    layout, batch = run_file.layout, run_file.batch
    processes = run_file.stated_processes
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


# The noise scale compares the gradient of a part of the batch, before any sum, with that of the whole batch.
noise_refusal = in_order(
    _how_often,
    against(
        Fact("observe.noise_every_steps", lambda run_file: run_file.observe.noise_every_steps > 0),
        Rule(facts.PIPEDREAM, _NO_GRADIENT),
        *axes("context expert", _NO_GRADIENT),
        Rule(
            facts.equal("layout.sequence_parallel", True).where(lambda run_file: run_file.layout.tensor > 1),
            _NO_GRADIENT,
        ),
        Rule(Fact("layout.pipeline > 1 and model.tied = true", _tied_ends), _NO_GRADIENT),
        repair="measure the noise under replicate, shard, tensor or an untied pipeline",
    ),
    _no_parts,
)

layer_norms_refusal = against(
    facts.above("observe.layer_norms_every_steps"),
    Rule(
        facts.PIPEDREAM,
        "every microbatch is an update of its own there, and a step has no gradient",
        "leave the key out",
    ),
)
