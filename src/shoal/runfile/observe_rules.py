"""The rules between `[observe]`, evaluations that stop or keep a run, and the other tables. Imports no torch."""

from __future__ import annotations

from shoal.runfile.run_file import RunFile


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
