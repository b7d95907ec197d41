"""A rank's side: one thread that keeps a connection, sends heartbeats, and says what the coordinator has not confirmed.

The trainer's thread only reads and changes the `Participant`, under a lock; it never waits for the network, but in
`generation`, between two of them. Where the coordinator does not answer, nothing stops: reports wait until it is back,
and the present generation goes on.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from shoal.errors import EnvironmentFault, Stopped
from shoal.launcher import frames, handshake
from shoal.resilience.detection import Activity
from shoal.resilience.events import Answer, Event, Heartbeat, Leave, Look, View
from shoal.resilience.participant import FencedOut, Participant, StateFrom

HEARTBEAT_S = 0.5
FIRST_LOOK_S = 0.02
"""How soon a rank that waits for a generation asks again; each further time after twice as long, up to a heartbeat."""
RETRY_S = 0.2
ANSWER_S = 10.0
MOST_ANSWER_BYTES = 8 << 20
ANSWERS = msgspec.msgpack.Decoder(Answer)
STOP_POLL_S = 0.5
STOPPED_WAITING = "stopped while it waited for other replicas; the next start resumes from the newest checkpoint"


@dataclass(frozen=True)
class Address:
    """Where the coordinator listens, and what proves who is there. `certificates`: a file of the authorities that are
    trusted; without one the connection is plain, and the host must be this one."""

    host: str
    port: int
    token: bytes = field(repr=False)
    certificates: str | None = None


class Connection:
    """Asks one event at a time. Raises `OSError` and `EnvironmentFault` where the coordinator does not answer."""

    def __init__(self, address: Address) -> None:
        plain = socket.create_connection((address.host, address.port), ANSWER_S)
        plain.settimeout(ANSWER_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket = plain
            if address.certificates is not None:
                context = ssl.create_default_context(cafile=address.certificates)
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                self._socket = context.wrap_socket(plain, server_hostname=address.host)
            handshake.shake_hands(self._socket, address.token, which="use the token file of the job that it serves")
        except BaseException:
            plain.close()
            raise

    def ask(self, event: Event) -> Answer:
        """The coordinator's answer."""
        self._socket.sendall(frames.encode(event))
        return frames.decode(frames.receive(self._socket, most_bytes=MOST_ANSWER_BYTES), ANSWERS)

    def close(self) -> None:
        """Ends it; a thread that waits for an answer gets an `OSError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class NoGeneration(EnvironmentFault):
    """No generation was formed in time: too few replicas, or no coordinator. A replica that starts again waits for as
    long, and in vain."""


@dataclass(frozen=True)
class Begin:
    """A generation that this replica has entered, and where its state comes from."""

    view: View
    state_from: StateFrom


class Client:
    """One rank's client. Rank 0 of a replica speaks for it; the other ranks send their heartbeats, and follow.

    `on_ending` is called in the client's thread when the generation is over or about to be, and `on_lost` when members
    of it were fenced, with their names: they wake those who wait for them, and wait for nothing. `store_address`
    ("host:port") is where a generation meets whose first member this replica is. Use it as a context manager.
    """

    def __init__(
        self,
        address: Address,
        replica: str,
        *,
        ranks: int = 1,
        rank: int = 0,
        store_address: str = "",
        heartbeat_s: float = HEARTBEAT_S,
        on_ending: Callable[[], None] | None = None,
        on_lost: Callable[[frozenset[str]], None] | None = None,
    ) -> None:
        self._address, self._rank, self._heartbeat_s = address, rank, heartbeat_s
        self._on_ending, self._on_lost = on_ending, on_lost
        self._lost: frozenset[str] = frozenset()
        self._part = Participant(replica, ranks, store_address)
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._progress, self._leaving, self._closed, self._ending_told = 0, False, False, 0
        self._activity: Callable[[], Activity] | None = None
        self._calls = 0
        self._error: EnvironmentFault | None = None
        self._last_answer_s = time.monotonic()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-coordinator-client", daemon=True)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._wake.set()
        if self._connection is not None:
            self._connection.close()
        self._thread.join(ANSWER_S)

    @property
    def ending(self) -> bool:
        """Whether the present generation is over or about to be: then `accept`, at the end of a step."""
        return self._part.ending

    @property
    def lost(self) -> frozenset[str]:
        """Members of the present generation that were fenced: it takes no step any more."""
        return self._lost

    @property
    def is_member(self) -> bool:
        """Whether this replica is in the newest generation that it has heard of: nobody then has a newer state."""
        view = self._part.view
        return view is not None and self._part.replica in view.members

    @property
    def silent_s(self) -> float:
        """Seconds since the coordinator's last answer."""
        return time.monotonic() - self._last_answer_s

    @contextlib.contextmanager
    def telling(self, activity: Callable[[], Activity]) -> Iterator[None]:
        """In the block, heartbeats say what this rank does, as `activity` finds it, in the client's thread: a rank that
        keeps others waiting for too long is taken to hang.
        """
        self._activity = activity
        try:
            yield
        finally:
            self._activity = None

    def applied(self, *, stop: int, fingerprint: int = 0, sample_s: float = 0.0) -> None:
        """The next step was applied, on the positions up to `stop`. Does not wait. Raises `FencedOut`."""
        with self._changed:
            self._part.applied(stop=stop, fingerprint=fingerprint, sample_s=sample_s)
            self._progress += 1
        self._wake.set()

    def failed(self, suspects: Sequence[str] = ()) -> None:
        """A collective failed: a new generation is needed. `suspects` are the members that cannot be reached."""
        with self._changed:
            self._part.failed(suspects)
        self._wake.set()

    def dropped(self) -> None:
        """This replica's state is lost: it is no holder of the next generation."""
        with self._changed:
            self._part.dropped()

    def accept(self) -> None:
        """Leaves the present generation: no step of it is applied any more."""
        with self._changed:
            self._part.accept()
        self._wake.set()

    def generation(self, timeout_s: float, *, stopping: Callable[[], bool] = lambda: False) -> Begin:
        """Waits for the next generation with this replica, accepting what is proposed, and enters it. A spare waits
        for as long as the coordinator says that the others train.

        Raises `FencedOut`, `TokenRefused`, `NoGeneration` when there is none in `timeout_s`, and `Stopped` when
        `stopping` says that nobody wants one any more.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._part.may_enter:
                self._require_well()
                if self._part.promised < self._part.heard.number:
                    self._part.accept()
                    self._wake.set()
                if self._part.stands_by:
                    deadline_s = max(deadline_s, self._last_answer_s + timeout_s)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise NoGeneration(self._why_none(timeout_s))
                if stopping():
                    raise Stopped(STOPPED_WAITING)
                self._changed.wait(min(left_s, STOP_POLL_S))
            state_from = self._part.enter()
            self._lost = frozenset()
            view = self._part.view
            assert view is not None
            return Begin(view, state_from)

    def follow(self, view: View) -> None:
        """Enters the generation that rank 0 of this replica has entered; for its other ranks."""
        with self._changed:
            self._part.follow(view)
            self._lost = frozenset()

    def require_well(self) -> None:
        """Raises `FencedOut` and `TokenRefused` where the run goes on without this replica."""
        with self._changed:
            self._require_well()

    def ready(self, *, step: int, position: int) -> None:
        """The state after `step` was copied or loaded."""
        with self._changed:
            self._part.ready(step=step, position=position)
        self._wake.set()

    def leave(self) -> None:
        """Asks to go after the present step; go on until `FencedOut` says that the state was handed over. The next
        heartbeat says it. Takes no lock: a signal's handler may interrupt who holds one.
        """
        self._leaving = True

    def _why_none(self, timeout_s: float) -> str:
        head = f"replica {self._part.replica} waited {timeout_s:g} s for a generation"
        if self.silent_s > self._heartbeat_s + ANSWER_S or not self._part.admitted:
            return f"{head}, and the coordinator at {self._address.host}:{self._address.port} does not answer: start it"
        return f"{head}: fewer replicas than the minimum are there, or one does not answer; start more, or wait longer"

    def _require_well(self) -> None:
        if self._error is not None:
            raise self._error
        if self._part.fenced:
            raise FencedOut(f"{self._part.fenced}: drop the state, and join again under a new name")

    def _run(self) -> None:
        while not self._closed and not self._part.fenced:
            try:
                self._connection = Connection(self._address)
                self._talk(self._connection)
            except (OSError, EnvironmentFault) as error:
                if isinstance(error, handshake.TokenRefused):
                    with self._changed:
                        self._error = error
                        self._changed.notify_all()
                    return
                if not self._closed:
                    self._wake.wait(RETRY_S)
                    self._wake.clear()
            finally:
                if self._connection is not None:
                    self._connection.close()

    def _talk(self, connection: Connection) -> None:
        look_s = FIRST_LOOK_S
        while not self._closed:
            for event in self._to_say():
                self._hear(connection.ask(event))
            if self._behind():
                self._hear(connection.ask(Look()))
            if self._part.ending and not self._part.fenced:
                self._find_lost(connection)
            if self._part.fenced:
                if self._part.view is not None:
                    self._tell_lost(self._part.view.generation, frozenset(self._part.view.members))
                return
            waits = self._part.promised > self._part.generation and not self._part.stands_by
            self._wake.wait(min(look_s, self._heartbeat_s) if waits else self._heartbeat_s)
            self._wake.clear()
            look_s = 2 * look_s if waits else FIRST_LOOK_S

    def _find_lost(self, connection: Connection) -> None:
        """Whether the generation ends because members are lost: then nobody may wait for them."""
        with self._changed:
            view = self._part.view
        if view is not None and view.generation == self._part.generation:
            answer = connection.ask(Look())
            if isinstance(answer, View) and answer.generation == view.generation:
                self._tell_lost(view.generation, frozenset(answer.fenced))

    def _tell_lost(self, generation: int, names: frozenset[str]) -> None:
        """`names` are lost members of `generation`: nothing to do where this rank is in a newer one by now."""
        with self._changed:
            if generation != self._part.generation or not names - self._lost:
                return
            self._lost = names
        if self._on_lost is not None:
            self._on_lost(names)

    def _to_say(self) -> list[Event]:
        with self._changed:
            part = self._part
            said: list[Event] = [*part.unsent()] if self._rank == 0 else []
            if part.admitted or self._rank:
                said.append(self._heartbeat())
            if self._leaving and part.admitted and self._rank == 0:
                said.append(Leave(part.replica))
            return said

    def _heartbeat(self) -> Heartbeat:
        activity = self._activity
        calls, doing = (self._calls, "") if activity is None else activity()
        if calls != self._calls:
            self._calls = calls
            self._progress += 1
        return Heartbeat(self._part.replica, self._rank, self._progress, doing)

    def _behind(self) -> bool:
        heard, view = self._part.heard, self._part.view
        return heard.generation > (view.generation if view else 0)

    def _hear(self, answer: Answer) -> None:
        self._last_answer_s = time.monotonic()
        with self._changed:
            self._part.hear(answer)
            over = self._part.ending and self._part.generation > self._ending_told
            if over:
                self._ending_told = self._part.generation
            self._changed.notify_all()
        if over and self._on_ending is not None:
            self._on_ending()
