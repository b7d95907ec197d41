"""The job's store: what it keeps, as PyTorch's own does, and what strangers reach (nothing)."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from shoal.errors import CollectiveError, EnvironmentFault
from shoal.launcher import frames, handshake, sockets
from shoal.launcher.environment import Place
from shoal.launcher.rendezvous import connect_store
from shoal.launcher.store.client import AuthenticatedStore
from shoal.launcher.store.messages import JOB_TOKEN, MOST_VALUE_BYTES, REPLY_BYTES, Request, job_token
from shoal.launcher.store.server import Limits, StoreServer
from tests.waiting import HANG_S, NEVER_S, wait_until

TOKEN, OTHER = b"t" * 32, b"o" * 32
ALONE = Place(0, 1, 0, 1, 0, "torchrun")


@contextlib.contextmanager
def serving(limits: Limits = Limits()) -> Iterator[int]:
    """A store's port."""
    server = StoreServer(sockets.listen_on_loopback(), token=TOKEN, limits=limits)
    try:
        yield server.port
    finally:
        server.close()


def connect(port: int, token: bytes = TOKEN) -> AuthenticatedStore:
    return connect_store(ALONE, "127.0.0.1", port, token=token, timeout_s=HANG_S)


def raw(port: int) -> socket.socket:
    """A stranger's connection, which has read the store's first frame."""
    connection = socket.create_connection(("127.0.0.1", port), HANG_S)
    frames.receive(connection, most_bytes=512)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Blocks until the store has closed it; False for a word beyond its refusal."""
    try:
        said = b""
        while piece := connection.recv(4096):
            said += piece
    except ConnectionResetError:
        return True
    return said in (b"", frames.encode(handshake.Refusal()))


KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.binary(max_size=8)
CALLS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("add"), st.just("count"), st.integers(-5, 5)),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1, max_size=3)),
    st.tuples(st.just("wait"), st.lists(KEYS, min_size=1, max_size=3)),
    st.tuples(st.just("multi_get"), st.lists(KEYS, min_size=1, max_size=3)),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.lists(VALUES, min_size=2, max_size=2)),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[TCPStore, PrefixStore, PrefixStore]]:
    """PyTorch's store; ours behind the prefix that C++ puts on it; the peer."""
    theirs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with serving() as port:
        yield theirs, PrefixStore("", connect(port)), PrefixStore("", connect(port))


@given(calls=st.lists(CALLS, max_size=12), name=st.uuids())
def test_it_answers_as_pytorchs_own_store(both, calls, name) -> None:
    """Any sequence of calls, from two ranks by turns, through C++: the values, counts and failures of `TCPStore`."""
    theirs, *ours = both

    def outcome(store: Any, call: tuple[Any, ...]) -> Any:
        store = PrefixStore(str(name), store)
        method, *arguments = call
        if method in ("get", "multi_get", "wait"):  # what is there comes however late; what is not, never
            there = store.check([arguments[0]] if method == "get" else arguments[0])
            store.set_timeout(timedelta(seconds=HANG_S) if there else timedelta(milliseconds=2))
        try:
            return getattr(store, method)(*arguments)
        except DistStoreError:
            return "in vain"

    for turn, call in enumerate(calls):
        assert outcome(ours[turn % 2], call) == outcome(theirs, call), call


def test_a_wait_ends_with_the_key_and_holds_up_no_other_thread() -> None:
    """One connection, one thread that waits for what another sets."""
    with serving() as port, ThreadPoolExecutor() as pool:
        store = connect(port)
        waiting = pool.submit(store.multi_get, ["first", "second"])
        store.set("first", "1")
        assert store.check(["first"])
        assert not waiting.done()
        store.set("second", "2")
        assert waiting.result(HANG_S) == [b"1", b"2"]


