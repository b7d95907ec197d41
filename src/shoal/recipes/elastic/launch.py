"""The launcher of an elastic run on one host: the coordinator in a thread, a process a replica, replacements.

    a replica dies            its end is told to the coordinator, and another takes its slot
    a replica is fenced       its process is ended, if it is stopped or hangs, and another takes its slot
    a replica leaves          with exit 75, when its state was handed over: nobody takes its slot
    a replica fails for good  with exit 2, 4 or 6, which another would repeat: the run ends with that code
    the user asks to stop     SIGINT to every replica: they take the step, save and end; asked twice, SIGKILL
    replicas differ           after a step, and no majority says who is right: the run ends with exit 6

Replicas keep their slot's log; whichever is rank 0 writes to the terminal.
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

from shoal.coordinator.client import Address, Connection
from shoal.coordinator.in_process import coordinator_in
from shoal.errors import Diverged, EnvironmentFault, Stopped, UsageError, VerificationFailed
from shoal.launch import sockets
from shoal.launch.failure import FAILURE_FOLDER, read_failures
from shoal.launch.rank_process import LAUNCHER_PID, LAUNCHER_PIPE, RankProcess, rank_environment, start
from shoal.launch.root_cause import Exit, ExitCode, exit_code, failure_report, how, root_cause
from shoal.launch.signals import Debounce
from shoal.launch.spawn import listening, no_survivors, pipe
from shoal.launch.supervision import say
from shoal.launch.temporary_folder import temporary_folder
from shoal.recipes.elastic.seat import variables_of
from shoal.resilience.config import ElasticConfig
from shoal.resilience.events import Committed, Decision, Ended, Fenced, Formed
from shoal.resilience.fingerprints import Verdict
from shoal.resilience.membership import Rules

FOR_GOOD = (UsageError.exit_code, Diverged.exit_code, VerificationFailed.exit_code)
"""Exit codes of failures that a replacement would repeat."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""A store that went with its replica is no news: PyTorch would warn of it with a page of its own frames."""
FAILURE_S = 2.0
"""How long the others get to end by themselves after a failure for good."""
LAST_S = 300.0
"""How long they get after the first that is done, or has stopped as it was asked: to write the report, or the save."""
Event = RankProcess | signal.Signals | Decision | Verdict | Exception


