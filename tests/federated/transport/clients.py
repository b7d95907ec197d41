"""Clients of a `Host` without a network, and a disk on which the server dies between any two writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shoal.federated.rounds import Ticket
from shoal.federated.secure.client import SecureClient
from shoal.federated.secure.messages import Roster, Sealed, Survivors
from shoal.federated.secure.summing import encoded, largest_norm_of
from shoal.federated.simulation import client_name, data_for, shards_of, width_of
from shoal.federated.strategy import RoundPlan
from shoal.federated.task import Task
from shoal.federated.transport import messages
from shoal.federated.transport.host import Host, session_of, strategy_of
from shoal.federated.transport.store import ClientStore, Store, digest_of
from shoal.federated.work import ClientState, ClientWork, LocalRound, ServerModel


class Killed(BaseException):
    """The server's process is gone."""


class DyingStore(Store):
    """Raises `Killed` at write `dies_at`, before it or after it. `writes` counts."""

    def __init__(self, directory: Path, dies_at: int = 10**9, *, after: bool = False) -> None:
        super().__init__(directory)
        self.writes, self.dies_at, self.after = 0, dies_at, after
        append = self.journal.append
        self.journal.append = lambda decisions: self._write(append, decisions)  # type: ignore[method-assign]

    def _write(self, function: Any, *arguments: Any) -> None:
        self.writes += 1
        if self.writes == self.dies_at and not self.after:
            raise Killed
        function(*arguments)
        if self.writes == self.dies_at:
            raise Killed

    def write_model(self, *arguments: Any) -> None:
        self._write(super().write_model, *arguments)

    def accept(self, *arguments: Any) -> None:
        self._write(super().accept, *arguments)

    def clean(self, *arguments: Any) -> None:
        self._write(super().clean, *arguments)

    def note(self, *arguments: Any) -> None:
        self._write(super().note, *arguments)


class ClientKilled(BaseException):
    """A client's process is gone."""


class LocalClient:
    """A client that calls the host's methods. `between` is called wherever it may be killed."""

    def __init__(
        self, task: Task, number: int, directory: Path, *, between: Callable[[], object] = lambda: None
    ) -> None:
        self.between = between
        self.name, self._layout = client_name(number), task.trainer.layout.fingerprint
        self.width = width_of(task, self.name)
        self.task = task.of_width(self.width)
        self.data = data_for(task, shards_of(task)[number], seed=task.seed + number)
        self.store = ClientStore(directory / self.name)
        self.strategy = self.task.strategy()
        self.secure: tuple[messages.Train, SecureClient, np.ndarray] | None = None

    def join(self, host: Host) -> messages.Answer:
        said = messages.Join(len(self.data), self._layout, strategy_of(self.task))
        return host.join(self.name, said)

    def act(self, host: Host) -> None:
        """One exchange with the host."""
        if self.secure is not None:
            self._say(host)
            return
        answer = host.work(self.name)
        if isinstance(answer, messages.Refusal):
            self.join(host)
        if not isinstance(answer, messages.Train):
            return
        state = self.store.state(turn=answer.turn, last=answer.last)
        path = host.store.model_path(answer.ticket.version, self.width)
        model = messages.read_frame(path, messages.ModelHeader)
        plan = RoundPlan(model.header.pull, model.vectors.get("control"), others=model.vectors.get("others"))
        work = ClientWork(answer.ticket, self.data, state)
        self.between()
        update, after = LocalRound(self.task, self.strategy, model.vectors["model"].clone(), plan).train([work])[0]
        self.store.keep(answer.ticket, after)
        self.between()
        if answer.secret is not None and host.secret is not None:
            norm = largest_norm_of(self.task.privacy)
            vector = encoded(update, host.secret.quantiser, self.task.federated, largest_norm=norm)
            session = session_of(self.task.seed, answer.ticket.version, answer.ticket.number)
            secure = SecureClient(self.name, session, least=2)
            self.secure = answer, secure, vector
            host.secret.say(self.name, secure.keys(), host.clock())
            return
        named = {f"update.{i}": vector for i, vector in enumerate(update.payload)}
        named |= {} if update.control is None else {"control": update.control}
        header = messages.UpdateHeader(
            parts=tuple(messages.part_of(name, vector) for name, vector in named.items()),
            samples=update.samples,
            steps=update.steps,
            cluster=update.cluster,
            width=self.width,
            metrics=dict(update.metrics),
        )
        path = host.store.part_path(answer.ticket)
        messages.write_frame(path, header, list(named.values()))
        digest = digest_of(path)
        self.between()
        sentence = host.check(answer.ticket, path, digest)
        assert sentence is None, sentence
        host.count(answer.ticket, digest)
        self.between()

    def _say(self, host: Host) -> None:
        assert self.secure is not None
        train, secure, vector = self.secure
        secret, now_s = host.secret, host.clock()
        if secret is None or (secret.version, secret.attempt) != (train.ticket.version, train.ticket.number):
            self.secure = None
            return
        self.between()
        match secret.server.message_for(self.name):
            case Roster() as roster:
                secret.say(self.name, secure.shares(roster), now_s)
            case Sealed() as sealed:
                secret.server.take_vector(self.name, secure.masked(sealed, vector), now_s)
            case Survivors() as survivors:
                secret.say(self.name, secure.revealed(survivors), now_s)
        host.note_revealing()