def test_what_was_deleted_during_a_wait_is_waited_for_again() -> None:
    """A reply holds values that were there at one time."""
    with serving() as port, ThreadPoolExecutor() as pool:
        store = connect(port)
        waiting = pool.submit(store.multi_get, ["first", "second"])
        wait_until(lambda: len(store._connection._pending) == 1)
        store.set("first", "gone")
        store.delete_key("first")
        store.set("second", "2")
        assert store.check(["second"])
        assert not waiting.done()
        store.set("first", "1")
        assert waiting.result(HANG_S) == [b"1", b"2"]


def test_values_larger_than_a_reply_come_one_after_the_other() -> None:
    """The sum of values has no limit; one of them has, and it is named."""
    with serving() as port:
        store = connect(port)
        large = [bytes([number]) * (REPLY_BYTES // 2 + 1) for number in range(3)]
        store.multi_set(["a", "b", "c"], large)
        assert store.multi_get(["a", "b", "c"]) == large
        with pytest.raises(ValueError, match=f"it may have {MOST_VALUE_BYTES}"):
            store.set("d", bytes(MOST_VALUE_BYTES + 1))


def test_its_python_half_lives_as_long_as_its_connection() -> None:
    """Groups in C++ keep the C++ half alone: calls that come from there still arrive when nobody else holds it."""
    with serving() as port:
        held_in_c = PrefixStore("a", connect(port))
        gc.collect()
        held_in_c.set("key", "value")
        assert held_in_c.get("key") == b"value"


def test_gloo_groups_stand_on_it(ranks) -> None:
    """Three processes open a group over it, and sum."""
    listener = sockets.listen_on_loopback()
    server = StoreServer(listener, token=TOKEN)
    assert ranks(3, _summed, server.port) == [6.0] * 3
    server.close()


def _summed(place, port: int) -> float:
    store = connect(port)
    group: Any = dist.ProcessGroupGloo(PrefixStore("sum", store), place.rank, place.size, timedelta(seconds=HANG_S))
    number = torch.tensor([place.rank + 1.0])
    group.allreduce([number]).wait()
    return number.item()


def test_a_store_that_is_gone_ends_all_calls() -> None:
    """The wait that was under way, and every later call."""
    with ThreadPoolExecutor() as pool:
        with serving() as port:
            store = connect(port)
            waiting = pool.submit(store.get, "never")
            wait_until(lambda: len(store._connection._pending) == 1)
        with pytest.raises(DistNetworkError, match="was lost"):
            waiting.result(HANG_S)
        with pytest.raises(DistNetworkError, match="was lost"):
            store.set("key", "value")


def test_a_closed_connection_leaves_no_thread() -> None:
    """Neither the reader's nor, with the store, the server's."""
    before = set(threading.enumerate())
    for _ in range(3):
        listener = sockets.listen_on_loopback()
        port, fd = listener.getsockname()[1], listener.detach()
        store = connect_store(ALONE, "127.0.0.1", port, token=TOKEN, timeout_s=HANG_S, listen_fd=fd)
        store.set("key", "value")
        store.close()
    wait_until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("shoal-store")])


def test_a_wrong_token_is_refused_at_once() -> None:
    """A sentence, and no other try; the store goes on."""
    with serving() as port:
        with pytest.raises(handshake.TokenRefused, match="refuses this process's token"):
            connect(port, OTHER)
        connect(port).set("key", "value")


def test_a_false_store_is_refused() -> None:
    """Who has taken the address of rank 0, and does not know the token, learns nothing and is not believed."""
    with sockets.listen_on_loopback() as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            connection.sendall(frames.encode(handshake.hello()))
            frames.receive(connection, most_bytes=512)
            connection.sendall(frames.encode(handshake.Welcome(bytes(32))))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(handshake.TokenRefused, match="does not know this job's token"):
            connect(listener.getsockname()[1])


def test_what_is_no_store_is_named() -> None:
    """An HTTP server at the address: no wait for the whole timeout."""
    with sockets.listen_on_loopback() as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with contextlib.suppress(OSError):
                connection.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(CollectiveError, match="is not the store of rank 0: set MASTER_ADDR"):
            connect(listener.getsockname()[1])


