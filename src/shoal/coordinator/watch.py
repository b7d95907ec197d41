"""What a launcher hears from a coordinator that runs in another process, or on another host.

It asks for the view of the membership again and again, and says what is new as the decisions that it follows from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.coordinator.client import Address, Connection
from shoal.errors import EnvironmentFault
from shoal.resilience.detection import Divergence, Slow
from shoal.resilience.events import Committed, Decision, Fenced, Formed, Look, View

POLL_S = 0.3


@dataclass(frozen=True)
class Silence:
    """The coordinator has not answered for `silent_s`; 0: it answers again."""

    silent_s: float


News = Decision | Divergence | Slow | Silence | EnvironmentFault


def view_of(address: Address) -> View:
    """The newest generation. Raises `EnvironmentFault` where the coordinator does not answer, or refuses this host."""
    try:
        connection = Connection(address)
        try:
            answer = connection.ask(Look())
        finally:
            connection.close()
    except OSError as error:
        raise EnvironmentFault(
            f"the coordinator at {address.host}:{address.port} does not answer as one ({error}): is it running, and "
            "does it ask for TLS (--authorities PEM)?"
        ) from error
    assert isinstance(answer, View)
    return answer


@contextmanager
def watching(
    address: Address,
    replicas: Callable[[], Iterable[str]],
    *,
    since: View,
    told: Callable[[News], None],
    silence_s: float,
) -> Iterator[None]:
    """Watches until the end of the block. `replicas` are those whose fencing is asked for; `told` hears what is new
    `since` this view, in the watcher's thread: also that the coordinator is silent for `silence_s`, and that it refuses
    this host.
    """
    watcher = _Watcher(address, replicas, since, told, silence_s)
    thread = threading.Thread(target=watcher.run, name="shoal-coordinator-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watcher.over.set()
        thread.join()


class _Watcher:
    def __init__(
        self,
        address: Address,
        replicas: Callable[[], Iterable[str]],
        since: View,
        told: Callable[[News], None],
        silence_s: float,
    ) -> None:
        self._address, self._replicas, self._told, self._silence_s = address, replicas, told, silence_s
        self.over = threading.Event()
        self._generation, self._committed = since.generation, since.committed
        self._fenced = set(since.fenced)
        self._disagreement, self._slow = since.disagreement, set(since.slow)
        self._heard_s, self._silent = time.monotonic(), False

    def run(self) -> None:
        while not self.over.is_set():
            try:
                connection = Connection(self._address)
                try:
                    while not self.over.is_set():
                        self._hear(connection.ask(Look(tuple(self._replicas())[:100])))
                        self.over.wait(POLL_S)
                finally:
                    connection.close()
            except EnvironmentFault as error:
                self._told(error)
                return
            except OSError:
                self._wait()

    def _wait(self) -> None:
        silent_s = time.monotonic() - self._heard_s
        if not self._silent and silent_s > self._silence_s:
            self._silent = True
            self._told(Silence(silent_s))
        self.over.wait(POLL_S)

    def _hear(self, view: object) -> None:
        assert isinstance(view, View)
        self._heard_s = time.monotonic()
        if self._silent:
            self._silent = False
            self._told(Silence(0.0))
        if view.generation > self._generation:
            self._generation, self._committed = view.generation, 0
            self._told(Formed(view.generation, view.members, view.holders, view.step, view.position))
        if view.committed > max(self._committed, view.step):  # the step that it began with is no step of its own
            self._committed = view.committed
            self._told(Committed(view.generation, view.committed, 0, 0))
        for name in sorted(set(view.fenced) - self._fenced):
            self._fenced.add(name)
            self._told(Fenced(name, view.fenced[name]))
        for name in sorted(set(view.slow) - self._slow):
            self._told(Slow(name, view.slow[name]))
        self._slow |= set(view.slow)
        if view.disagreement and view.disagreement != self._disagreement:
            self._disagreement = view.disagreement
            self._told(Divergence(view.committed, (), view.disagreement))
