"""What a run measures on request: the gradient by layers, the speed-up against one rank, its replicas' speeds."""

from __future__ import annotations

import tomllib
from pathlib import Path

from shoal.assembly.run import Run
from shoal.comm.board import Board
from shoal.config.load import dumps
from shoal.data.feed import Feed
from shoal.engine.growing_batch import GrowingFeed
from shoal.engine.measure import LayerNorms, ReplicaSpeeds
from shoal.observe.goodput import Scaling, one_rank_rate
from shoal.observe.sink import Sinks
from shoal.resilience.detection import Lasting, Stragglers


def feed_of(run: Run) -> Feed | GrowingFeed:
    """The feed that a run trains from: of steps that grow, under `batch.adaptive`. Close it."""
    growth = run.state.growth
    return run.feed() if growth is None else GrowingFeed(growth, lambda samples: run.feed(steps_of=samples))


def replica_speeds(run: Run, feed: Feed | GrowingFeed, sinks: Sinks) -> ReplicaSpeeds | None:
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
        divide=feed.divide if divides and isinstance(feed, Feed) else None,
        stragglers=Stragglers(observe.straggler_factor, observe.straggler_steps),
        lasting=Lasting(observe.straggler_s),
        board=board,
    )


def _unsaid(sentence: str) -> None:
    """Rank 0 says it."""


def layer_norms(run: Run) -> LayerNorms | None:
    """Of what the ranks in lock-step sum; None unless the run file asks for it."""
    every, sizes = run.run_file.observe.layer_norms_every_steps, run.generation.parts.split.trained_sizes
    if every == 0:
        return None
    return LayerNorms(run.generation.gradients, run.step.lockstep, sizes, every=every, device=run.device)


def scaling(run: Run) -> Scaling | None:
    """Rank 0's comparison with the run that `observe.one_rank` names. Raises `UsageError` where it cannot be made."""
    source = run.run_file.observe.one_rank
    if source is None or run.mesh.rank != 0:
        return None
    model = tomllib.loads(dumps(run.run_file))["model"]
    return Scaling(one_rank_rate(Path(source), model), run.mesh.layout.world_size)
