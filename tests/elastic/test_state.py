"""What the ranks of elastic runs hold, copy from each other and agree on, between threads that stand for them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from shoal.assembly.process import Process
from shoal.comm import c10d_forms
from shoal.comm.board import Board
from shoal.comm.c10d_forms import open_gloo
from shoal.comm.collective import Alone, Collective, Handle
from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.coordinator.client import Address, Begin, NoGeneration
from shoal.elastic import state_copy
from shoal.elastic.rendezvous import (
    ReplicaRanks,
    ReplicaRendezvous,
    hosts_lost,
    place_of,
    shut_down_connections,
    unreachable,
)
from shoal.elastic.sinks import membership_sentence
from shoal.elastic.state_copy import HeldState, share_state
from shoal.errors import CollectiveError, GenerationOver
from shoal.fleet.processes import Assignment
from shoal.launcher import sockets
from shoal.launcher.environment import STORE_FD, Place
from shoal.resilience.events import View
from shoal.resilience.participant import FencedOut
from shoal.state import targets_of, views
from shoal.topology.holding import Box
from tests.comm.local import local_group
from tests.waiting import HANG_S, NEVER_S

CPU = torch.device("cpu")


def a_state() -> HeldState:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "model/transposed": torch.randn(5, 7, generator=generator).t(),
        "model/empty": torch.empty(0, 3),
        "model/flags": torch.tensor([True, False]),
        "optimizer/step": torch.tensor(12.0),
    }
    held = {name: targets_of(tensor) for name, tensor in tensors.items()}
    flat = torch.arange(20.0)
    held["model/split"] = tuple(views(flat, [(Box((2, 0), (2, 5)), 10), (Box((0, 0), (1, 5)), 0)], global_shape=(6, 5)))
    held["model/weight"] = targets_of(torch.randn(300, 70, generator=generator, dtype=torch.float64))
    return HeldState('{"step": 12}', held)


def shared(groups: list[Any], states: list[HeldState | None], *, root: int) -> list[HeldState]:
    with ThreadPoolExecutor(len(groups)) as pool:
        pairs = zip(groups, states, strict=True)
        found = [pool.submit(share_state, state, group, root=root, device=CPU) for group, state in pairs]
        return [one.result() for one in found]


def test_a_copy_has_every_bit_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, types, shapes and bits of a holder's state arrive, in several chunks a tensor, and a holder keeps its
    own."""
    monkeypatch.setattr(state_copy, "CHUNK_BYTES", 1 << 10)
    holder = a_state()
    first, second, third = shared(local_group(3), [None, holder, None], root=1)
    assert second is holder
    for copy in (first, third):
        assert copy.facts == holder.facts
        assert [*copy.pieces()] == [*holder.pieces()]
        for name, tensor in holder.pieces().items():
            assert copy.pieces()[name].dtype == tensor.dtype
            assert torch.equal(copy.pieces()[name], tensor)
        assert [part.global_shape for part in copy.tensors["model/split"]] == [(6, 5), (6, 5)]
        assert copy.step == 12


@dataclass
class Damaging:
    """A group whose wire changes one byte of the first large message."""

    group: Collective

    @property
    def rank(self) -> int:
        return self.group.rank

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0) -> Handle:
        self.group.broadcast(tensor, root=root).wait()
        if tensor.numel() == 300 * 70 * 8:
            tensor[1000] ^= 1
        return Alone().broadcast(tensor)  # is done


def test_a_damaged_chunk_is_refused() -> None:
    """One changed bit on the way to a receiver, in the last tensor: an error that names it."""
    holder, receiver = local_group(2)
    with pytest.raises(CollectiveError, match="chunk 0 of model/weight did not arrive"):
        shared([holder, Damaging(receiver)], [a_state(), None], root=0)


