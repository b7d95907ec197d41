"""What workers and servers send each other: contributions one way (push), parameters the other (pull).

    push      worker -> server   what, number, version, rate, weight,   then the gradient of the server's part, coded
                                 pushes, rows of each table             or as it is, and of each table ids and gradients
                                                                        of its rows
    pull      server -> worker   version, what became of contributions  then the part's parameters
    look-up   worker -> server   what, table, rows                      then ids; their rows come back

Of gradients and parameters only the chunks that have changed are sent (`changed_chunks`), and before them which these
are. Ranks that share memory (`SharedRows`) send no numbers where all have changed: the other side takes them where they
lie. A rank that is both contributes to its own part without a message. Pushes and pulls have a group each, so that
neither waits behind the other; a server has a thread for each worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm import volume
from shoal.comm.collective import Collective, GroupCollective, Handle
from shoal.comm.exchanges.coded_sum import CodedPushes
from shoal.comm.exchanges.exchange import Segment
from shoal.comm.ledger import Ledger
from shoal.sync.admission import Contribution
from shoal.sync.server_part import Sent, ServedPart, Standing, changed_chunks, chunks_in, elements_of
from shoal.sync.server_partition import ParameterRun
from shoal.sync.server_tables import TablePlaces

_GRADIENT, _NOTHING, _LEAVE, _LOOK_UP, _CODED, _CHUNKS, _IN_PLACE = 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0
_HEAD, _BODY = 0, 1  # tags
_HEAD_NUMBERS = 6
"""Beside the number of rows of each table."""
_ALL, _SOME, _THERE = 0.0, 1.0, 2.0  # of the parameters are in an answer; all are in the worker's row already


@dataclass(frozen=True)
class SharedRows:
    """Memory of each rank, by rank, which all ranks reach, [numel]: what it pushes, and the parameters that it read
    last, where servers write them.
    """

    gradients: Sequence[Tensor]
    parameters: Sequence[Tensor]


@dataclass(frozen=True)
class Lanes:
    """The groups of all ranks, in one order, that carry pushes and pulls; `ledger` books what they send. `coding`:
    pushes are coded by it; None: they leave as they are. `shared`: see `SharedRows`; None: ranks share no memory.
    """

    push: Collective
    pull: Collective
    ledger: Ledger
    coding: CodedPushes | None = None
    shared: SharedRows | None = None

    def book(self, values: Tensor) -> None:
        """`values` need not be sent, for the receiver has them in its reach; they count as sent."""
        self.ledger.sent("send", volume.Sent(inside_bytes=values.nbytes))


class FlatParts:
    """Tensors of a model in one row, [numel], server by server: `spans[s]` is the part of server s."""

    def __init__(self, parts: Sequence[Sequence[ParameterRun]]) -> None:
        ends = list(accumulate((sum(run.numel for run in part) for part in parts), initial=0))
        self.numel = ends[-1]
        self.spans = [slice(start, stop) for start, stop in pairwise(ends)]
        self._places = []
        at = 0
        for run in (run for part in parts for run in part):
            self._places.append((run, slice(at, at + run.numel)))
            at += run.numel

    def segments(self, names: Sequence[str]) -> list[Segment]:
        """Where each tensor lies in the row, one-dimensional: its runs follow each other."""
        found: dict[int, list[slice]] = {}
        for run, place in self._places:
            found.setdefault(run.tensor, []).append(place)
        return [Segment(names[n], own[0].start, (own[-1].stop - own[0].start,)) for n, own in sorted(found.items())]

    @property
    def servers(self) -> list[int]:
        """Those that have anything."""
        return [server for server, span in enumerate(self.spans) if span.start < span.stop]

    def pack(self, tensors: Sequence[Tensor], into: Tensor, *, divisor: int = 1) -> None:
        """Copies `tensors`, all of them, divided by `divisor`, into the row."""
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        for run, place in self._places:
            part = flat[run.tensor][run.start : run.stop]
            if divisor == 1:
                into[place].copy_(part)
            else:
                torch.div(part, divisor, out=into[place])

    def unpack(self, row: Tensor, into: Sequence[Tensor]) -> None:
        """Copies the row into the tensors, which are contiguous."""
        flat = [tensor.detach().view(-1) for tensor in into]
        for run, place in self._places:
            flat[run.tensor][run.start : run.stop].copy_(row[place])


def share_rows(lanes: Lanes, parts: FlatParts, *, dtype: torch.dtype) -> Lanes:
    """`lanes` of ranks that share memory, where they can. All ranks call it."""
    if not isinstance(lanes.push, GroupCollective):
        return lanes
    gradients, parameters = (lanes.push.shared(parts.numel, dtype=dtype) for _ in range(2))
    return replace(lanes, shared=SharedRows(gradients, parameters)) if gradients else lanes


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
        self, parts: FlatParts, lanes: Lanes, own: ServedPart, *, dtype: torch.dtype, tables: Sequence[TablePlaces] = ()
    ) -> None:
        shared = lanes.shared
        self.row = torch.zeros(parts.numel, dtype=dtype) if shared is None else shared.parameters[lanes.push.rank]
        self._parts, self._lanes, self._own, self._rank = parts, lanes, own, lanes.push.rank
        self._tables, self._dtype = tables, dtype
        self.servers = sorted({*parts.servers, *(server for places in tables for server in places.servers)})
        numbers = _HEAD_NUMBERS + len(tables)
        self._heads = {server: torch.zeros(numbers, dtype=torch.float64) for server in self.servers}
        self._answers = {server: torch.zeros(5, dtype=torch.float64) for server in self.servers}
        self.standings: dict[int, Standing] = {}
        self._on_the_wire: dict[int, list[Tensor]] = {}

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
        rows, coding = self._divided(push), self._lanes.coding
        if coding is not None and push.gradient is not None:
            coding.begin(push.gradient)
        handles = [handle for server in others for handle in self._send(server, push, rows[server])]
        if self._rank in servers:
            self._contribute_here(push, rows[self._rank])
        answers = {server: self._lanes.pull.recv(self._answers[server], source=server, tag=_HEAD) for server in others}
        for handle in handles:
            handle.wait()
        arriving = [done for server, answer in answers.items() for done in self._receive(server, answer)]
        for done in arriving:
            done()
        if self._rank in servers:
            self.standings[self._rank] = self._own.await_release(self._rank, self.row[self._parts.spans[self._rank]])

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
        coding, span = self._lanes.coding, self._parts.spans[server]
        coding = coding if span.start < span.stop else None
        what, pushes, bodies = _NOTHING, 0, []
        if push.gradient is not None and coding is not None:
            what, pushes, bodies = _CODED, coding.rounds, [coding.encoded(span, to=server)]
        elif push.gradient is not None:
            what, bodies = self._gradient_message(push.gradient, span)
        head = [what, push.number, self.standings[server].version, push.lr, push.weight, pushes]
        head += [len(ids) for ids, _ in rows]
        head += [0.0] * (len(self._heads[server]) - len(head))
        self._heads[server].copy_(torch.tensor(head, dtype=torch.float64))
        if push.gradient is not None:
            bodies += [body for pair in rows for body in pair]
        lane, bodies = self._lanes.push, [self._heads[server], *bodies]
        self._on_the_wire[server] = bodies  # none may be freed before it has left
        return [lane.send(one, to=server, tag=_BODY if n else _HEAD) for n, one in _filled(bodies)]

    def _gradient_message(self, gradient: Tensor, span: slice) -> tuple[float, list[Tensor]]:
        """What is sent of a server's part of a gradient, [numel], and its bodies."""
        part, shared = gradient[span], self._lanes.shared
        chunks = changed_chunks(part)
        if chunks is not None:
            return _CHUNKS, [chunks.to(torch.uint8), part[elements_of(chunks, len(part))]]
        if shared is not None and gradient.data_ptr() == shared.gradients[self._rank].data_ptr():
            self._lanes.book(part)
            return _IN_PLACE, []
        return _GRADIENT, [part]

    def _receive(self, server: int, answer: Handle) -> list[Callable[[], object]]:
        """Waits for the answer of a server, and begins to receive what follows it; what is left to do when it comes."""
        answer.wait()
        *standing, amount = self._answers[server].tolist()
        self.standings[server] = Standing(*map(int, standing))
        lane, part = self._lanes.pull, self.row[self._parts.spans[server]]
        if amount == _THERE:
            return []
        if amount == _ALL:
            return [lane.recv(part, source=server, tag=_BODY).wait] if len(part) else []
        changed = _received_chunks(lane, server, len(part))
        values = part.new_empty(int(changed.sum()))
        if not len(values):
            return []
        coming = lane.recv(values, source=server, tag=_BODY)

        def arrive() -> None:
            coming.wait()
            part[changed] = values

        return [arrive]

    def _contribute_here(self, push: Push, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        gradient = None
        if push.gradient is not None:
            span, coding = self._parts.spans[self._rank], self._lanes.coding
            gradient = push.gradient[span] if coding is None else coding.exact(span)
        contribution = Contribution(self._rank, push.number, self.standings[self._rank].version)
        own = [(ids, part.clone()) for ids, part in rows]
        self._own.contribute(contribution, Sent(gradient, push.lr, push.weight, own, lent=True))


class Serving:
    """The threads that serve `part`, this rank's of `parts`, to `workers`, but to this rank itself, until all have
    left.

    `in_round`: they contribute to a round of it; otherwise they look rows up alone.
    """

    def __init__(
        self, part: ServedPart, parts: FlatParts, lanes: Lanes, workers: Iterable[int], *, in_round: bool = True
    ) -> None:
        self._part, self._lanes, self._in_round = part, lanes, in_round
        self._span = parts.spans[lanes.push.rank]
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
        what, number, version, lr, weight, pushes, *counts = head.tolist()
        if what == _LEAVE:
            if self._in_round:
                self._part.leave(worker)
            return False
        if what == _LOOK_UP:
            rows = self._part.look_up(worker, int(number), self._received(worker, int(version)))
            self._lanes.pull.send(rows, to=worker, tag=_BODY).wait()
            return True
        gradient, rows = None, []
        if what in (_GRADIENT, _CODED, _CHUNKS, _IN_PLACE):
            gradient = self._received_part(worker, what, number=int(pushes))
            for table, count in zip(self._part.tables, counts, strict=True):
                ids = self._received(worker, int(count))
                part = table.weight.new_empty(int(count), table.weight.shape[1]).detach()
                if len(ids):
                    self._lanes.push.recv(part, source=worker, tag=_BODY).wait()
                rows.append((ids, part))
        sent = Sent(gradient, lr, weight, rows, lent=what == _IN_PLACE)
        self._part.contribute(Contribution(worker, int(number), int(version)), sent)
        self._release(worker)
        return True

    def _received_part(self, worker: int, what: float, *, number: int) -> Tensor:
        """The gradient from `worker`, [numel], which `what` is coming of. `number`: of its push, if that is coded."""
        coding, lane = self._lanes.coding, self._lanes.push
        if what == _IN_PLACE:
            assert self._lanes.shared is not None, "all ranks share memory, or none"
            return self._lanes.shared.gradients[worker][self._span]
        gradient = self._part.buffer()
        if what == _CODED:
            assert coding is not None, "all ranks code, or none"
            packed = torch.empty(coding.nbytes(len(gradient)), dtype=torch.uint8)
            lane.recv(packed, source=worker, tag=_BODY).wait()
            coding.decoded(packed, gradient, source=worker, number=number)
        elif what == _CHUNKS:
            there = _received_chunks(lane, worker, len(gradient))
            values = gradient.new_empty(int(there.sum()))
            if len(values):
                lane.recv(values, source=worker, tag=_BODY).wait()
            gradient.zero_()[there] = values
        elif len(gradient):
            lane.recv(gradient, source=worker, tag=_BODY).wait()
        return gradient

    def _received(self, worker: int, count: int) -> Tensor:
        """Ids from `worker`, [count]."""
        ids = torch.zeros(count, dtype=torch.int64)
        if count:
            self._lanes.push.recv(ids, source=worker, tag=_BODY).wait()
        return ids

    def _release(self, worker: int) -> None:
        """Waits until `worker` may go on, and sends it the parameters."""
        values, standing, chunks = self._part.await_changes(worker)
        amount, bodies, pull = _ALL, [values], self._lanes.pull
        if chunks is not None:
            amount, bodies = _SOME, [chunks.to(torch.uint8), values[elements_of(chunks, len(values))]]
        elif self._part.writes_rows:
            self._lanes.book(values)
            amount, bodies = _THERE, []
        bodies = [torch.tensor([*standing, amount], dtype=torch.float64), *bodies]
        for handle in [pull.send(one, to=worker, tag=_BODY if n else _HEAD) for n, one in _filled(bodies)]:
            handle.wait()


def _received_chunks(lane: Collective, source: int, numel: int) -> Tensor:
    """Which of `numel` elements are coming from `source`, bool [numel]."""
    chunks = torch.zeros(chunks_in(numel), dtype=torch.uint8)
    lane.recv(chunks, source=source, tag=_BODY).wait()
    return elements_of(chunks.bool(), numel)


def _filled(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Those that hold anything, and their places: nothing is sent that is empty."""
    return [(place, tensor) for place, tensor in enumerate(tensors) if tensor.numel()]
