"""What a run measures its replicas' speeds with, from its run file."""

from __future__ import annotations

from shoal.assembly.run import Run
from shoal.comm.board import Board
from shoal.data.feed import Feed
from shoal.engine.replica_speeds import ReplicaSpeeds
from shoal.observe.sink import Sinks
from shoal.resilience.stragglers import Stragglers


def replica_speeds(run: Run, feed: Feed, sinks: Sinks) -> ReplicaSpeeds | None:
    """What measures the replicas' speeds, and divides the work of `feed` by them where that is asked for."""
    mesh, first = run.mesh, run.mesh.rank == 0
    replica = mesh.layout.index("replicate", mesh.rank)
    replicas = mesh.layout.replicate - run.run_file.sync.serving_only
    if replicas == 1:
        return None
    run_file = run.run_file
    divides, observe = run_file.batch.division == "by_speed", run_file.observe
    board = None
    if run_file.sync.replicas_are != "lockstep":
        board = Board(run.process.store, timeout_s=run_file.wire.timeout_s).under(f"speeds/{mesh.generation}")
    return ReplicaSpeeds(
        mesh.world,
        replica if replica < replicas else None,
        replicas,
        mesh.device,
        warn=sinks.warn if first else _unsaid,
        note=sinks.note if first else _unsaid,
        divide=feed.divide if divides else None,
        stragglers=Stragglers(observe.straggler_factor, observe.straggler_steps),
        board=board,
    )


def _unsaid(sentence: str) -> None:
    """Rank 0 says it."""
