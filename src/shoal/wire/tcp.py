"""`Tcp`: ranks on several hosts, each with one connection to every other.

    reduce         each rank is given one part of the vector by all others, sums it from left to right in rank order,
                   and (all-reduce) gives it to all: each of n ranks sends 2 (n-1)/n S, the least that there is
                   (Patarasuk and Yuan, JPDC 69(2), 2009), in two steps instead of a ring's 2 (n-1)
    others         direct

A frame is a head (what is called, tag, bytes) and its content; ends that mean different calls say so. Who has waited
for the content of a root sends it a head alone, so that two which take each other for the root wait no longer. Not at
once: a root may have ended, and who writes to a closed connection loses what still comes from there. Both ends of a
connection have proved that they know the job's token (`launcher.handshake`); the content is neither encrypted nor
interpreted. A rank takes in whatever arrives while it sends, so that two ranks may send to each other at once.

Sums have the bits that shared memory gives: 16-bit floats are summed in float32 and rounded once.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from shoal.comm.ledger import Sent
from shoal.comm.shm.core import BYTES, REDUCTIONS, Fault, Kind, Signature, sentence
from shoal.errors import CollectiveError
from shoal.launcher import frames, handshake, sockets
from shoal.wire.arrays import Array, combine, dtype_number, reduction_numbers
from shoal.wire.board import StoreBoard

VERSION = 2
"""Of the frames; ranks say theirs before they connect."""
SERVICE = b"wire"
"""What the key of these connections is derived for (`handshake.key_for`)."""
MOST_MESSAGE_BYTES = 1 << 36
ONE_SHOT_BYTES = 4096
"""Up to so many, each rank sends its whole vector to all: one step instead of two."""
_REMEMBERED = 64
"""Collectives whose call another rank may name late."""
_LOOK_S, _DOOR_S = 0.1, 0.5
"""How often who waits for messages looks at the clock; and who waits for connections, whether others still do."""
_SENDABLE, _ARRIVED = select.POLLOUT, select.POLLIN | select.POLLHUP | select.POLLERR


class _Call(NamedTuple):
    """What both ends of a frame must mean by it."""

    kind: int
    dtype: int = BYTES
    reduction: int = 0
    root: int = 0
    mark: int = 0

    def signature(self, size: int) -> Signature:
        """Of so many bytes."""
        return Signature(self.kind, self.dtype, self.reduction, self.root, size, self.mark)


class _Head(NamedTuple):
    """Of a frame. A tag is a message's, or the number of a collective."""

    call: _Call
    tag: int
    size: int

    @property
    def key(self) -> tuple[bool, int]:
        """By which it is found."""
        return self.call.kind == Kind.SEND, self.tag

    def packed(self) -> bytes:
        return _HEAD.pack(*self.call, self.tag, self.size)


_HEAD = struct.Struct("!BBBiQqQ")
_Part = tuple[_Call, memoryview]
"""A call, and the memory of what one rank sends in it."""


