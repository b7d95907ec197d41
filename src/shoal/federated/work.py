"""Both halves of a round, without I/O: at a client from model and plan to an update, at the server from updates to a
model. The simulation and the two ends over TLS hold them.

What a client keeps between rounds is a `ClientState`. The new one takes the place of the old when the server has
counted the update; an update that was lost leaves the client as it was. The `state` of a `ServerModel` is what has to
survive a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.sample import Source
from shoal.data.sampling import SampleSubset
from shoal.errors import EnvironmentFault
from shoal.federated.client_data import ClientData, order_rounds
from shoal.federated.local_training import CohortBatch, Trained, cohort_batch
from shoal.federated.privacy.accountants import chance_of
from shoal.federated.privacy.mechanisms import Noise, PrivateMean, from_entropy
from shoal.federated.report import figures
from shoal.federated.rounds import Ticket
from shoal.federated.strategy import Outcome, RoundPlan, Strategy, Update
from shoal.federated.task import ClientResult, OwnTurn, Task, train_own
from shoal.maths.counter import key_of


@dataclass(frozen=True)
class ClientState:
    """`turn`: rounds that counted. `kept`: the strategy's [numel]; `own`: parameters that stay local; `residual`: what
    a codec has not sent yet; `personal`: the client's own model (Ditto); `cluster`: whose model it trained last."""

    turn: int = 0
    kept: Tensor | None = None
    own: Tensor | None = None
    residual: Tensor | None = None
    personal: Tensor | None = None
    cluster: int = 0

    def model(self, shared: Tensor, local: Tensor | None) -> Tensor:
        """What the client would use, of the `shared` model [numel] and what it keeps; `local` is True where that is."""
        if self.personal is not None:
            return self.personal
        return shared if local is None or self.own is None else torch.where(local, self.own, shared)


@dataclass(frozen=True)
class ClientWork:
    """One client's part of what trains together. `width`: the number of its model's width."""

    ticket: Ticket
    data: ClientData
    state: ClientState
    width: int = 0

    def in_cluster(self, cluster: int) -> ClientWork:
        """The same of a client that trains the model `cluster`. If it trained another before, what a codec has not sent
        yet was meant for that one."""
        return self if self.state.cluster == cluster else replace(self, state=replace(self.state, residual=None))


