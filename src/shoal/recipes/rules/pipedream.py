"""What does not go together with updates after each microbatch (`pipeline.schedule = "PipeDream"`).

Refused is what needs one version of the weights, or a moment at which all stages have the gradient of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.engine.config import Float16
from shoal.models.config import MoEConfig
from shoal.recipes.microbatch_sizes import microbatch_sizes, most_samples
from shoal.recipes.run_file import RunFile, statistics_group


def pipedream_refusal(run_file: RunFile) -> str | None:
    """The first thing that cannot be, as a sentence; None where all can, and for other schedules."""
    if not run_file.pipeline.asynchronous:
        return None
    found = next(_refused(run_file), None)
    return None if found is None else f'pipeline.schedule = "PipeDream" with {found[0]}: {found[1]}'


def _refused(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """The key, and why it cannot be and what to do."""
    layout, model, optimizer = run_file.layout, run_file.model, run_file.optimizer
    if layout.pipeline == 1:
        yield "layout.pipeline = 1", "it is another computation than training without a pipeline; set it to 2 or more"
    if layout.shard > 1:
        yield f"layout.shard = {layout.shard}", "each stage keeps older weights, whole; use layout.replicate"
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
    smaller = sizes.samples - statistics_group(run_file)
    nearest = [sizes.in_flight] if smaller == 0 else [sizes.in_flight, -(-most // smaller)]
    return (
        f"{most} samples in microbatches of {sizes.samples} make {sizes.in_flight} updates a step; "
        f"nearest: {' or '.join(map(str, nearest))}"
    )