class Run:
    """A server that is started again when it dies, and its clients."""

    def __init__(self, task: Task, directory: Path, *, kills: random.Random | None = None, chance: float = 0.0) -> None:
        """`kills` draws the moments at which clients are killed, each with this chance."""
        self.task, self.directory, self.now_s, self.starts = task, directory, 0.0, 0
        self.told: list[str] = []
        self.kills, self.chance, self.killed = kills, chance, 0
        self.clients = [self._client(number) for number in range(task.federated.clients)]

    def _client(self, number: int) -> LocalClient:
        return LocalClient(self.task, number, self.directory / "clients", between=self._between)

    def _between(self) -> None:
        if self.kills is not None and self.kills.random() < self.chance:
            raise ClientKilled

    def _act(self, number: int, host: Host) -> None:
        """A client acts; where it is killed, another process of its name joins."""
        try:
            self.clients[number].act(host)
        except ClientKilled:
            self.killed += 1
            self.clients[number] = self._client(number)
            self.clients[number].join(host)

    def play(self, dies_at: list[int], *, after: bool = False, most: int = 2000) -> Host:
        """Until the run is over; each start of the server dies at the next of these writes, while there are some."""
        left, host = list(dies_at), None
        for _ in range(most):
            try:
                host = host or self._start(left.pop(0) if left else 10**9, after=after)
                if host.rounds.over:
                    host.close()
                    return host
                for number in range(len(self.clients)):
                    self._act(number, host)
                if (ready := host.tick()) is not None:
                    host.compute(ready)
                    host.finish(ready)
                self.now_s += 0.1
            except Killed:
                if host is not None:
                    host.close()
                else:
                    self.store.journal.close()
                host = None
        raise AssertionError("the run did not end")

    def _start(self, dies_at: int, *, after: bool) -> Host:
        self.starts += 1
        self.store = DyingStore(self.directory / "server", dies_at, after=after)
        host = Host(self.task, self.store, clock=lambda: self.now_s, told=self.told.append, silence_s=1e9)
        for client in self.clients:
            client.join(host)
        return host


def replayed(task: Task, used: Iterable[Ticket]) -> Tensor:
    """The model of these contributions, made without a server: each is trained from the model of its version and from
    what its client kept after its last one, and those of a version are averaged in the clear."""
    plain = replace(task, secure=None)
    server, states = ServerModel(plain), dict[str, ClientState]()
    by_version: dict[int, list[Ticket]] = {}
    for ticket in sorted(used):
        by_version.setdefault(ticket.version, []).append(ticket)
    data = {client_name(i): data_for(task, ids, seed=task.seed + i) for i, ids in enumerate(shards_of(task))}
    for version in range(task.rounds):
        plan, updates = server.plan(), []
        for ticket in by_version.get(version, []):
            state = states.get(ticket.client, ClientState())
            work = ClientWork(ticket, data[ticket.client], state, width_of(task, ticket.client))
            trained = LocalRound(task, server.strategy, server.model.clone(), plan).train([work])
            update, states[ticket.client] = trained[0]
            updates.append(update)
        if updates:
            server.advance(updates)
        server.version = version + 1
    return server.model