@dataclass(frozen=True)
class LocalRound:
    """What clients train from: `model` [numel] and the strategy's `plan` for it. `local` [numel] is True where
    parameters stay with their client."""

    task: Task
    strategy: Strategy
    model: Tensor
    plan: RoundPlan
    local: Tensor | None = None

    def train(self, works: Sequence[ClientWork]) -> list[tuple[Update, ClientState]]:
        """The update of each piece of work, and its client's state after it."""
        if self.plan.others is not None:
            return self._in_clusters(works)
        if self.task.corners:
            return self._by_width(works)
        task, train = self.task, self.task.own.train
        if train is not None:
            return [self._finished(work, *self._own(train, work)) for work in works]
        order = sorted(range(len(works)), key=lambda i: works[i].data.steps(task.federated, task.batch))
        together = task.devices.together if task.trainer.private is None else 1
        found: dict[int, tuple[Update, ClientState]] = {}
        for first in range(0, len(order), together):
            some = order[first : first + together]
            found |= zip(some, self._together([works[i] for i in some]), strict=True)
        return [found[index] for index in range(len(works))]

    def _in_clusters(self, works: Sequence[ClientWork]) -> list[tuple[Update, ClientState]]:
        """Each client trains that of the round's models which serves it best; those of one model train together."""
        assert self.plan.others is not None
        models = [self.model, *self.plan.others.view(-1, self.model.numel())]
        chosen = [
            cluster_of(self.task, [work.state.model(one, self.local) for one in models], work.data.ids)
            for work in works
        ]
        found: dict[int, tuple[Update, ClientState]] = {}
        for cluster in sorted(set(chosen)):
            places = [place for place, one in enumerate(chosen) if one == cluster]
            its = replace(self, model=models[cluster], plan=replace(self.plan, others=None))
            done = its.train([works[place].in_cluster(cluster) for place in places])
            for place, (update, state) in zip(places, done, strict=True):
                found[place] = replace(update, cluster=cluster), replace(state, cluster=cluster)
        return [found[place] for place in range(len(works))]

    def _by_width(self, works: Sequence[ClientWork]) -> list[tuple[Update, ClientState]]:
        """Clients of one width train its corner of the model together."""
        found: dict[int, tuple[Update, ClientState]] = {}
        for width in sorted({work.width for work in works}):
            places = [place for place, work in enumerate(works) if work.width == width]
            task, model = replace(self.task.of_width(width), corners=()), self.task.at_width(self.model, width)
            done = replace(self, task=task, model=model).train([works[place] for place in places])
            for place, (update, state) in zip(places, done, strict=True):
                found[place] = replace(update, width=width), state
        return [found[place] for place in range(len(works))]

    def _together(self, works: Sequence[ClientWork]) -> list[tuple[Update, ClientState]]:
        """The run file's local steps, of all these clients at once."""
        task, strategy, plan, model = self.task, self.strategy, self.plan, self.model
        starts = model if self.local is None else torch.stack([work.state.model(model, self.local) for work in works])
        version, first = works[0].ticket.version, works[0].ticket.client
        lr, seed = task.rate(version + 1), key_of(task.seed, "local", version, first) % 2**63
        shifts = [strategy.shift(plan, work.state.kept) for work in works]
        trained = self._steps(works, starts, lr=lr, pull=plan.pull, shifts=shifts, seed=seed)
        done = []
        for i, work in enumerate(works):
            came = ClientResult(trained.deltas[i], trained.steps[i], {"loss/train": float(trained.losses[i])})
            done.append(self._finished(work, starts[i] if starts.ndim == 2 else starts, came))
        if task.federated.ditto is None:
            return done
        personal = self._personal(works, lr=lr, seed=seed, pull=task.federated.ditto)
        return [(update, replace(state, personal=one)) for (update, state), one in zip(done, personal, strict=True)]

    def _personal(self, works: Sequence[ClientWork], *, lr: float, seed: int, pull: float) -> Tensor:
        """The clients' own models [clients, numel] after as many steps, pulled to the shared one (Ditto)."""
        start = torch.stack([work.state.model(self.model, None) for work in works])
        none = [None] * len(works)
        moved = self._steps(works, start, lr=lr, pull=pull, shifts=none, anchor=self.model, seed=seed)
        return start + moved.deltas

    def _steps(
        self,
        works: Sequence[ClientWork],
        starts: Tensor,
        *,
        lr: float,
        pull: float,
        shifts: Sequence[Tensor | None],
        seed: int,
        anchor: Tensor | None = None,
    ) -> Trained:
        """The local steps from `starts`, [numel] or [clients, numel], of all clients at once or by one's ranks."""
        task = self.task
        if task.replica is None:
            batches = _batches(task, works)
            return task.trainer.train(starts, batches, lr=lr, pull=pull, shifts=shifts, anchor=anchor, seed=seed)
        (work,), (shift,) = works, shifts
        rows = [row for (row,), _ in _rows(task, works)]
        start, first = starts.view(-1), 1 + work.state.turn * len(rows)
        return task.replica.train(start, rows, lr=lr, first=first, pull=pull, shift=shift, anchor=anchor)

    def _own(self, train: Callable[..., Any], work: ClientWork) -> tuple[Tensor, ClientResult]:
        """Where a client begins, and what the user's training came to."""
        task, ticket, start = self.task, work.ticket, work.state.model(self.model, self.local)
        turn = OwnTurn(
            round=ticket.version + 1,
            lr=task.rate(ticket.version + 1),
            seed=key_of(task.seed, "own", ticket.version, ticket.client) % 2**63,
            client=ticket.client,
            settings=self.plan.settings,
        )
        return start, train_own(train, task.trainer, start, SampleSubset(task.data.train, work.data.ids), turn)

    def _finished(self, work: ClientWork, start: Tensor, came: ClientResult) -> tuple[Update, ClientState]:
        """What a client sends of what it trained from `start` [numel], and what it keeps."""
        task, ticket, state = self.task, work.ticket, work.state
        delta, steps, own = came.delta, max(1, came.steps), None
        if self.local is not None:
            own = torch.where(self.local, start + delta, 0.0)
            delta = delta.masked_fill(self.local, 0.0)
        lr, momentum = task.rate(ticket.version + 1), task.trainer.sgd.momentum
        kept, control = self.strategy.finish(self.plan, state.kept, Outcome(delta, steps, lr, momentum))
        residual = state.residual
        if residual is not None and residual.shape != delta.shape:  # of a client that had another width
            residual = None
        sent = task.upload.encode(delta, residual, client=ticket.client, version=ticket.version)
        update = Update(
            client=ticket.client,
            version=ticket.version,
            samples=len(work.data),
            delta=sent.arrives,
            payload=sent.payload,
            steps=steps,
            momentum=momentum,
            control=control,
            metrics=came.figures,
        )
        return update, ClientState(state.turn + 1, kept, own, sent.residual)


def cluster_of(task: Task, models: Sequence[Tensor], ids: np.ndarray) -> int:
    """Which of `models` [numel] each has the lowest mean loss on the samples `ids` (IFCA, arXiv:2006.04088, algorithm
    1, line 7); the first of equal ones."""
    if task.replica is not None:
        return _best([task.replica.measured(model, ids) for model in models])
    samples = SampleSubset(task.data.train, ids)
    return _best([_means(task, model, samples) for model in models])


