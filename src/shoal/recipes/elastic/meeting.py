"""Where the members of a generation meet: at a store that its first member hosts.

Every replica hosts one, on loopback, and joins with its address. So no store outlives the replicas that need it, and
none is lost with a replica that is not rank 0 of the generation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from shoal.comm.board import Board
from shoal.errors import CollectiveError
from shoal.launch.environment import LOOPBACK, Place
from shoal.launch.rendezvous import Rendezvous, connect_store
from shoal.launch.sockets import listen_on_loopback
from shoal.recipes.process import Process
from shoal.resilience.events import View

CONNECT_S = 10.0
POLL_S = 0.2


class Meeting:
    """This replica's own store, and its way to those of the others. `place` is its place on the host."""

    def __init__(self, place: Place, device: torch.device, *, timeout_s: float, environ: Mapping[str, str]) -> None:
        self._place, self._device, self._timeout_s, self._environ = place, device, timeout_s, environ
        listener = listen_on_loopback()
        port = listener.getsockname()[1]
        self.address = f"{LOOPBACK}:{port}"
        self._own = connect_store(place, LOOPBACK, port, timeout_s=CONNECT_S, listen_fd=listener.detach())
        self._rendezvous: Rendezvous | None = None
        self._over = threading.Event()

    def alone(self) -> Process:
        """This replica's process before it has joined."""
        rendezvous = Rendezvous(self._own, self._place, timeout_s=self._timeout_s)
        return Process(self._place, self._device, self._own, rendezvous, self._environ)

    def of(self, view: View, replica: str) -> Process:
        """This replica's process as a rank of the generation. Raises `CollectiveError` without its first member."""
        self._over = threading.Event()
        rank, size = view.members.index(replica), len(view.members)
        place = Place(rank, size, rank, size, 0, self._place.launcher)
        if rank == 0:
            store = self._own
        else:
            host, _, port = view.addresses[0].rpartition(":")
            if not host:
                raise CollectiveError(f"replica {view.members[0]} is gone: the generation has nowhere to meet")
            store = connect_store(place, host, int(port), timeout_s=CONNECT_S, listen_fd=None)
        named = PrefixStore(f"membership-{view.generation}", store)
        self._rendezvous = Rendezvous(named, place, timeout_s=self._timeout_s)
        return Process(place, self._device, named, self._rendezvous, self._environ)

    def end(self, sentence: str) -> None:
        """The generation is over, or about to be: ends its waits at the start, on all ranks. From any thread."""
        rendezvous = self._rendezvous
        if rendezvous is not None:
            try:
                rendezvous.give_up(sentence)
            except RuntimeError:  # the store is gone, and with it all waits
                return

    def exchange(self, process: Process, *, timeout_s: float) -> GenerationExchange:
        """What the saves of this generation go by."""
        return GenerationExchange(Board(process.store, timeout_s=timeout_s).clone(), self._over)

    def leave(self) -> None:
        """This replica has left the generation: what its saves still wait for does not come."""
        self._over.set()
        self._rendezvous = None


class GenerationExchange:
    """A save's messages, as `checkpoint.agreement.Exchange`; they end with the generation, and the save with them."""

    def __init__(self, board: Board, over: threading.Event) -> None:
        self._board, self._over = board, over

    def publish(self, key: str, value: bytes) -> None:
        self._board.publish(key, value)

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Raises `CollectiveError` when the generation is over, or after `timeout_s`."""
        left_s = timeout_s
        while not self._over.is_set():
            found = self._board.collect_some(keys, min(POLL_S, left_s))
            if len(found) == len(set(keys)):
                return [found[key] for key in keys]
            left_s -= POLL_S
            if left_s <= 0:
                return self._board.collect(keys, POLL_S)
        raise CollectiveError("a replica was lost or joined while the checkpoint was written")

    def forget(self, keys: Sequence[str]) -> None:
        self._board.forget(keys)