class _Peer:
    """One connection: what is still to be sent, what is arriving, and what arrived before it was asked for."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.outgoing: deque[memoryview] = deque()
        self.head = bytearray()
        self.arriving: tuple[_Head, memoryview, int] | None = None
        self.stash: defaultdict[tuple[bool, int], deque[_Part]] = defaultdict(deque)
        self.over = False
        self.asked: dict[tuple[bool, int], _Part] = {}


class Tcp:
    """Blocks until all ranks have made it; `timeout_s` is that of later calls. `hosts` are theirs, in rank order;
    `address` is this host's own, which the others can reach.

    All methods take arrays in one piece, say what they sent, and raise `CollectiveError` where a rank is gone, late or
    calls something else.
    """

    def __init__(
        self, board: StoreBoard, rank: int, hosts: Sequence[str], *, address: str, token: bytes, timeout_s: float
    ) -> None:  # fmt: skip
        self.rank, self.size, self._timeout_s = rank, (size := len(hosts)), timeout_s
        self._hosts, self._calls, self._process = tuple(hosts), 0, os.getpid()
        self._made: dict[int, tuple[_Call, int]] = {}  # the last collectives and their bytes, by number
        self._said = 0  # the last collective in which a root was sent a head alone
        self._failed = ""  # why, once a call has: what is under way then belongs to no later one
        key = handshake.key_for(token, SERVICE)
        with sockets.listen_at(address, 0, one_host=True) as listener:
            here = f"{address} {listener.getsockname()[1]} {VERSION}"
            doors = board.all_gather("doors", here, rank=rank, ranks=range(size))
            _check_versions(doors, rank)
            self._peers = {q: _Peer(_knock(doors[q], rank, q, key)) for q in range(rank)}
            self._peers |= _let_in(listener, rank, size, key, board)
        self._poll = select.poll()
        self._by_descriptor = {peer.connection.fileno(): q for q, peer in self._peers.items()}

    def close(self) -> None:
        """Ends all connections."""
        for peer in self._peers.values():
            peer.connection.close()

    def all_reduce(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent:
        call = _reduction(Kind.ALL_REDUCE, send, op, mark)
        if send.nbytes <= ONE_SHOT_BYTES:
            everyone = np.empty((self.size, *send.shape), send.dtype)
            sent = self._gathered(send, everyone, call)
            combine(list(everyone.reshape(self.size, -1)), op, out=receive)
            return sent
        parts = _parts(send.reshape(-1), self.size)
        sent = self._reduced(parts, out := np.empty_like(parts[self.rank]), op, call)
        into = _parts(receive.reshape(-1), self.size)
        into[self.rank][...] = out
        again = self._exchange([out] * self.size, into, call)
        return Sent(sent.inside_bytes + again.inside_bytes, sent.between_bytes + again.between_bytes)

    def reduce_scatter(self, send: Array, receive: Array, op: str, mark: int = 0) -> Sent:
        parts = list(send.reshape(self.size, -1))
        return self._reduced(parts, receive.reshape(-1), op, _reduction(Kind.REDUCE_SCATTER, send, op, mark))

    def all_gather(self, send: Array, receive: Array, mark: int = 0) -> Sent:
        return self._gathered(send, receive, _Call(Kind.ALL_GATHER, dtype_number(send.dtype), mark=mark))

    def broadcast(self, array: Array, root: int, mark: int = 0) -> Sent:
        call = _Call(Kind.BROADCAST, dtype_number(array.dtype), root=root, mark=mark)
        if self.rank == root:
            return self._move(dict.fromkeys(self._peers, array), {}, call)
        return self._move({}, {root: array}, call)

    def all_to_all(self, send: Sequence[Array], receive: Sequence[Array], mark: int = 0) -> Sent:
        if receive[self.rank].nbytes != send[self.rank].nbytes:
            raise CollectiveError(f"rank {self.rank} sends itself {send[self.rank].nbytes} bytes and expects others")
        receive[self.rank].reshape(-1)[...] = send[self.rank].reshape(-1)
        return self._exchange(send, receive, _Call(Kind.ALL_TO_ALL, dtype_number(send[0].dtype), mark=mark))

    def barrier(self) -> Sent:
        nothing = np.empty(0, np.uint8)
        return self._exchange([nothing] * self.size, [nothing] * self.size, _Call(Kind.BARRIER))

    def send(self, array: Array, to: int, tag: int) -> Sent:
        return self._move({to: array}, {}, _Call(Kind.SEND, dtype_number(array.dtype)), tag)

    def receive(self, array: Array, source: int, tag: int) -> Sent:
        return self._move({}, {source: array}, _Call(Kind.SEND, dtype_number(array.dtype)), tag)

    def _gathered(self, send: Array, receive: Array, call: _Call) -> Sent:
        blocks = list(receive.reshape(self.size, -1))
        blocks[self.rank][...] = send.reshape(-1)
        return self._exchange([send] * self.size, blocks, call)

    def _reduced(self, parts: Sequence[Array], out: Array, op: str, call: _Call) -> Sent:
        """This rank's part of the sum, into `out`."""
        mine = [np.empty_like(out) for _ in range(self.size)]
        mine[self.rank] = parts[self.rank]
        sent = self._exchange(parts, mine, call)
        combine(mine, op, out=out)
        return sent

    def _exchange(self, send: Sequence[Array], receive: Sequence[Array], call: _Call) -> Sent:
        """`send[q]` to every other rank q, `receive[q]` from it."""
        return self._move({q: send[q] for q in self._peers}, {q: receive[q] for q in self._peers}, call)

    def _move(self, send: Mapping[int, Array], receive: Mapping[int, Array], call: _Call, tag: int = 0) -> Sent:
        """Sends and receives until both are done; the bytes that were sent. `tag` is a message's. A call that fails, or
        is interrupted, is the last one: others hear that this rank is gone.
        """
        if os.getpid() != self._process:
            raise CollectiveError("a group can be used by the process that made it only")
        if self._failed:
            raise CollectiveError(f"an earlier call of this group has failed ({self._failed}): make another group")
        try:
            return self._moved(send, receive, call, tag)
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            self._say(call)
            self.close()
            raise

    def _moved(self, send: Mapping[int, Array], receive: Mapping[int, Array], call: _Call, tag: int) -> Sent:
        size = max(array.nbytes for array in (*send.values(), *receive.values()))
        if call.kind != Kind.SEND:
            self._calls = tag = self._calls + 1
            self._made[tag] = call, size
            self._made.pop(tag - _REMEMBERED, None)
        key, end_s = (call.kind == Kind.SEND, tag), time.monotonic() + self._timeout_s
        for rank, array in receive.items():
            self._ask(rank, key, (call, _bytes_of(array)))
        for rank, peer in self._peers.items():
            if call.kind != Kind.SEND and key in peer.stash:
                theirs, content = peer.stash.pop(key)[0]
                self._check_unasked(rank, _Head(theirs, tag, len(content)))
        for rank, array in send.items():
            content = _bytes_of(array)
            self._peers[rank].outgoing += (memoryview(_Head(call, tag, len(content)).packed()), content)
        while late := self._unfinished(send, receive, key):
            if (gone := next((rank for rank in late if self._peers[rank].over), None)) is not None:
                raise CollectiveError(f"Connection closed by peer: rank {gone} of the group is gone")
            if self._wait(end_s):
                continue
            if time.monotonic() > end_s:
                raise CollectiveError(self._sentence(Fault.TIMED_OUT, late[0], call.signature(size)))
            if self._peers[late[0]].arriving is None:
                self._say(call)
        inside = sum(array.nbytes for rank, array in send.items() if self._hosts[rank] == self._hosts[self.rank])
        return Sent(inside, sum(array.nbytes for array in send.values()) - inside)

    def _say(self, call: _Call) -> None:
        """What this rank expects of a root, which is sent nothing else in the call."""
        if call.kind != Kind.BROADCAST or call.root == self.rank or self._said == self._calls:
            return
        self._said, peer = self._calls, self._peers[call.root]
        peer.outgoing.append(memoryview(_Head(call, self._calls, 0).packed()))
        with suppress(OSError):  # it is gone
            _push(peer)

    def _ask(self, rank: int, key: tuple[bool, int], ours: _Part) -> None:
        peer = self._peers[rank]
        if (waiting := peer.stash.get(key)) is None:
            peer.asked[key] = ours
            return
        theirs = waiting.popleft()
        if not waiting:
            del peer.stash[key]
        self._check(rank, (ours[0], len(ours[1])), theirs[0], len(theirs[1]))
        ours[1][:] = theirs[1]

    def _unfinished(self, send: Mapping[int, Array], receive: Mapping[int, Array], key: tuple[bool, int]) -> list[int]:
        late = [rank for rank in receive if key in self._peers[rank].asked]
        return late or [rank for rank in send if self._peers[rank].outgoing]

    def _wait(self, end_s: float) -> bool:
        """Moves what can be moved; whether anything could."""
        for descriptor, rank in self._by_descriptor.items():
            peer = self._peers[rank]
            if not peer.over:
                self._poll.register(descriptor, select.POLLIN | (_SENDABLE if peer.outgoing else 0))
        ready = self._poll.poll(1000 * min(_LOOK_S, max(0.0, end_s - time.monotonic())))
        for descriptor, events in ready:
            self._serve(self._by_descriptor[descriptor], events)
        return bool(ready)

    def _serve(self, rank: int, events: int) -> None:
        peer = self._peers[rank]
        try:
            if events & _ARRIVED:  # first: who has ended may have said why
                self._pull(rank)
            if events & _SENDABLE:
                _push(peer)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            peer.over = True  # it may have ended after its last call
            self._poll.unregister(peer.connection.fileno())

    def _pull(self, rank: int) -> None:
        """Takes in what has arrived from `rank`, into the memory that was asked for, or aside."""
        peer = self._peers[rank]
        while True:
            if peer.arriving is None:
                peer.head += self._read(rank, _HEAD.size - len(peer.head)) or b""
                if len(peer.head) < _HEAD.size:
                    return
                peer.arriving, peer.head = self._begun(rank, _unpacked(peer.head)), bytearray()
            head, memory, done = peer.arriving
            while done < head.size:
                try:
                    count = peer.connection.recv_into(memory[done:])
                except BlockingIOError:
                    peer.arriving = (head, memory, done)
                    return
                if count == 0:
                    raise EOFError
                done += count
            self._arrived(rank, head, memory)

    def _begun(self, rank: int, head: _Head) -> tuple[_Head, memoryview, int]:
        if head.size > MOST_MESSAGE_BYTES or head.call.kind > Kind.SEND:
            raise CollectiveError(
                f"rank {rank} sends what is no message of the wire: run one version of Shoal everywhere"
            )
        ours = self._peers[rank].asked.get(head.key)
        if ours is None and head.call.kind != Kind.SEND and head.tag <= self._calls:
            self._check_unasked(rank, head)
        if ours is None:
            return head, memoryview(bytearray(head.size)), 0
        self._check(rank, (ours[0], len(ours[1])), head.call, head.size)
        return head, ours[1], 0

    def _arrived(self, rank: int, head: _Head, memory: memoryview) -> None:
        peer = self._peers[rank]
        peer.arriving, ours = None, peer.asked.pop(head.key, None)
        if ours is None and (head.call.kind == Kind.SEND or head.tag > self._calls):
            peer.stash[head.key].append((head.call, memory))
        elif ours is None:
            self._check_unasked(rank, head)
        elif ours[1] is not memory:  # asked for while it arrived
            self._check(rank, (ours[0], len(ours[1])), head.call, len(memory))
            ours[1][:] = memory

    def _read(self, rank: int, count: int) -> bytes | None:
        try:
            found = self._peers[rank].connection.recv(count)
        except BlockingIOError:
            return None
        if not found:
            raise EOFError
        return found

    def _check(self, rank: int, ours: tuple[_Call, int], call: _Call, size: int) -> None:
        """Whether `rank` calls what this one does, of `size` bytes; `ours` are its call and bytes."""
        if (call, size) == ours:
            return
        fault = Fault.WRONG_SIZE if call == ours[0] else Fault.DISAGREE
        if call.root != ours[0].root:
            size = size or ours[1]  # of a head alone
        raise CollectiveError(self._sentence(fault, rank, ours[0].signature(ours[1]), call.signature(size)))

    def _sentence(self, fault: Fault, rank: int, ours: Signature, theirs: Signature | None = None) -> str:
        named = {"own": self.rank, "timeout_s": self._timeout_s, "over": "TCP"}
        return sentence(fault, rank, ours, theirs or Signature(), **named)

    def _check_unasked(self, rank: int, head: _Head) -> None:
        """`rank` sends in a collective in which nothing is expected of it. A head alone says which call it is in; else
        both are roots, say.
        """
        alone = head.size == 0 and head.call.kind == Kind.BROADCAST
        if (own := self._made.get(head.tag)) is not None:
            self._check(rank, own, head.call, own[1] if alone else head.size)
        if alone:
            return
        root = f" with root {head.call.root}" if head.call.kind == Kind.BROADCAST else ""
        raise CollectiveError(
            f"rank {rank} of the group called {Kind(head.call.kind).name.lower()}{root} where rank {self.rank} "
            "had made another call: all ranks must make the same calls in the same order"
        )


