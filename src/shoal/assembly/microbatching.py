"""How a rank's samples of a step become microbatches.

Replicas of one rank take their samples as they come: uneven shares are legal, because the loss is a sum. Ranks that
exchange tensors inside of every microbatch (those that share a replica, and all where batch norms are synchronised)
must have as many, of one size. A loss that couples samples sees those of all ranks where the global batch is one
microbatch of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.mesh import Mesh
from shoal.engine.global_batch import GlobalBatch
from shoal.engine.microbatches import Uniform
from shoal.runfile.microbatches import microbatch_sizes
from shoal.runfile.run_file import RunFile, default_micro_samples, synchronises_norms
from shoal.topology.layout import Layout


@dataclass(frozen=True)
class Microbatching:
    """Samples of one microbatch (None: all of a rank's at once), and how they are made alike where they must be.

    `in_flight` is the number of microbatches that go through a pipeline together; 1 without one. Asynchronous pipelines
    drain only between steps: there it is all of a step's.
    """

    samples: int | None
    uniform: Uniform | None
    in_flight: int


def microbatching(run_file: RunFile, layout: Layout) -> Microbatching:
    """What the run file and the layout make of it."""
    if layout.replica_size == 1 and not synchronises_norms(run_file.model):
        return Microbatching(default_micro_samples(run_file), None, 1)
    sizes = microbatch_sizes(run_file, shares=layout.replicate * layout.shard)
    counts = {sizes.rounds * sizes.in_flight}
    for phase in run_file.batch.schedule:
        rounds = -(-(phase.samples // (layout.replicate * layout.shard)) // (sizes.samples * sizes.in_flight))
        counts.add(rounds * sizes.in_flight)
    return Microbatching(sizes.samples, Uniform(sorted(counts), sizes.samples), sizes.in_flight)


def global_batch_of(run_file: RunFile, mesh: Mesh) -> GlobalBatch:
    """What a loss that couples samples sees of other ranks."""
    refusal = None
    if mesh.layout.context > 1:
        refusal = "under layout.context every rank has a part of each sample; set it to 1"
    elif mesh.layout.pipeline > 1:
        refusal = "a pipeline computes the global batch in microbatches, one after the other; set layout.pipeline to 1"
    elif run_file.sync.replicas_are != "lockstep":
        kind = run_file.sync.variant
        refusal = f'sync.kind = "{kind}" has replicas at different steps, without a common batch; set it to "allreduce"'
    samples = run_file.batch.global_samples
    return GlobalBatch(lambda: mesh.axis("replicate", "shard", lane="samples"), samples=samples, refusal=refusal)
