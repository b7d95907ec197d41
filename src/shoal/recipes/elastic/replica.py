"""One replica of an elastic run: it takes part in one generation after the other, and carries its state over.

    a generation ends     between two steps, because one joins or leaves: all learn it in the vote of the same step
                          in a step, because a replica is lost: its peers' collective fails
    the next one begins   groups, gradients and step are built anew; process, data and state stay

A step counts for a replica when its optimizer has made the whole update. One that fails before has changed nothing but
buffers, which are taken back; one that fails within has left no state to go on from, and the replica copies another's.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from shoal.coordinator.client import Begin, Client
from shoal.engine.loop import Job, tell_of_saves
from shoal.engine.step_result import StepResult
from shoal.errors import Stopped
from shoal.launch.environment import Place
from shoal.launch.failure import is_secondary
from shoal.launch.signals import StopRequest
from shoal.maths.fingerprint import fingerprint
from shoal.recipes.elastic.generation import Generations, state_for
from shoal.recipes.elastic.meeting import Meeting
from shoal.recipes.elastic.seat import seat_from
from shoal.recipes.elastic.showing import Showing
from shoal.recipes.elastic.standing import Standing
from shoal.recipes.elastic.state_copy import HeldState, held_state
from shoal.recipes.forecast import Forecast
from shoal.recipes.job import build_job, introduce, restore
from shoal.recipes.objects import UserObjects
from shoal.recipes.process import settle
from shoal.recipes.run import Run
from shoal.recipes.training import conclude
from shoal.recipes.workload import load_workload
from shoal.resilience.config import ElasticConfig
from shoal.resilience.participant import FencedOut
from shoal.runfile.run_file import RunFile, default_micro_samples, run_directory

MOST_FRUITLESS = 5
"""Generations in a row that a replica may lose without a step."""
ENDING = "a replica was lost or joined while the generation began"
SAVE_S = 60.0
"""How long the end of a generation waits for a checkpoint that is being written."""


def train_replica(run_file: RunFile, place: Place, objects: UserObjects, *, forecast: Forecast | None = None) -> None:
    """Trains to the end of the run file. `place` is the process's place on its host.

    Raises `Stopped` where the run was stopped, or this replica was asked to leave and has handed over its state;
    `FencedOut` where the run goes on without it; and the errors of `shoal.errors`.
    """
    Replica(run_file, place, objects, forecast).train()


class Replica:
    """What a replica has for as long as its process lives."""

    def __init__(self, run_file: RunFile, place: Place, objects: UserObjects, forecast: Forecast | None) -> None:
        self._run_file, self._forecast, self._directory = run_file, forecast, run_directory(run_file)
        self._seat = seat_from(os.environ)
        device = settle(run_file, place, os.environ)
        self._meeting = Meeting(place, device, timeout_s=run_file.run.start_timeout_s, environ=os.environ)
        workload = load_workload(
            run_file,
            objects,
            device=device,
            environ=os.environ,
            layout=run_file.layout.layout(place.world_size),
            micro_samples=default_micro_samples(run_file),
        )
        self._generations = Generations(run_file, workload)
        if self._seat.late:
            self._generations.rehearse(self._meeting.alone())
        self._showing = Showing(run_file, self._directory, self._seat.terminal_fd)
        self._held: HeldState | None = None
        self._stop = StopRequest()
        self._leaving = False
        self._fruitless = 0

    def train(self) -> None:
        """See `train_replica`."""
        client = Client(
            self._seat.coordinator,
            self._seat.replica,
            store_address=self._meeting.address,
            on_ending=lambda: self._meeting.end(ENDING),
        )
        wait_s, over = max(self._elastic.wait_s, self._run_file.run.start_timeout_s), False
        try:
            with self._stop, client:
                while not over:
                    over = self._take_part(client, client.generation(wait_s, stopping=self._is_asked_to_stop))
                    wait_s = self._elastic.wait_s
        except FencedOut as error:
            if self._leaving:
                raise Stopped(f"replica {self._seat.replica} has left; the others go on with its state") from error
            raise
        except BaseException as error:
            self._showing.finish(error)
            raise
        self._showing.finish(None)

    @property
    def _elastic(self) -> ElasticConfig:
        assert self._run_file.elastic is not None
        return self._run_file.elastic

    def _take_part(self, client: Client, begin: Begin) -> bool:
        """In one generation. True when the run is over, False when the generation is."""
        standing = Standing(self._held if begin.state_from == "here" else None)
        self._held = run = job = None
        try:
            with ExitStack() as stack:
                process = self._meeting.of(begin.view, self._seat.replica)
                if client.ending:  # before there was a meeting that could be told
                    self._meeting.end(ENDING)
                run = self._generations.open(process, begin.view)
                job = self._begin(client, begin, run, standing, stack)
                first = job.progress.step
                standing.train(job)
                tell_of_saves(job, job.saver.wait(SAVE_S))
                if job.progress.step >= job.cadence.steps:
                    if run.mesh.rank == 0:
                        conclude(run, self._directory, job.sinks, self._forecast if first < job.progress.step else None)
                    return True
        except Exception as error:
            if isinstance(error, FencedOut) or not is_secondary(error):
                raise
            self._lost(client, standing, error)
        self._held = standing.carried_over()
        if self._held is None:
            client.dropped()
        self._meeting.leave()
        if job is not None:
            job.saver.wait()  # the next generation's saver must find nobody writing
        if run is not None:
            run.mesh.abort()
        return False

    def _begin(self, client: Client, begin: Begin, run: Run, standing: Standing, stack: ExitStack) -> Job:
        """Everybody gets the state; the generation's job."""
        sinks, view = self._showing.of(run), begin.view
        found: list[int | None] = [None]

        def load() -> None:
            found[:] = [restore(run, self._directory, sinks)]

        standing.take_over(run, state_for(run, view, standing.held, load))
        client.ready(step=run.state.progress.step, position=run.state.progress.cursor.next_position)
        if view.generation == 1:
            introduce(sinks, run, found[0])
        elif not view.holders:
            place = "the beginning" if found[0] is None else f"the checkpoint of step {found[0]}"
            sinks.warn(f"no replica holds the state of step {view.step}: going on from {place}")
        job = build_job(
            run,
            self._directory,
            sinks,
            stack,
            stop_requested=lambda: self._asks_to_stop(client),
            exchange=self._meeting.exchange(run.process, timeout_s=self._run_file.wire.timeout_s),
        )
        run.mesh.ledger.take()  # what the start sent belongs to no step
        self._showing.begin(run, sinks, view)
        # A replica that is lost in an exchange of speeds would take along the step that was just made.
        leaves = partial(self._leaves, client, run, standing)
        return replace(job, leaves=leaves, speeds=None, carried_over=bool(view.holders))

    def _is_asked_to_stop(self) -> bool:
        return self._stop.signal == signal.SIGINT

    def _asks_to_stop(self, client: Client) -> bool:
        """Whether this replica wants the step to be the last of the generation. SIGTERM asks this replica to leave,
        SIGINT the whole run to stop.
        """
        if self._stop.signal == signal.SIGTERM and not self._leaving:
            self._leaving = True
            client.leave()
        return client.ending or self._is_asked_to_stop()

    def _leaves(self, client: Client, run: Run, standing: Standing, result: StepResult) -> bool:
        """After each step: reports it. True, on all ranks alike, where the generation ends and the run does not."""
        progress, every = run.state.progress, self._elastic.fingerprint_every_steps
        self._fruitless = 0
        client.applied(
            stop=progress.cursor.next_position,
            fingerprint=fingerprint(held_state(run.state).tensors) if every and progress.step % every == 0 else 0,
            step_s=result.times.forward_backward_s + result.times.optimizer_s,
        )
        standing.reported()
        if result.agreed is None or not result.agreed.stop or progress.step >= self._run_file.run.steps:
            return False
        votes = torch.tensor([float(self._is_asked_to_stop()), float(self._leaving)], device=run.device)
        run.mesh.world.all_reduce(votes).wait()
        stopping, leaving = (int(vote) for vote in votes)
        return stopping == 0 and run.mesh.world.size - leaving >= self._elastic.min  # else all save and stop

    def _lost(self, client: Client, standing: Standing, error: Exception) -> None:
        """A replica was lost, in a step or before. Raises `error` where one generation after the other is."""
        self._fruitless += 1
        if self._fruitless > MOST_FRUITLESS:
            raise error
        self._showing.note(f"lost another replica: {error}")
        client.failed()