def _reduction(kind: Kind, array: Array, op: str, mark: int) -> _Call:
    return _Call(kind, reduction_numbers(array.dtype, op), REDUCTIONS.index(op), mark=mark)


def _unpacked(head: bytearray) -> _Head:
    *call, tag, size = _HEAD.unpack(head)
    return _Head(_Call(*call), tag, size)


def _parts(flat: Array, count: int) -> list[Array]:
    """As equal as can be; views."""
    return np.array_split(flat, count)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())


def _push(peer: _Peer) -> None:
    while peer.outgoing:
        try:
            sent = peer.connection.sendmsg(list(peer.outgoing)[:8])
        except BlockingIOError:
            return
        while peer.outgoing and sent >= len(peer.outgoing[0]):
            sent -= len(peer.outgoing.popleft())
        if sent:
            peer.outgoing[0] = peer.outgoing[0][sent:]


def _check_versions(doors: Sequence[str], rank: int) -> None:
    for other, door in enumerate(doors):
        if (version := (door.split(" ")[2:] or ["1"])[0]) != str(VERSION):
            raise CollectiveError(
                f"rank {other} speaks version {version} of the wire, rank {rank} version {VERSION}: run one version of "
                "Shoal everywhere"
            )


def _knock(door: str, rank: int, other: int, key: bytes) -> socket.socket:
    address, port, _ = door.split(" ")
    try:
        connection = sockets.connected(address, int(port))
        handshake.shake_hands(connection, key, which=f"the token of this job, as rank {other} has it")
        connection.sendall(rank.to_bytes(4, "big"))
    except (OSError, frames.FrameError) as error:
        raise CollectiveError(
            f"rank {rank} cannot connect to rank {other} at {address}:{port} ({error}): see whether it runs, and "
            "whether a firewall is between the hosts"
        ) from None
    return connection


def _let_in(listener: socket.socket, rank: int, size: int, key: bytes, board: StoreBoard) -> dict[int, _Peer]:
    """The connections of all higher ranks, for which it waits as long as there is a store. Who does not know the token
    is let go.
    """
    found: dict[int, _Peer] = {}
    end_s = time.monotonic() + board.timeout_s
    while missing := [q for q in range(rank + 1, size) if q not in found]:
        if not sockets.readable(listener, min(_DOOR_S, max(0.0, end_s - time.monotonic()))):
            if time.monotonic() > end_s:
                raise CollectiveError(
                    f"rank {rank} waited {board.timeout_s:g} s for a connection of rank {missing[0]}: see its log"
                )
            board.published("doors")
            continue
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(handshake.ANSWER_S)
        try:
            if handshake.admit_one(connection, key) and (other := int.from_bytes(connection.recv(4), "big")) in missing:
                found[other] = _Peer(connection)
                continue
        except (OSError, frames.FrameError):
            pass
        connection.close()
    return found
