"""Many clients on one machine, in simulated time: events in a heap, and the state machines of the real server.

Nothing depends on the machine's speed: who is chosen, how long each takes, who drops out and in which order updates
arrive follow from the run's seed. A client trains when its update is first needed, together with all others that began
from the same model version, so that thousands of them cost a few large tensor operations.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.data.sampling import SampleSubset
from shoal.errors import EnvironmentFault
from shoal.federated.client_data import ClientData, steps_of
from shoal.federated.config import SecureAggregationConfig
from shoal.federated.population import Device, classes_of, device_of, drops_out, needs_classes, partition
from shoal.federated.privacy.accountants import Budget, chance_of, client_budget, sample_budget
from shoal.federated.privacy.mechanisms import Simulated
from shoal.federated.report import RoundFigures, figures, of_each
from shoal.federated.robust import refusal
from shoal.federated.rounds import Rounds, Ticket
from shoal.federated.secure.summing import clipped_part, fewest_in_sum, secure_mean, skellam_of
from shoal.federated.strategy import RoundPlan, Update, norms_of
from shoal.federated.task import Task
from shoal.federated.work import ClientState, ClientWork, LocalRound, ServerModel, cluster_of
from shoal.maths.counter import key_of, uniform

MOST_ATTEMPTS = 20
"""Attempts at one round, all with too few contributions, after which a simulation ends."""


class _Event(NamedTuple):
    """What happens at a time; `ticket` None: a deadline. `number` keeps events of one time in order."""

    time_s: float
    number: int
    ticket: Ticket | None


class Simulation:
    """`told` hears a sentence for each update that is refused."""

    def __init__(self, task: Task, *, told: Callable[[str], object] = str) -> None:
        self.task, self.told = task, told
        self.now_s = 0.0
        self.names = [client_name(number) for number in range(task.federated.clients)]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.states: dict[str, ClientState] = {}
        self.row = RoundFigures(1)
        self._events: list[_Event] = []
        self._number = self._turn = 0
        self._given_out: tuple[int, int] | None = None
        self._waiting: dict[int, list[Ticket]] = {}
        self._trained: dict[Ticket, tuple[Update, ClientState]] = {}
        self._from: dict[int, tuple[Tensor, RoundPlan]] = {}
        self._local = local_mask(task)
        self._data: dict[str, ClientData] = {}
        self._devices: dict[str, Device] = {}
        self.budget = budget_of(task, fewest=min(map(len, self.shards.values())))
        self.server = ServerModel(task, noise=Simulated(task.seed, "server"))
        versions = task.rounds if self.budget is None else self.budget.rounds(task.rounds)
        if versions < task.rounds:
            told(f"the budget of privacy is spent after {versions} of {task.rounds} rounds")
        poisson = chance_of(task.federated) if self.server.private is not None else None
        self.rounds = Rounds(task.federated, versions=versions, seed=task.seed, poisson=poisson)
        for name in self.names:
            self.rounds.join(name, len(self.shards[name]))

    @cached_property
    def shards(self) -> dict[str, np.ndarray]:
        """The sample ids of each client."""
        parts = shards_of(self.task)
        return dict(zip(self.names, parts, strict=True))

    def run(self, on_round: Callable[[RoundFigures], object] = str) -> list[RoundFigures]:
        """Plays all rounds. Raises `EnvironmentFault` where a round fails again and again."""
        found = []
        while not self.rounds.over:
            self._give_out()
            if self._make_next():
                self.row.values |= self._evaluated()
                found.append(self.row)
                on_round(self.row)
                self.row = RoundFigures(self.server.version + 1)
            elif self._events:
                self._next_event()
        return found

    def clients(self) -> dict[str, list[float]]:
        """Of each client its samples, the rounds in which it counted, and how well the newest model serves it on its
        own samples: of clients that keep a model or parts of their own, both that and the shared one. With several
        models also which serves the client best, from 1: its figure is of that one."""
        found = figures(self.task.trainer, self.server.model, self.task.data.train, denominator=self.task.denominator)
        name, each = of_each(found, self.shards.values())
        if self.task.federated.ditto is not None or self._local is not None:
            return self._took_part() | {"shared model": each, name: [self._own_figure(client) for client in self.names]}
        if len(self.server.strategy.models(self.server.model)) > 1:
            clusters = [self._cluster(client)[0] + 1 for client in self.names]
            return self._took_part() | {name: [self._own_figure(client) for client in self.names], "cluster": clusters}
        if self.task.corners:
            own = [self._own_figure(client) for client in self.names]
            widths = [self.task.federated.all_widths[width_of(self.task, client)] for client in self.names]
            return self._took_part() | {"shared model": each, name: own, "width": widths}
        return self._took_part() | {name: each}

    def _took_part(self) -> dict[str, list[float]]:
        return {
            "samples": [len(ids) for ids in self.shards.values()],
            "rounds": [self.rounds.turns.get(client, 0) for client in self.names],
        }

    def _own_figure(self, client: str) -> float:
        """How well a client's own model, or its own part of the model, serves it."""
        width = width_of(self.task, client)
        task, model = self.task.of_width(width), self.task.at_width(self._cluster(client)[1], width)
        samples = SampleSubset(task.data.train, self.shards[client])
        found = figures(task.trainer, model, samples, denominator=task.denominator)
        return of_each(found, [np.arange(len(samples))])[1][0]

    def _cluster(self, client: str) -> tuple[int, Tensor]:
        """Which of the models serves a client best, and what the client makes of it."""
        state = self.states.get(client, ClientState())
        models = [state.model(one, self._local) for one in self.server.strategy.models(self.server.model)]
        best = cluster_of(self.task, models, self.shards[client]) if len(models) > 1 else 0
        return best, models[best]

    def _give_out(self) -> None:
        """Work for all that may have some now."""
        if self.task.federated.asynchronous:
            for name in self._idle(self.task.federated.cohort_size - len(self.rounds.given)):
                self._begin(self.rounds.ask(name, self.now_s))
            return
        self.rounds.tick(self.now_s)
        one = self.rounds.open
        if one is None or self._given_out == (self.rounds.version, one.attempt):
            return
        self._given_out = self.rounds.version, one.attempt
        for name in one.cohort:
            self._begin(self.rounds.ask(name, self.now_s))
        self._push(self.now_s + self.task.federated.deadline_s, None)

    def _idle(self, wanted: int) -> list[str]:
        """So many clients without work, in an order that goes round all of them."""
        found: list[str] = []
        for _ in self.names if wanted > 0 else ():
            name = self.names[self._turn % len(self.names)]
            self._turn += 1
            if name not in self.rounds.given:
                found.append(name)
            if len(found) == wanted:
                break
        return found

    def _begin(self, ticket: Ticket | None) -> None:
        if ticket is None:
            return
        self.row.asked += 1
        version, number, name = ticket.version, ticket.number, ticket.client
        width = width_of(self.task, name)
        task = self.task.of_width(width)
        down_bytes = _model_bytes(task)
        self.row.down_bytes += down_bytes
        if drops_out(self.task.devices, name, seed=self.task.seed, version=version, number=number):
            self.row.lost += 1
            if self.task.federated.asynchronous:
                self.rounds.refuse(name)
            return
        if version not in self._from:
            self._from[version] = self.server.model, self.server.plan()
        self._waiting.setdefault(version, []).append(ticket)
        device = self._device(name)
        takes_s = device.round_s(
            steps=self.data_of(name).steps(self.task.federated, self.task.batch) * self._part(width),
            down_bytes=down_bytes,
            up_bytes=task.upload.nbytes(control=self.task.federated.sends_control),
        )
        self._push(self.now_s + takes_s, ticket)

    def _next_event(self) -> None:
        event = heapq.heappop(self._events)
        self.now_s = max(self.now_s, event.time_s)
        if event.ticket is not None:
            self._arrived(event.ticket)

    def _arrived(self, ticket: Ticket) -> None:
        if ticket not in self._trained:
            self._train(ticket.version)
        update, state = self._trained[ticket]
        task = self.task.of_width(update.width)
        self.row.up_bytes += task.upload.nbytes(control=task.federated.sends_control)
        sentence = refusal(update, task.federated, numel=task.model.numel())
        if sentence is not None:
            self.told(sentence)
            self.rounds.refuse(ticket.client)
        elif self.rounds.contribute(ticket, "", self.now_s) == "counted":
            self.states[ticket.client] = state
            return
        else:
            self.row.late += 1
        del self._trained[ticket]

    def _train(self, version: int) -> None:
        """Trains all that began from `version` and have not trained yet."""
        tickets = self._waiting.pop(version)
        model, plan = self._from[version]
        works = [
            ClientWork(
                t, self.data_of(t.client), self.states.get(t.client, ClientState()), width_of(self.task, t.client)
            )
            for t in tickets
        ]
        done = LocalRound(self.task, self.server.strategy, model, plan, self._local).train(works)
        self._trained |= zip(tickets, done, strict=True)

    def _make_next(self) -> bool:
        ready = self.rounds.tick(self.now_s)
        if self.rounds.attempt >= MOST_ATTEMPTS:
            raise EnvironmentFault(
                f"round {self.rounds.version + 1} had too few contributions {MOST_ATTEMPTS} times: lower "
                "federated.least or devices.dropout, or raise federated.over_selection"
            )
        if ready is None:
            return False
        updates = [
            replace(self._trained.pop(ticket)[0], chance=self.rounds.chance_of(ticket.client)) for ticket in ready
        ]
        if self.task.secure is None:
            self.row.values |= self.server.advance(updates)
        elif len(updates) >= fewest_in_sum(self.task.federated):
            self.row.values |= self.server.advance([self._secret_mean(self.task.secure, updates)])
        elif self.rounds.poisson is not None:
            ready = ()
            self._pass(len(updates))
        else:
            self.rounds.abandon(f"{len(updates)} contributions make no secret sum", self.now_s)
            return False
        if self.budget is not None:
            self.row.values["privacy/epsilon"] = self.budget.spent(self.server.version)
        self.row.time_s, self.row.counted, self.row.attempts = self.now_s, len(ready), self.rounds.attempt + 1
        self.rounds.advance(self.now_s, ready, norms_of(updates, self.task.federated))
        self.rounds.decisions()  # nobody keeps them
        alive = {ticket.version for tickets in self._waiting.values() for ticket in tickets}
        self._from = {version: kept for version, kept in self._from.items() if version in alive}
        return True

    def _pass(self, contributions: int) -> None:
        """The round passes without an update, and privacy's accountant counts it: to draw its clients again would raise
        the chance of each above what the accountant counts."""
        fewest = fewest_in_sum(self.task.federated)
        self.told(
            f"round {self.server.version + 1} passes without an update: {contributions} of at least {fewest} clients "
            "took part"
        )
        self.server.version += 1

    def _secret_mean(self, secure: SecureAggregationConfig, updates: list[Update]) -> Update:
        self.row.values["secure/clipped"] = max(clipped_part(update, secure) for update in updates)
        version = self.server.version
        return secure_mean(
            secure, self.task.federated, self.task.privacy, updates, version=version, seed=self.task.seed
        )

    def _evaluated(self) -> dict[str, float]:
        if self.server.version % self.task.federated.evaluate_every and not self.rounds.over:
            return {}
        return self.server.measured()

    def data_of(self, name: str) -> ClientData:
        """The samples of a client."""
        if name not in self._data:
            seed = self.task.seed + self.numbers[name]
            self._data[name] = data_for(self.task, self.shards[name], seed=seed)
        return self._data[name]

    def _device(self, name: str) -> Device:
        if name not in self._devices:
            self._devices[name] = device_of(self.task.devices, name, seed=self.task.seed)
        return self._devices[name]

    def _part(self, width: int) -> float:
        """How long a step of this width takes beside one of the whole model: as its numbers."""
        return self.task.of_width(width).model.numel() / self.task.model.numel()

    def _push(self, time_s: float, ticket: Ticket | None) -> None:
        self._number += 1
        heapq.heappush(self._events, _Event(time_s, self._number, ticket))


