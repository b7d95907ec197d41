"""The launcher of an elastic run on one host: a process a rank, replacements, and the coordinator if there is no other.

    a replica dies            its end is told to the coordinator, and another takes its slot
    a replica is fenced       its processes are ended, if they are stopped or hang, and another takes its slot
    a replica leaves          with exit 75, when its state was handed over: nobody takes its slot
    a replica fails for good  with exit 2, 4 or 6, or as no generation came, which another would repeat: the run ends
    the host is to go         by its file or its cloud's word: SIGTERM to every rank here, and nobody is replaced
    the user asks to stop     SIGINT to every rank: they take the step, save and end; asked twice, SIGKILL
    replicas differ           after a step, and no majority says who is right: the run ends with exit 6

With a coordinator elsewhere, each host has such a launcher, for its own replicas. Ranks keep their slot's log;
whichever is rank 0 of the run writes to the terminal of its host.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from shoal.coordinator.client import ANSWER_S, Address, Connection, NoGeneration
from shoal.coordinator.in_process import coordinator_in
from shoal.coordinator.watch import Silence, view_of, watching
from shoal.errors import Diverged, EnvironmentFault, Stopped, UsageError, VerificationFailed
from shoal.launch import sockets
from shoal.launch.environment import LOOPBACK
from shoal.launch.failure import FAILURE_FOLDER, read_failures
from shoal.launch.rank_process import LAUNCHER_PID, LAUNCHER_PIPE, RankProcess
from shoal.launch.root_cause import Exit, ExitCode, exit_code, failure_report, how, root_cause
from shoal.launch.signals import Debounce
from shoal.launch.spawn import listening, no_survivors, pipe
from shoal.launch.supervision import say
from shoal.recipes.elastic.assignment import TOKEN, coordinator_from, coordinator_variables, replicas_here
from shoal.recipes.elastic.processes import ReplicaProcesses, Starter
from shoal.recipes.elastic.scaling import Speeds, scaling
from shoal.resilience.config import ElasticConfig
from shoal.resilience.events import Committed, Decision, Ended, Fenced, Formed
from shoal.resilience.fingerprints import Verdict
from shoal.resilience.membership import Rules
from shoal.resilience.preemption import Preemption, watching_for_preemption
from shoal.temporary_folder import temporary_folder

FOR_GOOD = (UsageError.exit_code, Diverged.exit_code, VerificationFailed.exit_code)
"""Exit codes of failures that a replacement would repeat."""
FAILURE_S = 2.0
"""How long the others get to end by themselves after a failure for good."""
LAST_S = 300.0
"""How long they get after the first that is done, or has stopped as it was asked: to write the report, or the save."""
Event = RankProcess | signal.Signals | Decision | Verdict | Silence | Preemption | Exception


@dataclass(frozen=True)
class Job:
    """What is launched: `command` as each of the `ranks` of each replica, to step `steps` of the run, each of
    `global_samples`.
    """

    command: Sequence[str]
    ranks: int
    steps: int
    run_directory: Path
    global_samples: int = 1


def run_elastic(
    job: Job, config: ElasticConfig, *, environ: Mapping[str, str], keep_fds: Sequence[int] = ()
) -> ExitCode:
    """Runs `job` as replicas; the exit code that the launcher should exit with. `environ` may name a coordinator.

    Call it from the main thread, as `launch.spawn.run_ranks`. Raises `EnvironmentFault` where nothing can be started.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    elsewhere = coordinator_from(environ)
    if elsewhere is not None and config.policy != "available":
        raise UsageError(
            f'elastic.policy = "{config.policy}" with a coordinator of several hosts, which no launcher scales: use '
            "`shoal coordinator scale`, and leave elastic.policy out"
        )
    host = LOOPBACK if elsewhere is None else sockets.address_towards(elsewhere.host, elsewhere.port)
    slots = config.max + config.spares if elsewhere is None else replicas_here(environ)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        stack.enter_context(listening(events))
        address, token = elsewhere, Path(environ.get(TOKEN, ""))
        if address is None:
            rules = Rules(config.min, config.max, silence_s=config.silence_s, accept_s=config.accept_s)
            address = stack.enter_context(coordinator_in(folder, rules, told=events.put))
            token = folder / "token"
        terminal_fd = os.dup(1)
        stack.callback(os.close, terminal_fd)
        read_end = stack.enter_context(pipe())
        starter = Starter(
            list(job.command),
            ranks=job.ranks,
            slots=slots,
            host=host,
            several_hosts=elsewhere is not None,
            run_directory=job.run_directory if elsewhere is None else job.run_directory / "hosts" / host,
            environ={
                **environ,
                FAILURE_FOLDER: str(folder),
                LAUNCHER_PID: str(os.getpid()),
                LAUNCHER_PIPE: str(read_end),
            },
            coordinator=coordinator_variables(address, token.absolute()),
            fds=(read_end, terminal_fd, *keep_fds),
            terminal_fd=terminal_fd,
        )
        fleet = Fleet(config, job.steps, address, folder, events, starter)
        stack.enter_context(no_survivors(fleet.processes))
        if elsewhere is not None:
            names = lambda: tuple(fleet.running)  # noqa: E731
            since = view_of(address)
            fleet.members = since.members
            stack.enter_context(watching(address, names, since=since, told=events.put, silence_s=config.silence_s))
        fleet.speeds = Speeds(job.global_samples)
        stack.enter_context(scaling(config, address, fleet.speeds, say=say))
        for slot in range(slots):
            fleet.start(slot)
        watched = config.preemption_file, config.preemption_url
        stack.enter_context(watching_for_preemption(*watched, told=events.put, warn=say))
        while fleet.running:
            fleet.react()
        return fleet.conclude()


