"""A rank is cut off the run's store, or killed, at any moment: every other rank ends, and says why."""

from __future__ import annotations

import ast
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shoal
from shoal.comm.board import Board
from shoal.errors import CollectiveError
from shoal.launcher.environment import Place
from shoal.launcher.rendezvous import Rendezvous
from tests.assembly.store_relay import Relay
from tests.assembly.training_ranks import trained
from tests.ranks import TestPlace
from tests.verification.layouts import corpus
from tests.waiting import HANG_S

TIMEOUT_S, ENDS_WITHIN_S = 2.0, 0.75 * HANG_S
GONE_WITHIN_S = 2 * TIMEOUT_S + 5
"""The promise: how long after a rank is cut off or killed the others may be there."""
WHOLE = 10**9


def tables(timeout_s: float, **more: dict[str, Any]) -> dict[str, Any]:
    return {
        "layout": {"replicate": 2},
        "wire": {"timeout_s": timeout_s, "check_collectives": False},
        "run": {"start_timeout_s": timeout_s},
        "checkpoint": {"every_steps": 2},
    } | more


ZERO_1 = {"memory": {"zero": 1}, "layout": {"shard": 2}}
"""The optimizer's state is split, so that ranks exchange inventories before a save."""


@dataclass(frozen=True)
class Ended:
    """How a rank's run ended: what was raised, when (on the clock of all processes), how many messages it had sent to
    the store, and when those were cut.
    """

    said: str
    ended_s: float
    messages: int
    cut_s: float


def cut_off(
    place: TestPlace, tables: dict[str, Any], folder: str, name: str, messages: int, killed: bool = False
) -> Ended:
    """Trains; rank 1 reaches the store through a relay that passes `messages` on, and then kills it, if it is to.

    A rank that does not end is one that waits without a bound. `name` is used once.
    """
    server = place.store.underlying_store  # pyright: ignore[reportAttributeAccessIssue] missing in torch's stubs
    on_cut = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if killed else None
    cut_file = Path(folder) / "cut_s"
    relay = Relay(server.port, messages, cut_file, on_cut) if place.rank == 1 else None
    inner = server if relay is None else dist.TCPStore("127.0.0.1", relay.port, is_master=False)
    outcome: list[Ended] = []

    def work() -> None:
        here = TestPlace(place.rank, place.size, dist.PrefixStore(name, inner))
        said = ""
        try:
            trained(here, tables, folder, 4)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        cut_s = float(cut_file.read_text()) if cut_file.exists() else math.inf
        outcome.append(Ended(said, time.monotonic(), 0 if relay is None else relay.passed, cut_s))

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(ENDS_WITHIN_S)
    if worker.is_alive():
        where = "".join(traceback.format_stack(sys._current_frames()[worker.ident or 0])[-6:])
        raise AssertionError(f"rank {place.rank} does not end:\n{where}")
    return outcome[0]


def messages_of_a_run(ranks, folder: Path, **more: dict[str, Any]) -> int:
    """What rank 1 sends to the store from its start to its end."""
    folder.mkdir()
    corpus(folder)
    first, second = ranks(2, cut_off, tables(HANG_S, **more), str(folder), f"{folder}/whole", WHOLE)
    assert first.said == second.said == ""
    return second.messages


SAYS_WHY = ("CollectiveError: ", "EnvironmentFault: ")


def _require_gone(ranks, folder: Path, messages: int, *, killed: bool = False, **more: dict[str, Any]) -> float:
    """Cuts or kills rank 1. Both ranks end, or the one that is left; the seconds that took."""
    folder.mkdir()
    corpus(folder)
    arguments = (2, cut_off, tables(TIMEOUT_S, **more), str(folder), f"{folder}/{messages}", messages, killed)
    if killed:
        (worked, first), _ = ranks.outcomes(*arguments, lost=[1])
        assert worked, first
        found: list[Ended] = [first]
    else:
        found = ranks(*arguments)
    for rank, ended in enumerate(found):
        assert ended.said == "" or ended.said.startswith(SAYS_WHY), f"rank {rank}: {ended.said}"
    return max(ended.ended_s - ended.cut_s for ended in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "killed"),
    [
        (0.4, False),
        pytest.param(0.1, False, marks=pytest.mark.stress),
        pytest.param(0.8, False, marks=pytest.mark.stress),
        (0.97, True),
    ],
)
def test_a_cut_or_a_kill_while_a_run_starts_trains_or_saves_ends_it(ranks, tmp_path: Path, share, killed) -> None:
    """At moments of a short run, the last of them in the last save. Who is left ends, and says that a rank is gone."""
    messages = int(share * messages_of_a_run(ranks, tmp_path / "whole"))
    _require_gone(ranks, tmp_path / "lost", messages, killed=killed)