def _best(means: Sequence[Mapping[str, float]]) -> int:
    """The place of the lowest loss that is finite."""
    losses = [one["loss/eval"] for one in means]
    return int(np.argmin([loss if math.isfinite(loss) else np.inf for loss in losses]))


def _means(task: Task, model: Tensor, samples: Source) -> dict[str, float]:
    return figures(task.trainer, model, samples, denominator=task.denominator).means()


def _batches(task: Task, works: Sequence[ClientWork]) -> Iterator[CohortBatch]:
    """The local steps of several clients."""
    for rows, active in _rows(task, works):
        batch = max(1, *map(len, rows))
        yield cohort_batch(task.data.train, rows, batch=batch, denominator=task.denominator, active=active)


def _rows(task: Task, works: Sequence[ClientWork]) -> Iterator[tuple[list[np.ndarray], list[bool]]]:
    """Of each local step the sample ids of every client, and whether it takes the step: one that has taken all of its
    own stands by while others go on."""
    steps = [work.data.steps(task.federated, task.batch) for work in works]
    none = np.empty(0, dtype=np.int64)
    if not works[0].data.each_by_chance:
        data, turns = [work.data for work in works], [work.state.turn for work in works]
        order_rounds(data, task.federated, task.batch, turns=turns)
    for step in range(max(steps)):
        active = [step < own for own in steps]
        rows = [
            work.data.samples_of_step(task.federated, task.batch, turn=work.state.turn, step=step) if goes_on else none
            for work, goes_on in zip(works, active, strict=True)
        ]
        yield rows, active


MODEL, CLIP = "model", "privacy/clip"


class ServerModel:
    """`version` counts the models that were made from updates. `noise`: of differential privacy, if there is any."""

    def __init__(self, task: Task, *, noise: Noise = from_entropy) -> None:
        self.task, self.version = task, 0
        self.model = task.model.clone()
        self.strategy = task.strategy()
        self.private: PrivateMean | None = None
        if task.privacy is not None and task.privacy.unit == "client":
            expected = chance_of(task.federated) * task.federated.clients
            self.private = PrivateMean(task.privacy, expected=expected, noise=noise)

    def plan(self) -> RoundPlan:
        """What clients of the present version get beside the model."""
        self.strategy.begin(self.model, version=self.version)
        return self.strategy.configure()

    def advance(self, updates: Sequence[Update]) -> dict[str, float]:
        """Makes the next model from the updates, in their order. Returns the means of what clients measured,
        those that are finite.

        Raises `EnvironmentFault` where the model is not finite afterwards; it is then what it was.
        """
        figures = {name: mean for name, mean in self.strategy.evaluate(updates).items() if math.isfinite(mean)}
        if self.private is not None:
            updates = [self._hidden(updates, self.private)]
        kept = dict(self.strategy.kept)
        model = self.strategy.aggregate(self.model, updates, version=self.version) if updates else self.model
        if not all(bool(torch.isfinite(one).all()) for one in self.strategy.models(model)):
            self.strategy.kept = kept
            raise EnvironmentFault(
                f"the model of version {self.version + 1} is not finite, though every update was: lower "
                "federated.server_lr"
            )
        self.model, self.version = model, self.version + 1
        return figures

    def measured(self) -> dict[str, float]:
        """Loss and accuracy on held-out data, and what the user's own evaluation says; of several models that which
        serves the held-out data best."""
        task, model, found = self.task, self.model, {}
        if task.data.held_out is not None:
            each = [(one, _means(task, one, task.data.held_out)) for one in self.strategy.models(model)]
            model, found = each[_best([figure for _, figure in each])]
        return found | task.own.measured(task.trainer.module, task.trainer.layout, model)

    def _hidden(self, updates: Sequence[Update], private: PrivateMean) -> Update:
        if self.task.secure is not None and updates:
            return private.of_sum(updates[0], like=self.model, version=self.version)
        return private.mean(updates, like=self.model, version=self.version)

    def parameters(self) -> list[dict[str, Tensor]]:
        """The parameters of each model, by name."""
        return [self.task.trainer.layout.views(one) for one in self.strategy.models(self.model)]

    def state(self) -> dict[str, Tensor]:
        """The model and what the strategy keeps."""
        clip = {} if self.private is None else {CLIP: torch.tensor([self.private.clip], dtype=torch.float64)}
        kept = {f"strategy/{name}": one for name, one in self.strategy.kept.items()}
        return {MODEL: self.model, **clip, **kept}

    def load(self, state: Mapping[str, Tensor], *, version: int) -> None:
        """Goes on from a `state`."""
        self.model, self.version = state[MODEL].clone(), version
        if self.private is not None:
            self.private.clip = float(state[CLIP])
        prefix = "strategy/"
        self.strategy.kept = {n.removeprefix(prefix): t.clone() for n, t in state.items() if n.startswith(prefix)}
