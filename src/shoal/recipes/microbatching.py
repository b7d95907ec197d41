"""How a rank's samples of a step become microbatches.

Replicas of one rank take their samples as they come: uneven shares are legal, because the loss is a sum. Ranks that
share a replica exchange tensors inside of every microbatch, so all must have as many, of one size.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.engine.uniform import Uniform
from shoal.recipes.run_file import RunFile, statistics_group
from shoal.topology.layout import Layout


@dataclass(frozen=True)
class Microbatching:
    """Samples of one microbatch (None: all of a rank's at once), and how they are made alike where they must be.

    `in_flight` is the number of microbatches that go through a pipeline together; 1 without one.
    """

    samples: int | None
    uniform: Uniform | None
    in_flight: int


def microbatching(run_file: RunFile, layout: Layout) -> Microbatching:
    """What the run file and the layout make of it."""
    micro, group = run_file.batch.micro_samples, statistics_group(run_file)
    if layout.replica_size == 1:
        return Microbatching(micro, None, 1)
    in_flight = (run_file.pipeline.microbatches or 2 * layout.pipeline) if layout.pipeline > 1 else 1
    shares = layout.replicate * layout.shard
    most = group * -(-(run_file.batch.global_samples // group) // shares)
    samples = micro or group * -(-most // (group * in_flight))
    rounds = -(-most // (samples * in_flight))
    return Microbatching(samples, Uniform(rounds * in_flight, samples), in_flight)