def test_a_holder_passes_on_what_it_has_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its own state, and takes part in the broadcast without a copy: what arrives damaged is not even looked
    at."""
    monkeypatch.setattr(state_copy, "CHUNK_BYTES", 1 << 10)
    root, holder, receiver = local_group(3)
    states = [a_state(), a_state(), None]
    hashed: list[Tensor] = []
    hash_of = state_copy._hash
    monkeypatch.setattr(state_copy, "_hash", lambda chunk: (hashed.append(chunk), hash_of(chunk))[1])
    found = shared([root, Damaging(holder), receiver], states, root=0)
    assert found[1] is states[1]
    assert all(torch.equal(tensor, found[2].pieces()[name]) for name, tensor in a_state().pieces().items())
    chunks = sum(-(-tensor.numel() * tensor.element_size() // (1 << 10)) for tensor in a_state().pieces().values())
    assert len(hashed) == 2 * chunks  # by the root and by the receiver


def test_the_membership_in_a_sentence() -> None:
    """Ranks that are gone are named as in the generation before, those that are new as in this one."""
    assert membership_sentence((), ("a", "b"), most=2, step=0) == ""
    assert membership_sentence((), ("a",), most=2, step=0) == "1 of 2 replicas"
    assert (
        membership_sentence(("a", "b", "c"), ("a", "c"), most=3, step=7) == "2 of 3 replicas; rank 1 lost after step 7"
    )
    sentence = membership_sentence(("b", "c"), ("c", "d"), most=2, step=9)
    assert sentence == "2 of 2 replicas; rank 0 lost after step 9; rank 1 joined after step 9"
    sentence = membership_sentence(("b", "c"), ("b",), most=2, step=9, ranks=4)
    assert sentence == "1 of 2 replicas; ranks 4 to 7 lost after step 9"


def asked(size: int, ask: Callable[[ReplicaRanks], Any], *, check: Callable[[], None] = lambda: None) -> list[Any]:
    """What each rank of one replica gets."""
    store = HashStore()
    ranks = [ReplicaRanks(store, rank, size, check=check, stopping=lambda: False) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(ask, ranks))


VIEW = View(3, 3, ("a", "b", "c"), ("a",), 7, 70, 7, ("10.0.0.1:1", "10.0.0.2:2", "10.0.0.2:3"))


def test_all_ranks_of_a_replica_enter_the_generation_that_the_first_one_finds() -> None:
    """The others hear the same view, and where the state comes from."""
    found = asked(3, lambda ranks: ranks.begin(lambda: Begin(VIEW, "peer")))
    assert found == [Begin(VIEW, "peer")] * 3


@pytest.mark.parametrize(
    ("steps", "together"),
    [((5, 5, 5), True), ((5, 6, 5), False), ((5, None, 5), False), ((None, None, None), False)],
)
def test_a_replica_holds_a_state_where_all_its_ranks_hold_the_same(
    steps: tuple[int | None, ...], together: bool
) -> None:
    """Parts of two steps are no state."""
    assert asked(3, lambda ranks: ranks.end(steps[ranks.rank])) == [(together, False)] * 3


def test_one_rank_that_has_finished_the_run_ends_it_for_its_replica() -> None:
    """The others may have lost it in the last barrier, after the last save."""
    assert asked(2, lambda ranks: ranks.end(9, done=ranks.rank == 1)) == [(False, True)] * 2


def test_a_rank_that_is_fenced_waits_for_no_other() -> None:
    """What the client says ends a wait."""

    def fenced() -> None:
        raise FencedOut("it was silent")

    with pytest.raises(FencedOut):
        asked(2, lambda ranks: ranks.end(5) if ranks.rank else None, check=fenced)


def test_places_of_ranks_on_several_hosts() -> None:
    """Members that joined from one address share a host; local ranks count through them."""
    place = place_of(VIEW, 2, 1, 4, "shoal")
    assert (place.rank, place.world_size) == (9, 12)
    assert (place.local_rank, place.local_world_size, place.node_rank) == (5, 8, 1)
    assert not place.one_host


def test_only_hosts_without_a_living_member_are_given_up() -> None:
    """One of two replicas of a host is no reason to close connections to the other; this host is never closed."""
    assert hosts_lost(VIEW, {"b"}, here="10.0.0.1") == set()
    assert hosts_lost(VIEW, {"b", "c"}, here="10.0.0.1") == {"10.0.0.2"}
    assert hosts_lost(VIEW, {"a", "b", "c"}, here="10.0.0.2") == {"10.0.0.1"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_connection_that_ipv6_carries_is_found_by_its_address_in_ipv4() -> None:
    """As the sockets of Gloo and of PyTorch's store are where IPv6 is there."""
    with socket.create_server(("127.0.0.2", 0)) as lost, socket.socket(socket.AF_INET6) as connection:
        connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        connection.connect(("::ffff:127.0.0.2", lost.getsockname()[1]))
        assert shut_down_connections({"127.0.0.2"}) == 1
        assert connection.recv(1) == b""


@contextmanager
def rendezvous_of_a() -> Iterator[tuple[ReplicaRendezvous, View]]:
    """That of replica a, which hosts the store of a generation of a and b."""
    with sockets.listen_at("127.0.0.1", 0, one_host=True) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), STORE_FD: str(os.dup(fd))}
        assigned = Assignment("a", Address("127.0.0.1", 1, b""), 1)
        place = Place(0, 1, 0, 1, 0, "shoal")
        rendezvous = ReplicaRendezvous(assigned, place, CPU, timeout_s=NEVER_S, environ=environ)
        yield rendezvous, View(1, 1, ("a", "b"), (), 0, 0, 0, (rendezvous.address, "127.0.0.1:1"))


def until_b_is_lost(rendezvous: ReplicaRendezvous, wait: Callable[[], Any]) -> None:
    """Calls `wait`, loses b meanwhile, and raises what `wait` raises."""
    waiting: Future[Any] = Future()

    def run() -> None:
        try:
            waiting.set_result(wait())
        except Exception as error:
            waiting.set_exception(error)

    Thread(target=run, daemon=True).start()  # one that hangs does not hang the test
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    rendezvous.stop_waiting_for(frozenset({"b"}))
    waiting.result(HANG_S)


