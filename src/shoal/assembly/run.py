"""`Run`: the running parts of one rank, assembled. Every verb, benchmark and test that trains stands on `open_run`.

Parts have three lifetimes. A change of membership makes a new `Generation`, and leaves the others:

    Process      device, store                                                   as long as the process
    Workload     model, data, loss                                               as long as the run
    Generation   mesh, this rank's part of the model, gradients, strategy        as long as the membership
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch._C._distributed_c10d import Store

from shoal.assembly.coding import build_link_watch
from shoal.assembly.generation import Generation, build_generation, next_generation
from shoal.assembly.objects import UserObjects
from shoal.assembly.process import Process, open_process
from shoal.assembly.reading import epoch_samples, is_handed_over, order_of, reader_opener, short_epoch, slow_reads
from shoal.assembly.run_state import build_state
from shoal.assembly.splitting import microbatching
from shoal.assembly.tiers import Tiers
from shoal.assembly.train_step import build_step
from shoal.assembly.workload import Workload, build_workload
from shoal.comm.mesh import Mesh, build_mesh
from shoal.data.cursor import Cursor
from shoal.data.feed import Feed, StepShare, evaluation_batches
from shoal.data.sample import Batch, Source
from shoal.engine.forward_backward import evaluate
from shoal.engine.microbatches import topped_up
from shoal.engine.precision import scaler_of
from shoal.engine.state import TrainState
from shoal.engine.step import TrainStep
from shoal.launcher.environment import Place
from shoal.observe.terminal import ProgressBar, track
from shoal.optim.schedule import peak_rate, rate
from shoal.runfile.run_file import RunFile, statistics_group
from shoal.state import Trained, wait_for, works_in_streams
from shoal.sync.event_order import Rounds


@dataclass(frozen=True)
class Run:
    """One rank of a run, ready to train. `state` is what a checkpoint holds, `step` takes samples to new weights."""

    run_file: RunFile
    process: Process
    workload: Workload
    generation: Generation
    state: TrainState
    step: TrainStep
    trained: Sequence[Trained]
    """The parameters that this rank trains, and where each stands in the unsplit model."""
    tiers: Tiers

    @property
    def mesh(self) -> Mesh:
        """The ranks and their groups."""
        return self.generation.mesh

    def settle(self) -> None:
        """Returns when the devices of all ranks have done what was launched; all call it. Before a rank leaves or ends
        its groups: its part of a collective that is in its device's queue would go with it, and a rank that is a little
        behind would wait for it for ever. Where collectives are waited for by threads there is nothing to do.
        """
        if works_in_streams(self.device) and self.mesh.layout.world_size > 1:
            wait_for(torch.accelerator.current_stream(self.device).record_event())  # where the watch on hangs sees it
            torch.accelerator.synchronize(self.device)
            self.mesh.world.barrier().wait()

    def end(self) -> None:
        """Ends its groups now, as `Mesh.abort`, and takes its hooks off the model, which would keep gradients, groups
        and the threads of these for ever. May be called after `Mesh.abort`.
        """
        self.mesh.abort()
        self.generation.gradients.close()
        self.state.close()
        self.tiers.close()

    def default_group(self) -> AbstractContextManager[None]:
        """PyTorch's default process group on these ranks, for the user's code: in a script's own loop those that see
        other samples, so that a sum of its own counts each sample once.
        """
        split = self.workload.optimizers and self.mesh.layout.tensor > 1
        ranks = self.mesh.layout.group(("replicate", "shard"), self.mesh.rank) if split else None
        return self.process.default_group(self.mesh, self.run_file, ranks)

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        return self.workload.model

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.process.device

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the unsplit model's trained parameters, tied ones once."""
        split = self.generation.parts.split
        return {name: shape for name, shape in split.shapes.items() if name not in split.frozen}

    def feed(
        self,
        cursor: Cursor | None = None,
        *,
        share: tuple[int, int] | None = None,
        micro_samples: int | None = None,
        steps_of: int | None = None,
    ) -> Feed:
        """The samples of this rank's `share` of every step, (index, number), from `cursor` on. Close it.

        Default: where the run stands, this rank's own share, in this rank's own microbatches. A rank that only serves
        has none. `steps_of`: samples of its steps under `batch.adaptive`; None: those of the first.
        """
        run_file, data = self.run_file, self.workload.data.train
        replica, replicas = self._trains_on if share is None else share
        return Feed(
            data,
            order_of(run_file, self.workload.data),
            StepShare(
                run_file.batch.global_samples,
                replica,
                replicas,
                micro_samples=micro_samples or self.generation.microbatching.samples,
                group=statistics_group(run_file.model),
                epoch=short_epoch(run_file.batch, len(data)),
                schedule=run_file.batch.phases(steps_of),
                epochs_apart=is_handed_over(run_file),
            ),
            denominator=run_file.batch.denominator,
            start=self.state.progress.cursor if cursor is None else cursor,
            prefetch_steps=run_file.data.prefetch_steps,
            readers=run_file.data.readers,
            slow=slow_reads(run_file.wire, rank=self.mesh.rank, ranks=self.mesh.layout.world_size),
            open_reader=reader_opener(run_file, self.workload.data, pinned=works_in_streams(self.device)),
        )

    @property
    def _trains_on(self) -> tuple[int | None, int]:
        """(index, number): which part of every global batch this rank trains on, and of how many; None: of none."""
        share, shares = self.mesh.batch_share
        working = shares - self.run_file.sync.serving_only
        return (share if share < working else None), working

    @property
    def epoch_samples(self) -> int:
        """Samples that are trained on in one epoch."""
        return epoch_samples(self.run_file.batch, len(self.workload.data.train))

    def rate(self, number: int) -> float:
        """The learning rate of step `number`."""
        run_file = self.run_file
        growth = self.state.growth
        samples = run_file.batch.samples_of(number) if growth is None else growth.fed
        peak, _ = peak_rate(run_file.optimizer, global_samples=samples)
        return rate(run_file.schedule, peak, step=number, steps=run_file.run.steps)

    def held_out(self) -> Iterator[Batch]:
        """This rank's part of the held-out samples."""
        source = self.workload.data.held_out
        return iter(()) if source is None else self.one_pass(source, limit=self.run_file.observe.evaluate_samples)

    def one_pass(self, source: Source, *, limit: int | None = None) -> Iterator[Batch]:
        """This rank's part of one pass over the samples of `source`; with a `limit`, over that many of them."""
        batch, (share, shares) = self.run_file.batch, self.mesh.batch_share
        uniform = self.generation.microbatching.uniform
        micro = self.generation.microbatching.samples or max(1, batch.global_samples // shares)
        own = evaluation_batches(
            source, replicas=shares, replica=share, micro_samples=micro, denominator=batch.denominator, limit=limit
        )
        if uniform is None:
            return own
        samples = len(source) if limit is None else min(limit, len(source))
        first = evaluation_batches(source, replicas=1, replica=0, micro_samples=1, denominator=batch.denominator)
        return topped_up(own, -(-samples // (shares * micro)), spare=lambda: next(first))

    def evaluate(self, bar: ProgressBar | None = None) -> dict[str, float]:
        """The measurements on the held-out data, over all ranks; none without such data. `bar` counts batches. An
        average of the weights is measured in their place.
        """
        batches = track(self.held_out(), bar or ProgressBar(), "evaluating: batches of held-out samples")
        shown = self.state.averages_shown(self.generation.gradients.gather)
        with self.generation.agreement.looking_up(), shown, self.tiers.counting():
            return evaluate(self.generation.forward_backward, batches, group=self.mesh.world, device=self.device)


def _unsaid(text: str) -> None:
    """Nobody listens."""


def open_run(
    run_file: RunFile,
    place: Place,
    objects: UserObjects | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    store: Store | None = None,
    rounds: Rounds | None = None,
    activity: Callable[[str], None] = _unsaid,
) -> Run:
    """Connects this rank to the others and builds what it trains with. Blocks until all ranks are here.

    `activity` hears what takes long, before it begins.
    `objects` replace what the run file names. `store` is where ranks meet; None: the one that the launcher told of.
    `rounds` records the order of events at servers, or repeats a recorded one.
    """
    process = open_process(run_file, place, environ=environ, store=store)
    activity("building the model and opening the data")
    layout = run_file.layout.layout(place.world_size)
    plan = microbatching(run_file, layout)
    workload = build_workload(run_file, process, objects or UserObjects(), layout=layout, micro_samples=plan.samples)
    number = int(process.announce("generation", lambda: str(next_generation(run_file))))
    if place.world_size > 1:
        activity("waiting until every rank has built its model")
    process.wait_for_all()
    activity("connecting the ranks and drawing the weights" if place.world_size > 1 else "drawing the weights")
    return run_in_generation(run_file, process, workload, number=number, rounds=rounds)


def run_in_generation(
    run_file: RunFile, process: Process, workload: Workload, *, number: int, rounds: Rounds | None = None
) -> Run:
    """The run of this rank in generation `number`, of the ranks of `process.place`, before its state is restored.

    `workload.model` becomes a part of it: a later generation needs another. Blocks until all ranks are here.
    """
    layout = run_file.layout.layout(process.place.world_size)
    plan = microbatching(run_file, layout)
    mesh = build_mesh(
        layout, process.place.rank, store=process.store, device=process.device, generation=number, wire=run_file.wire,
        conditions=process.conditions,
    )  # fmt: skip
    tiers = Tiers(run_file, process.device)
    with tiers.building():
        generation = build_generation(run_file, process, workload, mesh, plan, rounds, tiers.home)
        scaler, trained = scaler_of(run_file.precision), generation.trained
        state = build_state(run_file, generation, workload, scaler)
    tiers.keep_activations(generation.parts, mesh)
    tiers.keep_state(state.optimizers, steps=lambda: state.progress.step)
    tiers.hold(generation.parts.split.model, generation.gradients, state.optimizers)
    step = build_step(run_file, generation, state, scaler)
    step.counting = tiers.counting
    step.links = build_link_watch(run_file, mesh, generation.sync, generation.gradients.tuned, rounds)
    return Run(run_file, process, workload, generation, state, step, trained, tiers)