@dataclass
class Fleet:
    """The replicas of this host, by their names, and how those ended that nobody replaced."""

    config: ElasticConfig
    steps: int
    address: Address
    folder: Path
    events: queue.SimpleQueue[Event]
    starter: Starter
    running: dict[str, ReplicaProcesses] = field(default_factory=dict)
    processes: list[RankProcess] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    members: tuple[str, ...] = ()
    stop_signal: signal.Signals | None = None
    fault: EnvironmentFault | VerificationFailed | None = None
    over: bool = False
    deadline_s: float | None = None
    replaced: Counter[int] = field(default_factory=Counter)
    coordinated: bool = True
    speeds: Speeds | None = None
    preempted: bool = False
    _debounce: Debounce = field(default_factory=Debounce)
    _tellings: list[threading.Thread] = field(default_factory=list)

    def start(self, slot: int) -> None:
        """Another replica in `slot`."""
        name = f"replica-{slot}-{secrets.token_hex(4)}"
        spare = not self.starter.several_hosts and slot >= self.config.max
        replica = self.starter.start(slot, name, late=bool(self.members) or spare)
        self.running[name] = replica
        self.processes += replica.ranks
        for process in replica.ranks:
            threading.Thread(target=self._announce_end, args=(process,), daemon=True).start()

    def react(self) -> None:
        """Waits for the next event, and does what follows."""
        wait_s = None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())
        try:
            event = self.events.get(timeout=wait_s)
        except queue.Empty:
            self.deadline_s = None
            self._send_all(signal.SIGKILL)
            return
        if self.speeds is not None and isinstance(event, Formed | Committed):
            self.speeds.heard(event, time.monotonic())
        match event:
            case RankProcess():
                self._rank_ended(event)
            case signal.Signals():
                self._signalled(event)
            case Formed(_, members, _, step):
                self.members = members
                if step >= self.steps:
                    self._finished()
            case Committed(_, step):
                for name in self.members:
                    if name in self.running:
                        del self.replaced[self.running[name].slot]
                if step == self.steps:
                    self._finished()
            case Fenced(name, reason, False) if name in self.running and not self.over:
                say(f"{name} is fenced: {reason}")
                self.running[name].send(signal.SIGKILL)
            case Verdict(_, (), sentence):
                self._end(VerificationFailed(sentence))
            case Preemption(sentence) if not self.over and not self._ending:
                self.preempted = True
                say(f"{sentence}: its replicas hand over and leave")
                for replica in self.running.values():
                    replica.send(signal.SIGTERM)
            case Silence(silent_s):
                self._say_silence(silent_s)
            case EnvironmentFault():
                self.coordinated = False
                say(f"the coordinator has ended, and training goes on until a replica is lost: {event}")
            case Exception():
                raise event
            case _:
                pass

    def conclude(self) -> ExitCode:
        """Says how the run ended, and with which code."""
        if self.fault is not None:
            say(str(self.fault))
            return ExitCode(self.fault.exit_code, sentence=str(self.fault))
        for telling in self._tellings:
            telling.join(ANSWER_S)
        kept = [end for end in self.exits if not end.by_launcher]
        failed = {end.pid for end in kept if end.failed}
        records = [record for record in read_failures(self.folder) if record.pid in failed]
        own_failure = any(not record.secondary for record in records)
        if any(end.code == 0 for end in self.exits) and not own_failure:
            return ExitCode(0)
        if self.over and self.stop_signal is None and not kept:  # all here stood by
            return ExitCode(0)
        if self._debounce.requests > 1 and self.stop_signal is not None:
            sentence = f"{self.stop_signal.name}: stopped at once; the next start goes on from the newest checkpoint"
            say(sentence)
            return ExitCode(128 + self.stop_signal, sentence=sentence)
        ends = root_cause(records, kept)
        if ends:
            tails = {p.rank: p.log_tail() for p in self.processes if p.pid == ends[0].exit.pid}
            most = self.config.max * self.starter.ranks
            say(failure_report(ends, kept, world_size=most, stopped={}, log_tails=tails))
            return ExitCode(exit_code(kept, ends), rank=ends[0].exit.rank, sentence=ends[0].sentence)
        sentence = "stopped; the same command goes on from the newest checkpoint"
        if self.stop_signal is None:
            sentence = "all replicas were asked to leave; the same command goes on from the newest checkpoint"
        say(sentence)
        return ExitCode(Stopped.exit_code, sentence=sentence)

    def _announce_end(self, process: RankProcess) -> None:
        process.wait()
        self.events.put(process)

    def _rank_ended(self, process: RankProcess) -> None:
        replica = next(replica for replica in self.running.values() if process in replica.ranks)
        replica.ended(process)
        code = replica.end.code
        if (self.over and code == 0) or (self.stop_signal is not None and code == Stopped.exit_code):
            self.deadline_s = self.deadline_s or time.monotonic() + LAST_S
        if replica.is_over:
            del self.running[replica.name]
            self._replica_ended(replica)

    def _replica_ended(self, replica: ReplicaProcesses) -> None:
        end = replica.end
        self._tell(Ended(replica.name, f"its process ended: {how(end)}"))
        if end.code in (0, Stopped.exit_code) or end.by_launcher or self._ending or self.over or self.preempted:
            self.exits += replica.exits
            if end.code == Stopped.exit_code and not self._ending and not self.over:
                self._stop_too_few()
        elif self._is_for_good(end):
            self.exits += replica.exits
            self.deadline_s = time.monotonic() + FAILURE_S
        else:
            self._replace(replica)

    def _is_for_good(self, end: Exit) -> bool:
        """Whether a replacement would fail in the same way."""
        kinds = {record.kind for record in read_failures(self.folder) if record.pid == end.pid}
        return end.code in FOR_GOOD or NoGeneration.__name__ in kinds

    def _stop_too_few(self) -> None:
        """All members have left, and those that are here are fewer than a generation needs: none will come."""
        members = any(name in self.running for name in self.members)
        if not self.starter.several_hosts and not members and len(self.running) < self.config.min:
            self.deadline_s = time.monotonic() + LAST_S
            self._send_all(signal.SIGINT)

    @property
    def _ending(self) -> bool:
        return self.stop_signal is not None or self.fault is not None or self.deadline_s is not None

    def _finished(self) -> None:
        """The last step is taken: those that are no members would join a run that is over."""
        self.over = True
        for name in [name for name in self.running if name not in self.members]:
            self.running[name].send(signal.SIGKILL, as_end=True)

    def _replace(self, replica: ReplicaProcesses) -> None:
        """Starts another in its slot, unless that came to nothing several times."""
        end, slot = replica.end, replica.slot
        said = next((f.headline for f in read_failures(self.folder) if f.pid == end.pid), how(end))
        who = f"{replica.name} (pid {end.pid})"
        if self.coordinated and self.replaced[slot] < self.config.retries:
            self.replaced[slot] += 1
            say(f"{who} ended: {said}; another takes its place")
            for process in replica.ranks:
                (self.folder / f"rank-{process.rank}.json").unlink(missing_ok=True)
            self.start(slot)
            return
        why = f"it was replaced {self.replaced[slot]} times without a step since"
        if not self.coordinated:
            why = "without the coordinator none can join in its place"
        say(f"{who} ended: {said}; {why}")
        if len(self.running) < (1 if self.starter.several_hosts else self.config.min):
            self.exits += replica.exits
            here = " here" if self.starter.several_hosts else f" of at least {self.config.min}"
            self._end(
                EnvironmentFault(
                    f"{len(self.running)}{here} replicas are left: the last one was not "
                    f"replaced, because {why}; see what they said in logs/; the same command goes on from the newest "
                    "checkpoint"
                )
            )

    def _signalled(self, number: signal.Signals) -> None:
        if not self._debounce.request(time.monotonic()):
            return
        first, self.stop_signal = self.stop_signal is None, number
        self._send_all(signal.SIGINT if first else signal.SIGKILL)
        if first:
            say(f"{number.name}: finishing the step and saving; press again to stop at once")

    def _say_silence(self, silent_s: float) -> None:
        where = f"the coordinator at {self.address.host}:{self.address.port}"
        if silent_s:
            say(
                f"{where} has not answered for {silent_s:.0f} s: the replicas here go on while all members reach each "
                "other, and else wait; check that it runs, and the network to it"
            )
        else:
            say(f"{where} answers again")

    def _end(self, fault: EnvironmentFault | VerificationFailed) -> None:
        self.fault = fault
        self._send_all(signal.SIGKILL)

    def _send_all(self, number: signal.Signals) -> None:
        for replica in self.running.values():
            replica.send(number, as_end=True)

    def _tell(self, event: Ended) -> None:
        """Best effort: a coordinator that is gone notices the silence. Waits for no coordinator on another host."""
        if not self.starter.several_hosts:
            self._ask(event)
            return
        self._tellings.append(threading.Thread(target=self._ask, args=(event,), daemon=True))
        self._tellings[-1].start()

    def _ask(self, event: Ended) -> None:
        try:
            connection = Connection(self.address)
            try:
                connection.ask(event)
            finally:
                connection.close()
        except (OSError, EnvironmentFault) as error:
            if self.fault is None:
                say(f"the coordinator was not told of an end: {error}")