def run_elastic(
    command: Sequence[str],
    config: ElasticConfig,
    *,
    steps: int,
    run_directory: Path,
    environ: Mapping[str, str],
    keep_fds: Sequence[int] = (),
) -> ExitCode:
    """Runs `command` as the replicas of `config` to step `steps`; the exit code that the launcher should exit with.

    Call it from the main thread, as `launch.spawn.run_ranks`. Raises `EnvironmentFault` where nothing can be started.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    rules = Rules(config.min, config.max, silence_s=config.silence_s, accept_s=config.accept_s)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        stack.enter_context(listening(events))
        address = stack.enter_context(coordinator_in(folder, rules, told=events.put))
        terminal_fd = os.dup(1)
        stack.callback(os.close, terminal_fd)
        fleet = Fleet(config, steps, address, folder, events)
        stack.enter_context(no_survivors(fleet.processes))
        with pipe() as read_end:
            own = {**environ, FAILURE_FOLDER: str(folder), LAUNCHER_PID: str(os.getpid()), LAUNCHER_PIPE: str(read_end)}
            fleet.starter = Starter(
                list(command), config.max, run_directory, own, (read_end, terminal_fd, *keep_fds), terminal_fd
            )
            for slot in range(config.max):
                fleet.start(slot)
            while fleet.running:
                fleet.react()
        return fleet.conclude()


@dataclass(frozen=True)
class Starter:
    """How a replica's process is started."""

    command: list[str]
    slots: int
    run_directory: Path
    environ: Mapping[str, str]
    fds: Sequence[int]
    terminal_fd: int

    def start(self, slot: int, replica: str, address: Address, token: Path, *, late: bool) -> RankProcess:
        """The process in `slot`; `late`: the others train already. Raises `EnvironmentFault`."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        loopback = {"GLOO_SOCKET_IFNAME": sockets.interface_name()}
        own = rank_environment(
            {**loopback, **QUIET, **self.environ}, slot, processes=self.slots, port=address.port, cores=cores
        ) | variables_of(replica, address, token=token, terminal_fd=self.terminal_fd, late=late)
        return start(self.command, slot, environ=own, run_directory=self.run_directory, pass_fds=self.fds)


@dataclass
class Fleet:
    """The replicas' processes, by the names of the replicas, and how those ended that nobody replaced."""

    config: ElasticConfig
    steps: int
    address: Address
    folder: Path
    events: queue.SimpleQueue[Event]
    starter: Starter | None = None
    running: dict[str, RankProcess] = field(default_factory=dict)
    processes: list[RankProcess] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    members: tuple[str, ...] = ()
    stop_signal: signal.Signals | None = None
    sentence: str = ""
    fault: EnvironmentFault | VerificationFailed | None = None
    over: bool = False
    deadline_s: float | None = None
    replaced: Counter[int] = field(default_factory=Counter)
    coordinated: bool = True
    _sent: dict[str, set[int]] = field(default_factory=dict)
    _debounce: Debounce = field(default_factory=Debounce)

    def start(self, slot: int) -> None:
        """Another replica in `slot`."""
        assert self.starter is not None
        name = f"replica-{slot}-{secrets.token_hex(4)}"
        process = self.starter.start(slot, name, self.address, self.folder / "token", late=bool(self.members))
        self.running[name] = process
        self.processes.append(process)
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
        match event:
            case RankProcess():
                self._ended(event)
            case signal.Signals():
                self._signalled(event)
            case Formed(_, members, _, step):
                self.members = members
                if step >= self.steps:
                    self._finished()
            case Committed(_, step):
                self.replaced.clear()
                if step == self.steps:
                    self._finished()
            case Fenced(name, reason, False) if name in self.running and not self.over:
                say(f"{name} is fenced: {reason}")
                self.running[name].send(signal.SIGKILL)
            case Verdict(_, (), sentence):
                self._end(VerificationFailed(sentence))
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
        kept = [end for end in self.exits if not end.by_launcher]
        failed = {end.pid for end in kept if end.failed}
        records = [record for record in read_failures(self.folder) if record.pid in failed]
        own_failure = any(not record.secondary for record in records)
        if any(end.code == 0 for end in self.exits) and not own_failure:
            return ExitCode(0)
        if self._debounce.requests > 1 and self.stop_signal is not None:
            sentence = f"{self.stop_signal.name}: stopped at once; the next start goes on from the newest checkpoint"
            say(sentence)
            return ExitCode(128 + self.stop_signal, sentence=sentence)
        ends = root_cause(records, kept)
        if ends:
            tails = {p.rank: p.log_tail() for p in self.processes if p.pid == ends[0].exit.pid}
            say(failure_report(ends, kept, world_size=self.config.max, stopped={}, log_tails=tails))
            return ExitCode(exit_code(kept, ends), rank=ends[0].exit.rank, sentence=ends[0].sentence)
        sentence = "stopped; the same command goes on from the newest checkpoint"
        if self.stop_signal is None:
            sentence = "all replicas were asked to leave; the same command goes on from the newest checkpoint"
        say(sentence)
        return ExitCode(Stopped.exit_code, sentence=sentence)

    def _announce_end(self, process: RankProcess) -> None:
        process.wait()
        self.events.put(process)

    def _ended(self, process: RankProcess) -> None:
        name = next(name for name, found in self.running.items() if found is process)
        del self.running[name]
        time_ns, code = time.time_ns(), process.reap()
        by_launcher = any(code in (-number, 128 + number) for number in self._sent.get(name, ()))
        end = Exit(process.rank, process.pid, code, time_ns, by_launcher=by_launcher)
        self._tell(Ended(name, f"its process ended: {how(end)}"))
        if (self.over and code == 0) or (self.stop_signal is not None and code == Stopped.exit_code):
            self.deadline_s = self.deadline_s or time.monotonic() + LAST_S
        if code in (0, Stopped.exit_code) or self._ending or self.over:
            self.exits.append(end)
        elif code in FOR_GOOD:
            self.exits.append(end)
            self.deadline_s = time.monotonic() + FAILURE_S
        else:
            self._replace(name, process, end)

    @property
    def _ending(self) -> bool:
        return self.stop_signal is not None or self.fault is not None or self.deadline_s is not None

    def _finished(self) -> None:
        """The last step is taken: those that are no members would join a run that is over."""
        self.over = True
        for name in [name for name in self.running if name not in self.members]:
            self._send(name, signal.SIGKILL)

    def _replace(self, name: str, process: RankProcess, end: Exit) -> None:
        """Starts another in its slot, unless that came to nothing several times."""
        said = next((f.headline for f in read_failures(self.folder) if f.pid == process.pid), how(end))
        if self.coordinated and self.replaced[process.rank] < self.config.retries:
            self.replaced[process.rank] += 1
            say(f"{name} (pid {process.pid}) ended: {said}; another takes its place")
            (self.folder / f"rank-{process.rank}.json").unlink(missing_ok=True)
            self.start(process.rank)
            return
        why = f"it was replaced {self.replaced[process.rank]} times without a step since"
        if not self.coordinated:
            why = "without the coordinator none can join in its place"
        say(f"{name} (pid {process.pid}) ended: {said}; {why}")
        if len(self.running) < self.config.min:
            self.exits.append(end)
            self._end(
                EnvironmentFault(
                    f"{len(self.running)} of at least {self.config.min} replicas are left: the last one was not "
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

    def _end(self, fault: EnvironmentFault | VerificationFailed) -> None:
        self.fault = fault
        self._send_all(signal.SIGKILL)

    def _send_all(self, number: signal.Signals) -> None:
        for name in self.running:
            self._send(name, number)

    def _send(self, name: str, number: signal.Signals) -> None:
        """A signal by which the run ends: whoever dies by it has not failed."""
        self._sent.setdefault(name, set()).add(number)
        self.running[name].send(number)

    def _tell(self, event: Ended) -> None:
        """Best effort: a coordinator that is gone notices the silence."""
        try:
            connection = Connection(self.address)
            try:
                connection.ask(event)
            finally:
                connection.close()
        except (OSError, EnvironmentFault) as error:
            if self.fault is None:
                say(f"the coordinator was not told of an end: {error}")
