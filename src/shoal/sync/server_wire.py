"""What workers and servers send each other: contributions one way (push), parameters the other (pull).

    push   worker -> server   what, number, version, rate, weight    then the gradient of the server's part
    pull   server -> worker   version, what became of contributions  then the part's parameters

A rank that is both contributes to its own part without a message. Pushes and pulls have a group each, so that neither
waits behind the other; a server has a thread for each worker.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.comm.ledger import Ledger
from shoal.sync.admission import Contribution
from shoal.sync.server_part import Sent, ServedPart, Standing
from shoal.sync.server_partition import Run

_GRADIENT, _NOTHING, _LEAVE = 0.0, 1.0, 2.0
_HEAD, _BODY = 0, 1  # tags
_HEAD_NUMBERS = 5


@dataclass(frozen=True)
class Lanes:
    """The groups of all ranks, in one order, that carry pushes and pulls; `ledger` books what they send."""

    push: Collective
    pull: Collective
    ledger: Ledger


class FlatParts:
    """Tensors of a model in one row, [numel], server by server: `spans[s]` is the part of server s."""

    def __init__(self, parts: Sequence[Sequence[Run]]) -> None:
        ends = list(accumulate((sum(run.numel for run in part) for part in parts), initial=0))
        self.numel = ends[-1]
        self.spans = [slice(start, stop) for start, stop in pairwise(ends)]
        self._places = []
        at = 0
        for run in (run for part in parts for run in part):
            self._places.append((run, slice(at, at + run.numel)))
            at += run.numel

    @property
    def servers(self) -> list[int]:
        """Those that have anything."""
        return [server for server, span in enumerate(self.spans) if span.start < span.stop]

    def pack(self, tensors: Sequence[Tensor], into: Tensor) -> None:
        """Copies `tensors`, all of them, into the row."""
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        for run, place in self._places:
            into[place].copy_(flat[run.tensor][run.start : run.stop])

    def unpack(self, row: Tensor, into: Sequence[Tensor]) -> None:
        """Copies the row into the tensors, which are contiguous."""
        flat = [tensor.detach().view(-1) for tensor in into]
        for run, place in self._places:
            flat[run.tensor][run.start : run.stop].copy_(row[place])


class Push(NamedTuple):
    """What a worker contributes: its `number`th in this round, of samples of `weight`. None: it has nothing to add."""

    number: int
    gradient: Tensor | None
    lr: float
    weight: float = 1.0


class Worker:
    """The side of one worker: it contributes to every part, and reads every part when it may.

    `row` are the parameters that it read last, [numel]. `own`: the part that this rank serves.
    """

    def __init__(self, parts: FlatParts, lanes: Lanes, own: ServedPart, *, dtype: torch.dtype) -> None:
        self.row = torch.zeros(parts.numel, dtype=dtype)
        self._parts, self._lanes, self._own, self._rank = parts, lanes, own, lanes.push.rank
        self._heads = {server: torch.zeros(_HEAD_NUMBERS, dtype=torch.float64) for server in parts.servers}
        self._answers = {server: torch.zeros(4, dtype=torch.float64) for server in parts.servers}
        self.standings: dict[int, Standing] = {}

    def begin(self) -> None:
        """A round begins: `row` is what all servers have."""
        self.standings = dict.fromkeys(self._parts.servers, Standing())

    def awaited(self, number: int) -> list[int]:
        """The servers that have not made update `number` yet, as far as this worker knows."""
        return [server for server, standing in self.standings.items() if standing.version <= number]

    def push_pull(self, push: Push, servers: Sequence[int] | None = None) -> None:
        """Returns when every one of `servers` (None: all) has let this worker go on; `row` is then what they have.

        Raises `CollectiveError` where a server is lost.
        """
        servers = list(self._heads) if servers is None else servers
        others = [server for server in servers if server != self._rank]
        handles = [handle for server in others for handle in self._send(server, push)]
        if self._rank in servers:
            self._contribute_here(push)
        handles += [handle for server in others for handle in self._receive(server)]
        for handle in handles:
            handle.wait()
        for server in others:
            self.standings[server] = Standing(*map(int, self._answers[server].tolist()))
        if self._rank in servers:
            values, self.standings[self._rank] = self._own.await_release(self._rank)
            self.row[self._parts.spans[self._rank]].copy_(values)

    def leave(self) -> None:
        """Tells every server that nothing more comes in this round."""
        handles = []
        for server in self._others:
            self._heads[server][0] = _LEAVE
            handles.append(self._lanes.push.send(self._heads[server], to=server, tag=_HEAD))
        for handle in handles:
            handle.wait()
        if self._rank in self._heads:
            self._own.leave(self._rank)

    @property
    def _others(self) -> list[int]:
        return [server for server in self._heads if server != self._rank]

    def _send(self, server: int, push: Push) -> list[Handle]:
        what = _NOTHING if push.gradient is None else _GRADIENT
        version = self.standings[server].version
        self._heads[server].copy_(torch.tensor([what, push.number, version, push.lr, push.weight], dtype=torch.float64))
        handles = [self._lanes.push.send(self._heads[server], to=server, tag=_HEAD)]
        if push.gradient is not None:
            handles.append(self._lanes.push.send(push.gradient[self._parts.spans[server]], to=server, tag=_BODY))
        return handles

    def _receive(self, server: int) -> list[Handle]:
        head = self._lanes.pull.recv(self._answers[server], source=server, tag=_HEAD)
        return [head, self._lanes.pull.recv(self.row[self._parts.spans[server]], source=server, tag=_BODY)]

    def _contribute_here(self, push: Push) -> None:
        gradient = None
        if push.gradient is not None:
            gradient = self._own.buffer().copy_(push.gradient[self._parts.spans[self._rank]])
        contribution = Contribution(self._rank, push.number, self.standings[self._rank].version)
        self._own.contribute(contribution, Sent(gradient, push.lr, push.weight))


class Serving:
    """The threads that serve `part` to the other workers, for one round."""

    def __init__(self, part: ServedPart, lanes: Lanes) -> None:
        self._part, self._lanes = part, lanes
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"shoal-serve-{worker}", daemon=True)
            for worker in range(lanes.push.size)
            if worker != lanes.push.rank
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Returns when every worker has left."""
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: int) -> None:
        """Until `worker` leaves; what goes wrong is raised where this rank waits."""
        try:
            with self._lanes.ledger.behind():
                while self._answer(worker):
                    continue
        except BaseException as error:
            self._part.fail(error)

    def _answer(self, worker: int) -> bool:
        """One contribution, and the parameters in return. False: the worker has left."""
        push, pull = self._lanes.push, self._lanes.pull
        head = torch.zeros(_HEAD_NUMBERS, dtype=torch.float64)
        push.recv(head, source=worker, tag=_HEAD).wait()
        what, number, version, lr, weight = head.tolist()
        if what == _LEAVE:
            self._part.leave(worker)
            return False
        gradient = None
        if what == _GRADIENT:
            gradient = self._part.buffer()
            push.recv(gradient, source=worker, tag=_BODY).wait()
        self._part.contribute(Contribution(worker, int(number), int(version)), Sent(gradient, lr, weight))
        values, standing = self._part.await_release(worker)
        answer = torch.tensor(standing, dtype=torch.float64)
        handles = [pull.send(answer, to=worker, tag=_HEAD), pull.send(values, to=worker, tag=_BODY)]
        for handle in handles:
            handle.wait()
        return True