def oversize(connection: socket.socket) -> None:
    connection.sendall(struct.pack(">I", 1 << 31) + b"x" * 512)


def garbage(connection: socket.socket) -> None:
    connection.sendall(struct.pack(">I", 64) + os.urandom(64))


def request_without_proof(connection: socket.socket) -> None:
    connection.sendall(frames.encode(Request(0, "set", ["key"], [b"theirs"])))


def proof_of_another_token(connection: socket.socket) -> None:
    connection.sendall(frames.encode(handshake.prove(handshake.key_for(OTHER, b"store"), handshake.hello())))
    with contextlib.suppress(OSError):
        connection.sendall(frames.encode(Request(0, "set", ["key"], [b"theirs"])))


def proof_for_another_service(connection: socket.socket) -> None:
    connection.sendall(frames.encode(handshake.prove(TOKEN, handshake.hello())))


def torchs_own_client(connection: socket.socket) -> None:
    connection.sendall(b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x01" + struct.pack("=Q", 3) + b"key")


@pytest.mark.parametrize(
    "attack",
    [oversize, garbage, request_without_proof, proof_of_another_token, proof_for_another_service, torchs_own_client],
)
def test_a_stranger_is_closed_and_changes_nothing(attack: Callable[[socket.socket], None]) -> None:
    """Whatever it sends instead of a proof; the ranks' keys stay what they were."""
    with serving() as port:
        store = connect(port)
        store.set("key", "ours")
        with raw(port) as connection:
            attack(connection)
            assert is_closed(connection)
        assert store.get("key") == b"ours"
        assert store.num_keys() == 1


def test_a_recorded_proof_is_worth_nothing_later() -> None:
    """An honest rank's whole side of a connection, sent again."""
    with serving() as port:
        connect(port).set("key", "ours")
        with raw(port) as first:
            recorded = frames.encode(handshake.prove(handshake.key_for(TOKEN, b"store"), handshake.hello()))
            first.sendall(recorded + frames.encode(Request(0, "set", ["key"], [b"theirs"])))
            assert is_closed(first)
        assert connect(port).get("key") == b"ours"


def test_a_slow_stranger_is_cut_off() -> None:
    """One byte of a proof, and then none: closed after the time for a handshake."""
    with serving(Limits(handshake_s=0.2)) as port, raw(port) as connection:
        connection.sendall(b"\0")
        assert is_closed(connection)


def test_many_silent_strangers_keep_no_rank_out() -> None:
    """300 open connections at once: only so many stay open, and ranks come and go among them."""
    limits = Limits(handshake_s=NEVER_S, strangers=16)
    with serving(limits) as port, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", port), HANG_S)) for _ in range(300)]
        store = connect(port)
        store.set("key", "value")
        assert connect(port).get("key") == b"value"
        for connection in crowd[:-16]:
            with contextlib.suppress(OSError):  # some are closed before they are greeted
                frames.receive(connection, most_bytes=512)
            assert is_closed(connection)


def test_the_launchers_file_goes_before_the_users_own(tmp_path: Path) -> None:
    """SHOAL_JOB_TOKEN names the file; without it the user's, which is written for its owner alone, once for all."""
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: job_token(environ), range(8)))
    assert len(tokens) == 1
    path = tmp_path / "state" / "shoal" / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["token"]
    assert job_token({**environ, JOB_TOKEN: str(tmp_path / "job")}) not in tokens


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """It would be no secret; the repair is named. So is the way out where no file can be written."""
    path = tmp_path / "token"
    job_token({JOB_TOKEN: str(path)})
    path.chmod(0o644)
    with pytest.raises(EnvironmentFault, match="chmod 600"):
        job_token({JOB_TOKEN: str(path)})
    with pytest.raises(EnvironmentFault, match=f"set {JOB_TOKEN}"):
        job_token({"XDG_STATE_HOME": "/proc/nowhere"})
