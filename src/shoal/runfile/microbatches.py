"""How many microbatches a rank of a split replica has in a step, and of how many samples: all ranks have as many.

Reads the run file alone, so that rules, schedules to be looked at and the run itself have one answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.runfile.run_file import RunFile, default_micro_samples, statistics_group


@dataclass(frozen=True)
class MicrobatchSizes:
    """`rounds` times a step, `in_flight` microbatches of `samples` samples go through a pipeline together."""

    samples: int
    in_flight: int
    rounds: int


def microbatch_sizes(run_file: RunFile, *, shares: int) -> MicrobatchSizes:
    """What the run file asks for where the samples of a step are split over `shares` (replicate x shard).

    Asynchronous pipelines drain only between steps, so that there is one round of all the microbatches that come out.
    """
    layout, pipeline, group = run_file.layout, run_file.pipeline, statistics_group(run_file.model)
    in_flight = (pipeline.microbatches or 2 * layout.pipeline) if layout.pipeline > 1 else 1
    most = most_samples(run_file, shares=shares)
    samples = default_micro_samples(run_file) or group * -(-most // (group * in_flight))
    if pipeline.asynchronous:
        return MicrobatchSizes(samples, in_flight=-(-most // samples), rounds=1)
    return MicrobatchSizes(samples, in_flight=in_flight, rounds=-(-most // (samples * in_flight)))


def most_samples(run_file: RunFile, *, shares: int) -> int:
    """Samples of a step in the largest share, in whole groups of statistics."""
    group = statistics_group(run_file.model)
    return group * -(-(run_file.batch.global_samples // group) // shares)
