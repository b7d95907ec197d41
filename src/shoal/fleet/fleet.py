"""The replicas of one host: what follows when one of them ends, and when the coordinator says something.

a replica dies            its end is told to the coordinator, and another takes its slot
a replica is fenced       its processes are ended, if they are stopped or hang, and another takes its slot
a replica is stopped      the same, after twice `silence_s`: the coordinator fences none that has not joined yet
a replica is late         the same: it was not ready to join in time (`launcher.supervision`)
a replica leaves          with exit 75, when its state was handed over: nobody takes its slot
a replica fails for good  with exit 2, 4 or 6, or as no generation came, which another would repeat: the run ends
the host is to go         by its file or its cloud's word: SIGTERM to every rank here, and nobody is replaced
the user asks to stop     SIGINT to every rank: they take the step, save and end; asked twice, SIGKILL
replicas differ           after a step, and no majority says who is right: the run ends with exit 6
the coordinator is gone   no generation can follow a loss: SIGINT to those that are left, which save, and exit 3
"""

from __future__ import annotations

import queue
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.coordinator.client import ANSWER_S, Address, Connection, NoGeneration
from shoal.coordinator.watch import Silence, view_of
from shoal.errors import Diverged, EnvironmentFault, Stopped, UsageError, VerificationFailed
from shoal.fleet.processes import ReplicaProcesses, Starter
from shoal.fleet.scaling import Speeds
from shoal.launcher.failure import read_failures, write_failure
from shoal.launcher.rank_process import RankProcess
from shoal.launcher.root_cause import Exit, exit_code, failure_report, how, root_cause
from shoal.launcher.spawn import ExitCode
from shoal.launcher.supervision import DUMP_S, failure_of_late, has_arrived, say
from shoal.resilience.config import ElasticConfig
from shoal.resilience.detection import Divergence, Slow, ranks_of
from shoal.resilience.events import Committed, Decision, Ended, Fenced, Formed
from shoal.resilience.hang_verdict import read_verdict
from shoal.resilience.preemption import Preemption

FOR_GOOD = (UsageError.exit_code, Diverged.exit_code, VerificationFailed.exit_code)
"""Exit codes of failures that a replacement would repeat."""
FAILURE_S = 2.0
"""How long the others get to end by themselves after a failure for good."""
LOOK_S = 0.5
"""How often the launcher looks which processes are stopped."""
LAST_S = 300.0
"""How long they get after the first that is done, or has stopped as it was asked: to write the report, or the save."""
Event = RankProcess | signal.Signals | Decision | Divergence | Slow | Silence | Preemption | Exception