@pytest.mark.stress
@pytest.mark.parametrize("killed", [False, True], ids=["cut", "killed"])
@pytest.mark.parametrize("more", [{}, ZERO_1], ids=["replicated", "split"])
def test_at_every_message_to_the_store_the_run_ends_within_its_bound(ranks, tmp_path: Path, killed, more) -> None:
    """From the first message to the last, without a launcher: `GONE_WITHIN_S` after a rank is lost nobody waits."""
    took_s: dict[int, float] = {}
    for messages in range(1, messages_of_a_run(ranks, tmp_path / "whole", **more)):
        took_s[messages] = _require_gone(ranks, tmp_path / str(messages), messages, killed=killed, **more)
    worst = max(took_s, key=took_s.__getitem__)
    print(f"{len(took_s)} messages; the slowest end after message {worst}: {took_s[worst]:.1f} s")
    assert took_s[worst] <= GONE_WITHIN_S


STORE_CALLS = {"add", "append", "barrier", "check", "compare_set", "delete_key", "get", "list_keys", "multi_get",
               "multi_set", "num_keys", "queue_pop", "queue_push", "set", "wait"}  # fmt: skip
BOUNDED = {
    "shoal/comm/board.py",
    "shoal/comm/clock.py",
    "shoal/launcher/rendezvous.py",
    "shoal/elastic/rendezvous.py",
    "shoal/bench/groups.py",
}
"""Where each call of a store runs in a thread that nobody waits for without a bound, or asks for what is there."""


@pytest.mark.slow
def test_only_bounded_modules_call_a_store() -> None:
    """A store's own timeout does not bound its calls (see `shoal.comm.board`), so that everything else asks a `Board`
    or a `Rendezvous`.
    """
    source, found = Path(shoal.__file__).parent, set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STORE_CALLS:
                owner = ast.unparse(node.func.value)
                if owner.rpartition(".")[2].lstrip("_") == "store":
                    found.add(str(path.relative_to(source.parent)))
    assert found == BOUNDED


class Silent(dist.Store):
    """A store of which call number `silent` and all after it never return."""

    def __init__(self, silent: int) -> None:
        super().__init__()
        self.calls, self.silent, self.values = 0, silent, dict[str, bytes]()

    def _count(self) -> None:
        self.calls += 1
        if self.calls >= self.silent:
            threading.Event().wait()

    def set(self, key: str, value: Any) -> None:
        self._count()
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self._count()
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._count()
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self._count()
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._count()

    def delete_key(self, key: str) -> bool:
        self._count()
        return self.values.pop(key, None) is not None


ALONE = Place(0, 1, 0, 1, 0, "shoal")
PATIENCE_S = 1.0
USES: dict[str, Callable[[Any, float], object]] = {
    "publish": lambda store, s: Board(store, timeout_s=s).publish("key", "value"),
    "collect": lambda store, s: Board(store, timeout_s=s).collect(["known"]),
    "forget": lambda store, s: Board(store, timeout_s=s).forget(["known"]),
    "all_gather": lambda store, s: Board(store, timeout_s=s).all_gather("key", "text", rank=0, ranks=[0]),
    "board's announce": lambda store, s: Board(store, timeout_s=s).announce("key", lambda: "text", rank=0),
    "announce": lambda store, s: Rendezvous(store, ALONE, timeout_s=s).announce("key", lambda: "text"),
    "barrier": lambda store, s: Rendezvous(store, ALONE, timeout_s=s).barrier("name"),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_store_that_falls_silent_at_any_call_is_given_up(use: str) -> None:
    """At the first call of every method, its second, and so on."""
    whole = Silent(WHOLE)
    whole.values["known"] = b"1\nvalue"
    USES[use](whole, HANG_S)
    assert 0 < whole.calls < 50
    said: dict[int, str] = {}

    def work(silent: int) -> None:
        store = Silent(silent)
        store.values["known"] = b"1\nvalue"
        try:
            USES[use](store, PATIENCE_S)
            said[silent] = ""
        except CollectiveError as error:
            said[silent] = str(error)

    workers = [threading.Thread(target=work, args=(1 + number,), daemon=True) for number in range(whole.calls)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(HANG_S)
    assert sorted(said) == list(range(1, whole.calls + 1)), f"a call of {use} waits without a bound"
    assert all(said.values()), said