def _model_bytes(task: Task) -> int:
    """What a client is sent."""
    return task.model.numel() * task.model.element_size() * (task.federated.models + task.federated.sends_control)


def width_of(task: Task, client: str) -> int:
    """The number of a simulated client's width, each as likely as the others."""
    drawn = uniform(key_of(task.seed, "width", client), torch.zeros(1, dtype=torch.int64), dtype=torch.float64)
    return int(drawn * (1 + len(task.corners)))


def data_for(task: Task, ids: np.ndarray, *, seed: int) -> ClientData:
    """One client's samples, taken as the run file's privacy asks."""
    each = task.privacy is not None and task.privacy.unit == "sample"
    return ClientData(ids, seed=seed, shuffle=task.shuffle, each_by_chance=each)


def budget_of(task: Task, *, fewest: int) -> Budget | None:
    """The budget of the client that has the `fewest` samples; None without privacy."""
    if task.privacy is None:
        return None
    if task.privacy.unit == "client":
        noise = skellam_of(task.privacy, task.secure, task.federated, numel=task.model.numel())
        return client_budget(task.privacy, task.federated, skellam=noise)
    steps = steps_of(task.federated, fewest, task.batch)
    return sample_budget(task.privacy, batch=task.batch, samples=fewest, steps=steps)


def client_name(number: int) -> str:
    """What the simulated client `number` is called; names sort as numbers do."""
    return f"client-{number:06d}"


def shards_of(task: Task) -> list[np.ndarray]:
    """The sample ids of each client, by number."""
    source = task.data.train
    classes = classes_of(source) if needs_classes(task.partition) else None
    clients, samples = task.federated.clients, len(source)
    return partition(task.partition, clients=clients, samples=samples, classes=classes, seed=task.seed)


def local_mask(task: Task) -> Tensor | None:
    """Where parameters stay with their clients, bool [numel]; None: nowhere. Raises `ConfigError`."""
    patterns = task.federated.keep_local
    return task.trainer.layout.mask(patterns, key="federated.keep_local") if patterns else None
