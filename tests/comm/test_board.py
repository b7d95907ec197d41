"""Messages beside the collectives: they arrive whole, missing ranks are named, and every wait ends."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.comm.board import PART_BYTES, Board
from shoal.comm.checking import WaitGraph
from shoal.comm.config import WireConfig
from shoal.comm.diagnosis import Diagnosis
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.errors import CollectiveError, EnvironmentFault
from shoal.launcher import sockets
from shoal.launcher.environment import Place
from shoal.launcher.rendezvous import open_store
from tests.waiting import HANG_S

LIMIT_S = 0.3  # of the boards whose store is cut


@pytest.fixture(scope="module")
def store():
    """A store on loopback."""
    listener = sockets.listen_on_loopback()
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    environ |= {"SHOAL_STORE_FD": str(listener.detach()), "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    return open_store(Place(0, 1, 0, 1, 0, "torchrun"), environ, timeout_s=HANG_S)


@pytest.fixture
def board(store) -> Board:
    return Board(store, timeout_s=HANG_S)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 5])
def test_values_of_any_size_arrive_whole(board: Board, size: int) -> None:
    """Empty values, and values beyond what the store takes at once, are what they were."""
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    board.publish(f"size/{size}", value)
    assert board.collect([f"size/{size}"]) == [value]


def test_values_come_in_the_order_of_their_keys(board: Board) -> None:
    """The order asked for, not that of publication; keys below a prefix are other keys."""
    for key in ("c", "a", "b"):
        board.publish(key, key)
        board.under("below").publish(key, key * 2)
    assert board.collect(["a", "b", "c"]) == [b"a", b"b", b"c"]
    assert board.under("below").collect(["a", "b"]) == [b"aa", b"bb"]


def test_what_is_missing_is_named(board: Board) -> None:
    """After the timeout the error lists the keys that nobody published, and no other."""
    board.publish("there", b"")
    with pytest.raises(CollectiveError, match=r"under absent \(1 of 2 keys\)"):
        board.collect(["there", "absent"], 0.2)
    assert board.collect_some(["there", "absent"], 0.0) == {"there": b""}


def test_ranks_that_do_not_come_are_named(board: Board) -> None:
    """By their numbers in the world, not by their places in the group; at most eight of them."""
    patient = Board(board.store, timeout_s=0.2)
    with pytest.raises(CollectiveError, match=r"rank 6 waited 0\.2 s for rank 4, rank 9 to open a group of 3 ranks"):
        patient.all_gather("few", "here", rank=1, ranks=(4, 6, 9))
    with pytest.raises(CollectiveError, match=r"rank 8 and 91 more to open"):
        patient.all_gather("many", "here", rank=0, ranks=range(100))


def test_ranks_gather_what_all_pass(board: Board) -> None:
    """In the group's order, on every rank; what rank 0 announces is found once."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        mine, finds = board.clone(), []
        texts = mine.all_gather("texts", f"text {rank}", rank=rank, ranks=range(3))
        word = mine.announce("word", lambda: finds.append(rank) or "found", rank=rank)
        found[rank] = texts, word, finds

    _together(lambda: run(2), lambda: run(0), lambda: run(1))
    texts = ("text 0", "text 1", "text 2")
    assert found == {rank: (texts, "found", [0] if rank == 0 else []) for rank in range(3)}


def test_a_waiting_thread_does_not_hold_the_main_thread(board: Board) -> None:
    """While a clone waits for a message, calls on the board go through."""
    got: list[bytes] = []
    waits = threading.Event()
    waiting = board.clone()

    def wait() -> None:
        waits.set()
        got.extend(waiting.collect(["late"], HANG_S))

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    board.publish("main", "thread")
    assert board.collect(["main"]) == [b"thread"]
    assert got == []
    board.publish("late", b"now")
    thread.join(HANG_S)
    assert got == [b"now"]


@pytest.mark.parametrize("size", [0, 1, PART_BYTES + 1])
def test_what_is_forgotten_is_gone_in_all_its_parts(board: Board, size: int) -> None:
    """The store holds as many keys as before; forgetting what was never there is no error."""
    before = board.store.num_keys()
    board.publish("gone", bytes(size))
    board.forget(["gone", "never"])
    assert board.store.num_keys() == before
    with pytest.raises(CollectiveError, match="under gone"):
        board.collect(["gone"], 0.1)


