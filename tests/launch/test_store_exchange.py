"""Messages beside the collectives."""

from __future__ import annotations

import threading
import time

import pytest

from shoal.errors import CollectiveError
from shoal.launch import sockets
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.launch.store_exchange import PART_BYTES, StoreExchange


@pytest.fixture(scope="module")
def store():
    """A store on loopback."""
    listener = sockets.listen_on_loopback()
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    environ["SHOAL_STORE_FD"] = str(listener.detach())
    return open_store(Place(0, 1, 0, 1, 0, "torchrun"), environ, timeout_s=10)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 5])
def test_values_of_any_size_arrive_whole(store, size):
    """Empty values, and values beyond what the store takes at once, are what they were."""
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    StoreExchange(store).publish(f"size/{size}", value)
    assert StoreExchange(store).collect([f"size/{size}"], 5) == [value]


def test_values_come_in_the_order_of_their_keys(store):
    """The order asked for, not that of publication."""
    exchange = StoreExchange(store)
    for key in ("c", "a", "b"):
        exchange.publish(key, key.encode())
    assert exchange.collect(["a", "b", "c"], 5) == [b"a", b"b", b"c"]


def test_what_is_missing_is_named(store):
    """After the timeout the error lists the keys that nobody published, and no other."""
    exchange = StoreExchange(store)
    exchange.publish("there", b"")
    with pytest.raises(CollectiveError, match=r"under absent \(1 of 2 keys\)"):
        exchange.collect(["there", "absent"], 0.2)


def test_a_waiting_thread_does_not_hold_the_main_thread(store):
    """While a background thread waits for a message, the main thread's use of the store goes through."""
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.extend(StoreExchange(store).collect(["late"], 10)))
    thread.start()
    time.sleep(0.1)
    store.set("main", "thread")
    assert store.get("main") == b"thread"
    assert got == []
    StoreExchange(store).publish("late", b"now")
    thread.join(10)
    assert got == [b"now"]


@pytest.mark.parametrize("size", [0, 1, PART_BYTES + 1])
def test_what_is_forgotten_is_gone_in_all_its_parts(store, size):
    """The store holds as many keys as before; forgetting what was never there is no error."""
    exchange, before = StoreExchange(store), store.num_keys()
    exchange.publish("gone", bytes(size))
    exchange.forget(["gone", "never"])
    assert store.num_keys() == before
    with pytest.raises(CollectiveError, match="under gone"):
        exchange.collect(["gone"], 0.1)