@dataclass
class Fleet:
    """The replicas of this host, by their names, and how those ended that nobody replaced. `steps` are those of the
    run; None: of a script, which is over when the first of its ranks is done, and the others end by themselves.
    """

    config: ElasticConfig
    steps: int | None
    address: Address
    folder: Path
    events: queue.SimpleQueue[Event]
    starter: Starter
    directory: Path
    warn: Callable[[str], object] = str
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
    names: set[str] = field(default_factory=set)
    verdict_since_s: float = field(default_factory=time.time)
    start_s: float | None = None
    _requests: int = 0
    _tellings: list[threading.Thread] = field(default_factory=list)
    _stopped_since_s: dict[int, float] = field(default_factory=dict)
    _look_s: float = 0.0

    def start(self, slot: int) -> None:
        """Another replica in `slot`."""
        name = f"replica-{slot}-{secrets.token_hex(4)}"
        spare = not self.starter.several_hosts and slot >= self.config.max
        replica = self.starter.start(slot, name, late=bool(self.members) or spare)
        self.running[name] = replica
        self.names.add(name)
        self.processes += replica.ranks
        for process in replica.ranks:
            threading.Thread(target=self._announce_end, args=(process,), daemon=True).start()

    def react(self) -> None:
        """Waits for the next event, and does what follows."""
        event = self._next_event()
        if event is None:
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
                if self.steps is not None and step >= self.steps:
                    self._finished()
            case Committed(_, step):
                for name in self.members:
                    if name in self.running:
                        del self.replaced[self.running[name].slot]
                if step == self.steps:
                    self._finished()
            case Fenced(name, reason, False) if name in self.running and not self.over:
                self._warn(f"{self._who(name)} is fenced: {reason}")
                self._say_verdict()
                self.running[name].send(signal.SIGKILL, as_end=self._ending)
            case Divergence(_, (), sentence):
                self.fault = VerificationFailed(sentence)
                self._send_all(signal.SIGKILL)  # nobody may save
            case Slow(name) if name in self.running and name in self.members:
                self._warn(event.sentence(self._rank_of(name)))
            case Preemption(sentence) if not self.over and not self._ending:
                self.preempted = True
                self._warn(f"{sentence}: its replicas hand over and leave")
                for replica in self.running.values():
                    replica.send(signal.SIGTERM)
            case Silence(silent_s):
                self._say_silence(silent_s)
            case EnvironmentFault():
                self.coordinated = False
                self._warn(f"the coordinator has ended, and training goes on until a replica is lost: {event}")
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
        own = {record.pid for record in records if not record.secondary}
        if any(end.code == 0 for end in self.exits) and not own:
            return ExitCode(0)
        if self.over and self.stop_signal is None and not kept:  # all here stood by
            return ExitCode(0)
        if self._requests > 1 and self.stop_signal is not None:
            sentence = f"{self.stop_signal.name}: stopped at once{self._resumes}"
            say(sentence)
            return ExitCode(128 + self.stop_signal, sentence=sentence)
        if self.stop_signal is not None and any(end.code == Stopped.exit_code for end in kept):
            kept = [end for end in kept if not end.failed or end.pid in own]  # only the stop left the lost unreplaced
        ends = root_cause(records, kept)
        if ends:
            tails = {p.rank: p.log_tail() for p in self.processes if p.pid == ends[0].exit.pid}
            most = self.config.max * self.starter.ranks
            say(failure_report(ends, kept, world_size=most, stopped={}, log_tails=tails))
            return ExitCode(exit_code(kept, ends), rank=ends[0].exit.rank, sentence=ends[0].sentence)
        sentence = f"stopped{self._resumes}"
        if self.stop_signal is None:
            sentence = f"all replicas were asked to leave{self._resumes}"
        say(sentence)
        return ExitCode(Stopped.exit_code, sentence=sentence)

    def goes_on_elsewhere(self, code: int) -> bool:
        """Whether members of the newest generation are left on other hosts, none of which meets the same failure."""
        if not self.starter.several_hosts or code in FOR_GOOD:
            return False
        try:
            view = view_of(self.address)
        except EnvironmentFault:
            return False
        return any(name not in view.fenced and name not in self.names for name in view.members)

    def _next_event(self) -> Event | None:
        """Waits for it, and looks meanwhile for replicas that are stopped; None at the deadline."""
        while True:
            now_s = time.monotonic()
            if now_s >= self._look_s:
                self._end_stopped(now_s)
                self._end_late(now_s)
                self._look_s = now_s + LOOK_S
            until_s = self._look_s if self.deadline_s is None else min(self._look_s, self.deadline_s)
            try:
                return self.events.get(timeout=max(0.0, until_s - now_s))
            except queue.Empty:
                if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                    return None

    def _end_stopped(self, now_s: float) -> None:
        """Ends replicas of which a rank has been stopped for long. The coordinator fences those first that have joined,
        whose heartbeats it misses; one that was stopped while it started is known to nobody else.
        """
        for replica in self.running.values():
            stopped = [process.pid for process in replica.ranks if process.is_stopped()]
            for pid in {process.pid for process in replica.ranks} - set(stopped):
                self._stopped_since_s.pop(pid, None)
            for pid in stopped:
                since_s = self._stopped_since_s.setdefault(pid, now_s)
                if now_s - since_s >= 2 * self.config.silence_s:
                    del self._stopped_since_s[pid]
                    self._warn(
                        f"{self._who(replica.name, pid)} has been stopped for {now_s - since_s:.0f} s: it is ended"
                    )
                    replica.send(signal.SIGKILL, as_end=self._ending or self.over)

    def _end_late(self, now_s: float) -> None:
        """Ends replicas with a rank that is not ready to join in time: first it prints where it is."""
        if self.start_s is None:
            return
        for replica in self.running.values():
            over_s = now_s - replica.started_s - self.start_s
            if over_s < 0:
                continue
            if not replica.late:
                late = [each for each in replica.ranks if not has_arrived(self.folder, each, replica=replica.name)]
                replica.late = {process.rank for process in late}
                for process in late:
                    process.send(signal.SIGABRT)
            elif over_s >= DUMP_S:
                replica.send(signal.SIGKILL, as_end=self._ending or self.over)

    def _rank_of(self, member: str) -> str:
        return ranks_of(self.members.index(member), self.starter.ranks)

    def _who(self, name: str, pid: int | None = None) -> str:
        """Its ranks, as the live line names them, if it is a member; and what its log and `ps` call it."""
        found = [self._rank_of(name)] if name in self.members else []
        return ", ".join([*found, name]) + ("" if pid is None else f" (pid {pid})")

    def _warn(self, sentence: str) -> None:
        say(sentence)
        self.warn(sentence)

    def _say_verdict(self) -> None:
        """Why ranks waited, where their watches have found it since this was said last."""
        verdict = read_verdict(self.directory, since_s=self.verdict_since_s)
        if verdict is not None:
            self.verdict_since_s = time.time()
            self._warn(f"why it hung: {verdict.sentence}")

    def _announce_end(self, process: RankProcess) -> None:
        process.wait()
        self.events.put(process)

    def _rank_ended(self, process: RankProcess) -> None:
        replica = next(replica for replica in self.running.values() if process in replica.ranks)
        replica.ended(process)
        if process.rank in replica.late and self.start_s is not None:
            stopped = process.pid in self._stopped_since_s
            write_failure(failure_of_late(process, start_s=self.start_s, stopped=stopped), self.folder)
        code = replica.end.code
        if code == 0 and self.steps is None:
            self._finished()
        elif code == 0 and not self.over:  # no coordinator has said so: it is gone, and who stands by would wait for it
            self.over = True
            self._send_all(signal.SIGINT)
        if (self.over and code == 0 and self.steps is not None) or (
            self.stop_signal is not None and code == Stopped.exit_code
        ):
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
    def _resumes(self) -> str:
        """What the user can count on; a script keeps what it keeps."""
        return "" if self.steps is None else "; the same command resumes from the newest checkpoint"

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
        who = self._who(replica.name, end.pid)
        if self.coordinated and self.replaced[slot] < self.config.retries:
            self.replaced[slot] += 1
            self._warn(f"{who} ended: {said}; another takes its place")
            for process in replica.ranks:
                (self.folder / f"rank-{process.rank}.json").unlink(missing_ok=True)
            self.start(slot)
            return
        why = f"it was replaced {self.replaced[slot]} times without a step since"
        if not self.coordinated:
            why = "without the coordinator none can join in its place"
        self._warn(f"{who} ended: {said}; {why}")
        several = self.starter.several_hosts
        if len(self.running) < (1 if several else self.config.min) or not (self.coordinated or several):
            self.exits += replica.exits
            here = " here" if several else f" of at least {self.config.min}"
            self.fault = EnvironmentFault(
                f"{len(self.running)}{here} replicas are left: the last one was not replaced, because {why}; see what "
                f"they said in logs/{self._resumes}"
            )
            self.deadline_s = time.monotonic() + LAST_S
            self._send_all(signal.SIGINT)  # those that are left save the state that they hold

    def _signalled(self, number: signal.Signals) -> None:
        self._requests += 1
        first, self.stop_signal = self.stop_signal is None, number
        self._send_all(signal.SIGINT if first else signal.SIGKILL)
        if first:
            what = "the script is told" if self.steps is None else "finishing the step and saving"
            say(f"{number.name}: {what}; a second one stops at once")

    def _say_silence(self, silent_s: float) -> None:
        where = f"the coordinator at {self.address.host}:{self.address.port}"
        if silent_s:
            self._warn(
                f"{where} has not answered for {silent_s:.0f} s: the replicas here go on while all members reach each "
                "other, and else wait; check that it runs, and the network to it"
            )
        else:
            say(f"{where} answers again")

    def _send_all(self, number: signal.Signals) -> None:
        """To all, as the run ends. A replacement that is not ready holds nothing that could be saved, and where the
        signal meets an interpreter that starts, its end looks like a failure: it gets SIGKILL.
        """
        for replica in self.running.values():
            ready = all(has_arrived(self.folder, process, replica=replica.name) for process in replica.ranks)
            starts = bool(self.members) and replica.name not in self.members and not ready
            replica.send(signal.SIGKILL if starts else number, as_end=True)

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