def test_a_store_that_is_gone_is_named() -> None:
    """Its host has ended: one sentence, not an error of the socket."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(dist.TCPStore("127.0.0.1", server.port, is_master=False), timeout_s=HANG_S)
    board.publish("a", b"")
    del server
    with pytest.raises(CollectiveError, match="the run's store is gone"):
        board.collect(["a"])


class CutStore(dist.Store):
    """A store that answers `calls` times, and then no more: the network to it is cut."""

    def __init__(self, inner: dist.Store, calls: float, mended: threading.Event) -> None:
        super().__init__()
        self.inner, self.left, self.made, self.mended = inner, calls, 0, mended

    def _answer(self, call: Callable[[], Any]) -> Any:
        self.made += 1
        if self.made > self.left:
            self.mended.wait()
            raise dist.DistNetworkError("cut")
        return call()

    def set(self, key: str, value: bytes) -> None:
        self._answer(lambda: self.inner.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._answer(lambda: self.inner.get(key))

    def add(self, key: str, number: int) -> int:
        return self._answer(lambda: self.inner.add(key, number))

    def check(self, keys: list[str]) -> bool:
        return self._answer(lambda: self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=HANG_S)) -> None:
        self._answer(lambda: self.inner.wait(keys, timeout))

    def delete_key(self, key: str) -> bool:
        return self._answer(lambda: self.inner.delete_key(key))


def _together(*calls: Callable[[], object]) -> list[int]:
    """Runs all at once; which of them have not ended after `HANG_S`."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    return [index for index, thread in enumerate(threads) if thread.is_alive()]


def _opens_a_group(rank: int, store: dist.Store, limit_s: float, size: int = 2) -> str:
    """Two ranks open a group, make a call and differ in the next one."""
    waits = WaitGraph(Board(store, timeout_s=limit_s), rank)
    waits.enter("t", range(size))
    try:
        group = connect(
            store, rank, size, device=torch.device("cpu"), label="t", ledger=Ledger(),
            wire=WireConfig(timeout_s=limit_s, transport="gloo", check_collectives=True), waits=waits,
        )  # fmt: skip
        group.all_reduce(torch.ones(3)).wait()
        group.all_reduce(torch.ones(3 + rank)).wait()
    except (CollectiveError, EnvironmentFault) as error:
        return str(error)
    return "no error"


def _says_everything(rank: int, store: dist.Store, limit_s: float) -> str:
    """Every method of a board, and the diagnosis of a failure."""
    board = Board(store, timeout_s=limit_s)
    try:
        board.all_gather("texts", "text", rank=rank, ranks=range(2))
        board.announce("word", lambda: "found", rank=rank)
        board.publish(f"mine/{rank}", b"x")
        board.collect([f"mine/{rank}"])
        board.collect_some(["absent"], min(limit_s, LIMIT_S))
        board.forget([f"mine/{rank}"])
        return Diagnosis(board, rank, ("zero", "one"), patience_s=limit_s).sentence("it", 0.0, "no reason")
    except CollectiveError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("program", [_opens_a_group, _says_everything])
def test_a_cut_at_any_call_of_the_store_ends_every_wait(program: Callable[[int, dist.Store, float], str]) -> None:
    """Rank 1 loses the store before its first call, its second, ...: both ranks end, with a sentence."""
    mended, whole = threading.Event(), CutStore(dist.HashStore(), float("inf"), threading.Event())
    assert _together(lambda: program(0, whole.inner, HANG_S), lambda: program(1, whole, HANG_S)) == []
    stores = [CutStore(dist.HashStore(), calls, mended) for calls in range(whole.made)]
    ended: dict[tuple[int, int], str] = {}

    def run(number: int, rank: int) -> None:
        store = stores[number]
        ended[number, rank] = program(rank, store if rank == 1 else store.inner, LIMIT_S)

    cases = [(number, rank) for number in range(whole.made) for rank in (0, 1)]
    try:
        assert whole.made > 5
        assert [cases[i] for i in _together(*(lambda case=case: run(*case) for case in cases))] == []
        assert set(ended) == set(cases)
    finally:
        mended.set()


STORE_CALL = re.compile(
    r"store\.(set|get|wait|check|add|append|compare_set|delete_key|num_keys|multi_get|multi_set|barrier|queue_\w+)\("
)


def unbounded_calls(source: str) -> list[str]:
    """Lines that call a store."""
    return [line.strip() for line in source.splitlines() if STORE_CALL.search(line)]


def test_the_board_alone_calls_the_store() -> None:
    """No other file of the package waits for a store without a bound of its own."""
    assert unbounded_calls('self._store.get("x")') == ['self._store.get("x")']
    assert unbounded_calls("store.wait(keys)") == ["store.wait(keys)"]
    package = Path(shoal.__file__).parent
    # the start bounds its own waits, the clock all of its exchanges together; ranks of a replica get what is there; a
    # benchmark adds up its meshes, which waits for nobody
    own_bounds = (
        "comm/board.py",
        "comm/clock.py",
        "launcher/rendezvous.py",
        "elastic/rendezvous.py",
        "bench/groups.py",
    )
    bounded = {package / name for name in own_bounds}
    found = {
        str(path.relative_to(package)): lines
        for path in package.rglob("*.py")
        if (lines := unbounded_calls(path.read_text())) and path not in bounded
    }
    assert found == {}
