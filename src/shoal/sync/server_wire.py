"""What workers and servers send each other: contributions one way (push), parameters the other (pull).

    push      worker -> server   what, number, version, rate, weight    then the gradient of the server's part, and of
                                 rows of each table                     each table ids and gradients of its rows
    pull      server -> worker   version, what became of contributions  then the part's parameters
    look-up   worker -> server   what, table, rows                      then ids; their rows come back

A rank that is both contributes to its own part without a message. Pushes and pulls have a group each, so that neither
waits behind the other; a server has a thread for each worker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
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
from shoal.sync.server_tables import TablePlaces

_GRADIENT, _NOTHING, _LEAVE, _LOOK_UP = 0.0, 1.0, 2.0, 3.0
_HEAD, _BODY = 0, 1  # tags
_HEAD_NUMBERS = 5
"""Beside the number of rows of each table."""


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
    """What a worker contributes: its `number`th in this round, of samples of `weight`. None: it has nothing to add.

    `rows` are the sparse gradients of tables, coalesced.
    """

    number: int
    gradient: Tensor | None
    lr: float
    weight: float = 1.0
    rows: Sequence[Tensor] = ()


class Worker:
    """The side of one worker: it contributes to every part, and reads every part when it may.

    `row` are the parameters that it read last, [numel]. `own`: the part that this rank serves. `tables`: which servers
    have which rows of each table.
    """

    def __init__(
        self,
        parts: FlatParts,
        lanes: Lanes,
        own: ServedPart,
        *,
        dtype: torch.dtype,
        tables: Sequence[TablePlaces] = (),
    ) -> None:
        self.row = torch.zeros(parts.numel, dtype=dtype)
        self._parts, self._lanes, self._own, self._rank = parts, lanes, own, lanes.push.rank
        self._tables, self._dtype = tables, dtype
        self.servers = sorted({*parts.servers, *(server for places in tables for server in places.servers)})
        numbers = _HEAD_NUMBERS + len(tables)
        self._heads = {server: torch.zeros(numbers, dtype=torch.float64) for server in self.servers}
        self._answers = {server: torch.zeros(4, dtype=torch.float64) for server in self.servers}
        self.standings: dict[int, Standing] = {}

    def begin(self) -> None:
        """A round begins: `row` is what all servers have."""
        self.standings = dict.fromkeys(self.servers, Standing())

    def awaited(self, number: int) -> list[int]:
        """The servers that have not made update `number` yet, as far as this worker knows."""
        return [server for server, standing in self.standings.items() if standing.version <= number]

    def push_pull(self, push: Push, servers: Sequence[int] | None = None) -> None:
        """Returns when every one of `servers` (None: all) has let this worker go on; `row` is then what they have.

        Raises `CollectiveError` where a server is lost.
        """
        servers = self.servers if servers is None else servers
        others = [server for server in servers if server != self._rank]
        rows = self._divided(push)
        handles = [handle for server in others for handle in self._send(server, push, rows[server])]
        if self._rank in servers:
            self._contribute_here(push, rows[self._rank])
        handles += [handle for server in others for handle in self._receive(server)]
        for handle in handles:
            handle.wait()
        for server in others:
            self.standings[server] = Standing(*map(int, self._answers[server].tolist()))
        if self._rank in servers:
            values, self.standings[self._rank] = self._own.await_release(self._rank)
            self.row[self._parts.spans[self._rank]].copy_(values)

    def look_up(self, table: int, ids: Tensor) -> Tensor:
        """The rows `ids` [n], ascending and each once, of table number `table`: [n, width], as servers have them now.

        Raises `CollectiveError` where a server is lost.
        """
        parts = self._tables[table].divided(ids)
        rows = torch.empty(len(ids), self._tables[table].width, dtype=self._dtype)
        handles: list[Handle] = []
        others = [server for server in parts if server != self._rank]
        for server in others:
            asked = ids[parts[server]]
            self._heads[server][:3] = torch.tensor([_LOOK_UP, table, len(asked)], dtype=torch.float64)
            handles.append(self._lanes.push.send(self._heads[server], to=server, tag=_HEAD))
            handles.append(self._lanes.push.send(asked, to=server, tag=_BODY))
        if self._rank in parts:
            here = parts[self._rank]
            rows[here] = self._own.look_up(self._rank, table, ids[here])
        handles += [self._lanes.pull.recv(rows[parts[server]], source=server, tag=_BODY) for server in others]
        for handle in handles:
            handle.wait()
        return rows

    def leave(self, *, in_round: bool = True) -> None:
        """Tells every server that nothing more comes. `in_round`: this worker has contributed to a round until now."""
        handles = []
        for server in self.servers:
            if server != self._rank:
                self._heads[server][0] = _LEAVE
                handles.append(self._lanes.push.send(self._heads[server], to=server, tag=_HEAD))
        for handle in handles:
            handle.wait()
        if in_round and self._rank in self._heads:
            self._own.leave(self._rank)

    def _divided(self, push: Push) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """For each server, ids and gradients of the rows of every table that are its own."""
        found: dict[int, list[tuple[Tensor, Tensor]]] = {server: [] for server in self.servers}
        gradients = push.rows if push.gradient is not None else ()
        for gradient, places in zip(gradients, self._tables, strict=False):
            ids, rows = gradient.indices()[0], gradient.values()
            parts = places.divided(ids)
            for server, own in found.items():
                part = parts.get(server, slice(0, 0))
                own.append((ids[part], rows[part]))
        return found

    def _send(self, server: int, push: Push, rows: Sequence[tuple[Tensor, Tensor]]) -> list[Handle]:
        what = _NOTHING if push.gradient is None else _GRADIENT
        head = [what, push.number, self.standings[server].version, push.lr, push.weight, *(len(ids) for ids, _ in rows)]
        head += [0.0] * (len(self._heads[server]) - len(head))
        self._heads[server].copy_(torch.tensor(head, dtype=torch.float64))
        bodies = [self._heads[server]]
        if push.gradient is not None:
            bodies += [push.gradient[self._parts.spans[server]], *(body for pair in rows for body in pair)]
        lane = self._lanes.push
        return [lane.send(one, to=server, tag=_BODY if n else _HEAD) for n, one in _filled(bodies)]

    def _receive(self, server: int) -> list[Handle]:
        bodies = [self._answers[server], self.row[self._parts.spans[server]]]
        lane = self._lanes.pull
        return [lane.recv(one, source=server, tag=_BODY if n else _HEAD) for n, one in _filled(bodies)]

    def _contribute_here(self, push: Push, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        gradient = None
        if push.gradient is not None:
            gradient = self._own.buffer().copy_(push.gradient[self._parts.spans[self._rank]])
        contribution = Contribution(self._rank, push.number, self.standings[self._rank].version)
        own = [(ids, part.clone()) for ids, part in rows]
        self._own.contribute(contribution, Sent(gradient, push.lr, push.weight, own))


class Serving:
    """The threads that serve `part` to `workers`, but to this rank itself, until all have left.

    `in_round`: they contribute to a round of it; otherwise they look rows up alone.
    """

    def __init__(self, part: ServedPart, lanes: Lanes, workers: Iterable[int], *, in_round: bool = True) -> None:
        self._part, self._lanes, self._in_round = part, lanes, in_round
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"shoal-serve-{worker}", daemon=True)
            for worker in workers
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
        """One message, and what it asks for. False: the worker has left."""
        head = torch.zeros(_HEAD_NUMBERS + len(self._part.tables), dtype=torch.float64)
        self._lanes.push.recv(head, source=worker, tag=_HEAD).wait()
        what, number, version, lr, weight, *counts = head.tolist()
        if what == _LEAVE:
            if self._in_round:
                self._part.leave(worker)
            return False
        if what == _LOOK_UP:
            rows = self._part.look_up(worker, int(number), self._received(worker, int(version)))
            self._lanes.pull.send(rows, to=worker, tag=_BODY).wait()
            return True
        gradient, rows = None, []
        if what == _GRADIENT:
            gradient = self._part.buffer()
            if len(gradient):
                self._lanes.push.recv(gradient, source=worker, tag=_BODY).wait()
            for table, count in zip(self._part.tables, counts, strict=True):
                ids = self._received(worker, int(count))
                part = table.weight.new_empty(int(count), table.weight.shape[1]).detach()
                if len(ids):
                    self._lanes.push.recv(part, source=worker, tag=_BODY).wait()
                rows.append((ids, part))
        self._part.contribute(Contribution(worker, int(number), int(version)), Sent(gradient, lr, weight, rows))
        self._release(worker)
        return True

    def _received(self, worker: int, count: int) -> Tensor:
        """Ids from `worker`, [count]."""
        ids = torch.zeros(count, dtype=torch.int64)
        if count:
            self._lanes.push.recv(ids, source=worker, tag=_BODY).wait()
        return ids

    def _release(self, worker: int) -> None:
        """Waits until `worker` may go on, and sends it the parameters."""
        values, standing = self._part.await_release(worker)
        bodies, pull = [torch.tensor(standing, dtype=torch.float64), values], self._lanes.pull
        for handle in [pull.send(one, to=worker, tag=_BODY if n else _HEAD) for n, one in _filled(bodies)]:
            handle.wait()


def _filled(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Those that hold anything, and their places: nothing is sent that is empty."""
    return [(place, tensor) for place, tensor in enumerate(tensors) if tensor.numel()]
