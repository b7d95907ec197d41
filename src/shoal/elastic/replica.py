"""One rank of a replica of an elastic run: it takes part in one generation after the other, and carries its state over.

    a generation ends     between two steps, because one joins or leaves: all learn it in the vote of the same step
                          in a step, because a replica is lost: its peers' collective fails
    the next one begins   groups, gradients and step are built anew; process, data and state stay

Which steps count is `committed_state`'s. Where replicas take steps of their own, a generation ends between two steps
only where they agree, and one that loses a replica goes back to the last agreement.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import msgspec
import torch

from shoal.assembly.conclusion import conclude
from shoal.assembly.hang_watch import watch_hangs
from shoal.assembly.job import build_job, introduce, restore
from shoal.assembly.objects import UserObjects
from shoal.assembly.process import settle
from shoal.assembly.run import Run
from shoal.coordinator.client import Begin, Client, NoGeneration
from shoal.elastic.committed_state import CommittedState
from shoal.elastic.generation import load_generations, skip_steps, take_state
from shoal.elastic.rendezvous import ReplicaRanks, ReplicaRendezvous, require_none_lost
from shoal.elastic.sinks import MembershipSinks, StepReports
from shoal.elastic.state_copy import HeldState
from shoal.engine.loop import Job, record_last_save, tell_of_saves
from shoal.engine.tally import StepResult
from shoal.errors import Stopped
from shoal.fleet.processes import assignment_from
from shoal.launcher.environment import Place
from shoal.launcher.failure import is_secondary
from shoal.launcher.signals import StopRequest, end_with
from shoal.observe.prediction import Forecast
from shoal.resilience.config import ElasticConfig
from shoal.resilience.participant import FencedOut
from shoal.runfile.run_file import RunFile, run_directory

MOST_FRUITLESS = 5
"""Generations in a row that a replica may lose without a step."""
ENDING = "a replica was lost or joined while the generation began"
SAVE_S = 60.0
"""How long the end of a generation waits for a checkpoint that is being written, and half of `accept_s` at most."""
UPDATE_S = 0.3
"""How long a rank whose collective failed waits for others of its replica, which may be within an update."""
PART_S = 10.0
"""How long the first rank of a replica, or of a generation, waits at the end for the others that use its store."""


def train_replica(run_file: RunFile, place: Place, objects: UserObjects, *, forecast: Forecast | None = None) -> None:
    """Trains to the end of the run file. `place` is the process's place on its host.

    Raises `Stopped` where the run was stopped, or this replica was asked to leave and has handed over its state;
    `FencedOut` where the run goes on without it; and the errors of `shoal.errors`.
    """
    ReplicaRank(run_file, place, objects, forecast).train()


class ReplicaRank:
    """What a rank of a replica has for as long as its process lives."""

    def __init__(self, run_file: RunFile, place: Place, objects: UserObjects, forecast: Forecast | None) -> None:
        mine = self._mine = assignment_from(os.environ)
        device = settle(run_file, place, os.environ)
        if mine.several_hosts and device.type == "cpu":  # ZeRO divides by buckets: these stay when hosts come and go
            run_file = msgspec.structs.replace(run_file, gradients=run_file.gradients.between_hosts())
        self._run_file, self._forecast, self._directory = run_file, forecast, run_directory(run_file)
        timeout_s = run_file.run.start_timeout_s
        self._rendezvous = ReplicaRendezvous(mine, place, device, timeout_s=timeout_s, environ=os.environ)
        self._generations = load_generations(run_file, objects, device=device, ranks=self._elastic.max * mine.ranks)
        if mine.late:
            self._generations.rehearse(self._rendezvous.alone("rehearsal"))
        self._sinks = MembershipSinks(run_file, self._directory, mine.terminal_fd, ranks=mine.ranks)
        self._held: HeldState | None = None
        self._stop = StopRequest()
        self._leaving = False
        self._fruitless = 0

    def train(self) -> None:
        """See `train_replica`."""
        client = Client(
            self._mine.coordinator,
            self._mine.replica,
            ranks=self._mine.ranks,
            rank=self._mine.rank,
            store_address=self._rendezvous.address,
            on_ending=lambda: self._rendezvous.end(ENDING),
            on_lost=self._rendezvous.stop_waiting_for,
        )
        ranks = ReplicaRanks(
            self._rendezvous.inside,
            self._mine.rank,
            self._mine.ranks,
            check=client.require_well,
            stopping=self._is_asked_to_stop,
        )
        start_s = self._run_file.run.start_timeout_s
        ranks.arrive(self._rendezvous.place_inside, self._mine.replica, timeout_s=start_s)
        wait_s, over = max(self._elastic.wait_s, self._run_file.run.start_timeout_s), False
        try:
            with self._stop:
                with self._generations.copies, client:
                    try:
                        while not over:
                            find = partial(client.generation, wait_s, stopping=self._stops_waiting)
                            over = self._take_part(client, ranks, self._next(client, ranks, find))
                            wait_s = self._elastic.wait_s
                    except Stopped:
                        self._rendezvous.part(within_s=PART_S)
                        raise
                    self._rendezvous.part(within_s=PART_S)
                end_with(0)  # no signal gives another code from here on
        except FencedOut as error:
            if self._leaving:
                raise Stopped(f"replica {self._mine.replica} has left; the others go on with its state") from error
            raise
        except BaseException as error:
            self._sinks.finish(error)
            raise
        self._sinks.finish(None)

    @property
    def _elastic(self) -> ElasticConfig:
        assert self._run_file.elastic is not None
        return self._run_file.elastic

    def _next(self, client: Client, ranks: ReplicaRanks, find: Callable[[], Begin]) -> Begin:
        """The next generation. Where none comes any more, the state that this replica holds is saved before the error
        goes on: nobody may be left who has it.
        """
        try:
            return ranks.begin(find)
        except (NoGeneration, Stopped) as error:
            if self._held is None or self._held.ahead is not None:  # of servers, no rank has the whole
                raise
            alone, newest = self._rendezvous.alone("save"), client.is_member
            said = self._generations.save(self._held, alone, self._directory, newest=newest)
            raise type(error)(f"{error}; {said}") from error

    def _take_part(self, client: Client, ranks: ReplicaRanks, begin: Begin) -> bool:
        """In one generation. True when the run is over, False when the generation is."""
        committed = CommittedState(self._held if begin.state_from == "here" else None)
        self._held = run = job = None
        done, within_s = False, min(SAVE_S, self._elastic.accept_s / 2)
        if ranks.rank:
            client.follow(begin.view)
        try:
            with ExitStack() as stack:
                process = self._rendezvous.of(begin.view, lost=lambda: client.lost)
                if client.ending:  # since before there was a rendezvous that could be told
                    self._rendezvous.end(ENDING)
                if client.lost:
                    self._rendezvous.stop_waiting_for(client.lost)
                run = self._generations.open(process, begin.view)
                stack.enter_context(run.default_group())
                reports = StepReports(client, run, every=self._elastic.fingerprint_every_steps)
                job = self._begin(client, begin, run, committed, reports, stack)
                first = job.progress.step
                watch = stack.enter_context(watch_hangs(run, self._directory, say=job.sinks.warn))
                served = run.generation.agreement.served is not None  # servers wait in other threads
                with nullcontext() if served else client.telling(watch.activity):
                    committed.train(job, before_step=lambda: require_none_lost(client.lost))
                self._save_what_has_no_copy(run, job)  # with servers, the next one begins with this checkpoint
                tell_of_saves(job, job.saver.wait(math.inf if served else within_s))
                record_last_save(job)
                done = job.progress.step >= job.cadence.steps
                if done and run.mesh.rank == 0:
                    conclude(run, self._directory, job.sinks, self._forecast if first < job.progress.step else None)
        except Exception as error:
            if isinstance(error, FencedOut) or not is_secondary(error):
                raise
            self._lost(client, begin, error)
            ranks.leave_step(within_s=0.0 if run is None else UPDATE_S)
            if run is not None:
                run.mesh.abort()
        held = None if done else committed.carried_over()
        together, over = ranks.end(None if held is None else held.step, done=done)
        if over:
            ranks.part(within_s=PART_S)
            return True
        self._held = held if together else None
        if self._held is None:
            client.dropped()
        self._rendezvous.leave()
        if job is not None:
            job.saver.wait()  # the next generation's saver must find nobody writing
        if run is not None:
            run.end()
        return False

    def _begin(
        self, client: Client, begin: Begin, run: Run, committed: CommittedState, reports: StepReports, stack: ExitStack
    ) -> Job:
        """Everybody gets the state; the generation's job."""
        sinks, view = self._sinks.of(run), begin.view
        found: list[int | None] = [None]

        exchange = self._rendezvous.exchange(run.process, timeout_s=self._run_file.wire.timeout_s)

        def load() -> None:
            found[:] = [restore(run, self._directory, sinks, exchange)]

        skipped = take_state(run, view, committed, load)
        progress = run.state.progress
        client.ready(step=progress.step, position=progress.cursor.next_position)
        if skipped:
            agreed = progress.step
            for position in skip_steps(run, skipped):
                client.applied(stop=position)
            committed.commit()
            sinks.note(
                f"the servers keep what workers have sent them since step {agreed}: going on after step "
                f"{progress.step}, which one of them had reached"
            )
        if view.generation == 1:
            introduce(sinks, run, found[0])
        elif not view.holders:
            place = "the beginning" if found[0] is None else f"the checkpoint of step {found[0]}"
            sinks.warn(f"no replica holds the state of step {view.step}: resuming from {place}")
        job = build_job(
            run,
            self._directory,
            sinks,
            stack,
            stop_requested=lambda: self._asks_to_stop(client),
            exchange=exchange,
            copies=self._generations.copies,
        )
        run.mesh.ledger.take()  # what the start sent belongs to no step
        self._sinks.begin(run, sinks, view)
        # A replica that is lost in an exchange of speeds would take along the step that was just made.
        leaves = partial(self._leaves, client, run, committed, reports)
        return replace(job, leaves=leaves, speeds=None, carried_over=bool(view.holders))

    def _is_asked_to_stop(self) -> bool:
        return self._stop.signal == signal.SIGINT

    def _stops_waiting(self) -> bool:
        """Whether this rank waits for no generation any more. SIGTERM asks a replica to leave that is in none: it goes
        at once, where it has no other ranks to tell.
        """
        told_to_go = self._stop.signal == signal.SIGTERM and not self._leaving and self._mine.ranks == 1
        return told_to_go or self._is_asked_to_stop()

    def _asks_to_stop(self, client: Client) -> bool:
        """Whether this rank wants the step to be the last of the generation. SIGTERM asks its replica to leave, SIGINT
        the whole run to stop.
        """
        if self._stop.signal == signal.SIGTERM and not self._leaving:
            self._leave(client)
        return client.ending or self._leaving or self._is_asked_to_stop()

    def _leave(self, client: Client) -> None:
        self._leaving = True
        client.leave()

    def _leaves(
        self, client: Client, run: Run, committed: CommittedState, reports: StepReports, result: StepResult
    ) -> bool:
        """After each step. Where replicas agree, it counts: reports it. True, on all ranks alike, where the generation
        ends and the run does not.
        """
        reports.taken(result)
        if result.agreed is None:
            return False
        self._fruitless = 0
        self._sinks.stepped()
        reports.send()
        committed.commit()
        if not result.agreed.stop or run.state.progress.step >= self._run_file.run.steps:
            return False
        layout, own = run.mesh.layout, run.mesh.layout.index("replicate", run.mesh.rank)
        votes = torch.zeros(1 + layout.replicate, device=run.device)
        votes[0], votes[1 + own] = float(self._is_asked_to_stop()), float(self._leaving)
        run.mesh.world.all_reduce(votes).wait()
        stopping, *leaving = votes.tolist()
        if leaving[own] and not self._leaving:  # another rank of this replica was asked
            self._leave(client)
        staying = sum(vote == 0 for vote in leaving)
        if stopping or staying < self._elastic.min:  # all save and stop
            return False
        coded = run.generation.coded
        if coded is not None and any(leaving):
            coded.hand_over(run.mesh.axis("replicate"), leaving=bool(leaving[own]))
            committed.commit()
        return True

    def _save_what_has_no_copy(self, run: Run, job: Job) -> None:
        """Between two steps, servers save what the next generation begins with; all replicas are here."""
        step = job.progress.step
        saved = step == job.cadence.steps or job.saves.due(step)
        if run.generation.agreement.served is not None and not saved:
            job.saver.save(step, job.state.tensors(), job.state.to_json(), **job.origin)

    def _lost(self, client: Client, begin: Begin, error: Exception) -> None:
        """A replica was lost, in a step or before. Raises `error` where one generation after the other is."""
        self._fruitless += 1
        self._sinks.lost()
        if self._fruitless > MOST_FRUITLESS:
            raise error
        self._sinks.note(f"lost another replica: {error}")
        client.failed()
        if self._fruitless > 1 and self._mine.rank == 0:  # nobody has ended: who cannot be reached?
            client.failed(self._rendezvous.unreachable(begin.view))