def test_a_save_ends_when_a_member_is_lost() -> None:
    """It waits for the parts of all members, for minutes, and those of the lost one do not come."""
    with rendezvous_of_a() as (rendezvous, view):
        saves = rendezvous.exchange(rendezvous.of(view), timeout_s=NEVER_S)
        with pytest.raises(CollectiveError, match="was lost"):
            until_b_is_lost(rendezvous, lambda: saves.collect(["part of b"], NEVER_S))


def test_the_host_of_the_store_ends_after_those_that_use_it() -> None:
    """Rank 1 reads there what became of the last save. A lost rank is not waited for."""
    with rendezvous_of_a() as (rendezvous, view):
        rendezvous.part(within_s=NEVER_S)
        process = rendezvous.of(view)
        parting = Thread(target=lambda: rendezvous.part(within_s=NEVER_S), daemon=True)
        parting.start()
        parting.join(0.3)
        assert parting.is_alive()
        Board(process.store, timeout_s=HANG_S).clone().publish("parted/1", b"")
        parting.join(HANG_S)
        assert not parting.is_alive()
        rendezvous.of(msgspec.structs.replace(view, generation=2))
        until_b_is_lost(rendezvous, lambda: rendezvous.part(within_s=NEVER_S))
        rendezvous.leave()
        rendezvous.part(within_s=NEVER_S)


WAITS: dict[str, Callable[[Process], object]] = {
    "a message": lambda process: Board(process.store, timeout_s=NEVER_S).collect(["from b"]),
    "a barrier": lambda process: process.wait_for_all(),
    "a group": lambda process: connect(
        PrefixStore("group", process.store), 0, 2, device=CPU, label="world", ledger=Ledger(),
        wire=WireConfig(timeout_s=NEVER_S),
    ),
    "Gloo": lambda process: open_gloo(PrefixStore("gloo", process.store), 0, 2, timeout_s=NEVER_S),
}  # fmt: skip


@pytest.mark.parametrize("what", [*WAITS, "a peer of Gloo"])
def test_every_wait_for_a_lost_member_ends(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Also of the rank that hosts the store, which no end of a connection wakes. Gloo waits without the store for a
    peer that has ended since it told its address."""
    with rendezvous_of_a() as (rendezvous, view):
        process = rendezvous.of(view)
        if what not in WAITS:
            monkeypatch.setattr(c10d_forms, "GlooGroup", lambda *_, **__: Event().wait(2 * HANG_S))
        wait = WAITS.get(what, WAITS["Gloo"])
        with pytest.raises(GenerationOver, match="b was lost: waiting for another generation"):
            until_b_is_lost(rendezvous, lambda: wait(process))


def test_a_member_that_is_lost_before_the_others_meet_is_not_waited_for() -> None:
    """The generation meets at its store, where nobody listens any more; the next one meets elsewhere."""
    with rendezvous_of_a() as (rendezvous, view):
        elsewhere = msgspec.structs.replace(view, members=("b", "a"), addresses=("127.0.0.1:1", rendezvous.address))
        with pytest.raises(GenerationOver, match="b was lost"):
            rendezvous.of(elsewhere, lost=lambda: frozenset({"b"}))
        again = rendezvous.of(view)
        rendezvous.leave()
        with pytest.raises(CollectiveError, match="store is gone"):
            Board(again.store, timeout_s=NEVER_S).collect(["from b"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_who_waits_for_a_host_that_is_given_up_is_woken() -> None:
    """A call that waits for a peer ends; connections to others stay."""
    with socket.create_server(("127.0.0.2", 0)) as lost, socket.create_server(("127.0.0.3", 0)) as other:
        waiting, staying = socket.create_connection(lost.getsockname()), socket.create_connection(other.getsockname())
        far, near = lost.accept()[0], other.accept()[0]
        with waiting, staying, far, near, ThreadPoolExecutor(1) as pool:
            received = pool.submit(waiting.recv, 1)
            assert shut_down_connections({"127.0.0.2"}) == 1
            assert received.result(HANG_S) == b""
            near.sendall(b"x")
            assert staying.recv(1) == b"x"


def test_all_members_that_take_no_connection_are_unreachable() -> None:
    """By its store's address, which a member that is stopped still answers at; this replica itself does not count."""
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in (gone, here, gone))
        view = View(2, 2, ("a", "b", "c"), (), 0, 0, 0, addresses)
        assert unreachable(view, "b") == ()
        gone.close()
        assert unreachable(view, "b") == ("a", "c")
        assert unreachable(view, "a") == ("c",)


def test_all_ranks_of_a_replica_hear_that_no_generation_comes() -> None:
    """They save together what they hold: none of them waits on, or is ended by the end of the first one."""

    def none() -> Begin:
        raise NoGeneration("replica a waited 9 s for a generation")

    def begin(ranks: ReplicaRanks) -> str:
        with pytest.raises(NoGeneration) as raised:
            ranks.begin(none)
        return str(raised.value)

    assert asked(3, begin) == ["replica a waited 9 s for a generation"] * 3
