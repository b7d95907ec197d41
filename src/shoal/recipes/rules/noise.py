"""What measuring the gradient noise scale asks of a layout: whole gradients of a part of the batch, before any sum.

Imports no torch: such a run is refused before any process starts.
"""

from __future__ import annotations

from shoal.recipes.run_file import RunFile


def noise_refusal(run_file: RunFile) -> str | None:
    """One sentence where `observe.noise_every_steps` asks for what cannot be measured."""
    if not run_file.observe.noise_every_steps:
        return None
    split = _split_gradient(run_file)
    if split is not None:
        return (
            f"observe.noise_every_steps with {split}: there a rank's gradient is no gradient of samples of its own "
            "before it is summed; measure the noise under replicate, shard, tensor or an untied pipeline"
        )
    return _no_parts(run_file)


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
    """One share of the samples in one microbatch is the whole batch. Unknown before the number of processes is."""
    layout, batch = run_file.layout, run_file.batch
    processes = run_file.run.processes or layout.default_processes
    if processes is None or processes > layout.pipeline * layout.context * layout.tensor:
        return None
    if layout.pipeline == 1 and batch.micro_samples is not None and batch.micro_samples < batch.global_samples:
        return None
    repair = (
        "use two shares (layout.replicate or layout.shard)"
        if layout.pipeline > 1
        else f"set batch.micro_samples to {max(1, batch.global_samples // 2)} or less"
    )
    return f"observe.noise_every_steps compares a part of the batch with all of it, and here is one part: {repair}"
