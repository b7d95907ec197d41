"""A client's half of a round: from the model and the plan to an update, for one client or for many at once.

What a client keeps between rounds is a `ClientState`. The new one takes the place of the old when the server has
counted the update; an update that was lost leaves the client as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.sampling import SampleSubset
from shoal.federated.local_data import ClientData, CohortBatch, cohort_batch
from shoal.federated.own_training import ClientResult, train_own
from shoal.federated.rounds import Ticket
from shoal.federated.strategy import Outcome, Plan, Strategy, Update
from shoal.federated.task import Task
from shoal.maths.counter import key_of


@dataclass(frozen=True)
class ClientState:
    """`turn`: rounds that counted. `kept`: the strategy's [numel]; `own`: parameters that stay local; `residual`: what
    a codec has not sent yet."""

    turn: int = 0
    kept: Tensor | None = None
    own: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True)
class Work:
    """One client's part of what trains together."""

    ticket: Ticket
    data: ClientData
    state: ClientState


def train_clients(
    task: Task, strategy: Strategy, model: Tensor, plan: Plan, works: Sequence[Work], *, local: Tensor | None = None
) -> list[tuple[Update, ClientState]]:
    """The update of each piece of work, which are all from `model` [numel], and the state after it. `local` [numel]
    is True where parameters stay with their client.
    """
    order = sorted(range(len(works)), key=lambda i: works[i].data.steps(task.federated, task.batch))
    found: dict[int, tuple[Update, ClientState]] = {}
    if task.own.train is not None:
        return [_train_own(task, task.own.train, strategy, model, plan, work, local) for work in works]
    together = task.devices.together if task.trainer.private is None else 1
    for first in range(0, len(order), together):
        some = order[first : first + together]
        found |= zip(some, _train(task, strategy, model, plan, [works[i] for i in some], local), strict=True)
    return [found[index] for index in range(len(works))]


def _train(
    task: Task, strategy: Strategy, model: Tensor, plan: Plan, works: Sequence[Work], local: Tensor | None
) -> list[tuple[Update, ClientState]]:
    lr = task.rate(works[0].ticket.version + 1)
    starts = model if local is None else torch.stack([_start(model, work.state, local) for work in works])
    trained = task.trainer.train(
        starts,
        _batches(task, works),
        lr=lr,
        pull=plan.pull,
        shifts=[strategy.shift(plan, work.state.kept) for work in works],
        seed=key_of(task.seed, "local", works[0].ticket.version, works[0].ticket.client) % 2**63,
    )
    return [
        _finished(
            task,
            strategy,
            plan,
            work,
            starts,
            ClientResult(trained.deltas[i], trained.steps[i], {"loss/train": float(trained.losses[i])}),
            local,
        )
        for i, work in enumerate(works)
    ]


def _train_own(
    task: Task,
    train: Callable[..., Any],
    strategy: Strategy,
    model: Tensor,
    plan: Plan,
    work: Work,
    local: Tensor | None,
) -> tuple[Update, ClientState]:
    start, ticket = model if local is None else _start(model, work.state, local), work.ticket
    came = train_own(
        train,
        task.trainer.module,
        task.trainer.layout,
        start,
        SampleSubset(task.data.train, work.data.ids),
        round=ticket.version + 1,
        lr=task.rate(ticket.version + 1),
        seed=key_of(task.seed, "own", ticket.version, ticket.client) % 2**63,
    )
    return _finished(task, strategy, plan, work, start[None], came, local)


def _finished(
    task: Task,
    strategy: Strategy,
    plan: Plan,
    work: Work,
    starts: Tensor,
    came: ClientResult,
    local: Tensor | None,
) -> tuple[Update, ClientState]:
    delta, steps, own = came.delta, came.steps, None
    if local is not None:
        start = starts[0] if work.state.own is None else torch.where(local, work.state.own, starts[0])
        own = torch.where(local, start + delta, 0.0)
        delta = delta.masked_fill(local, 0.0)
    sgd, lr = task.trainer.sgd, task.rate(work.ticket.version + 1)
    kept, control = strategy.finish(plan, work.state.kept, Outcome(delta, max(1, steps), lr, sgd.momentum))
    ticket = work.ticket
    sent = task.upload.encode(delta, work.state.residual, client=ticket.client, version=ticket.version)
    update = Update(
        client=work.ticket.client,
        version=work.ticket.version,
        samples=len(work.data),
        delta=sent.arrives,
        payload=sent.payload,
        steps=max(1, steps),
        momentum=sgd.momentum,
        control=control,
        metrics=came.figures,
    )
    return update, ClientState(work.state.turn + 1, kept, own, sent.residual)


def _start(model: Tensor, state: ClientState, local: Tensor) -> Tensor:
    return model if state.own is None else torch.where(local, state.own, model)


def _batches(task: Task, works: Sequence[Work]) -> Iterator[CohortBatch]:
    """The local steps; a client that has taken all of its own stands by while others go on."""
    steps = [work.data.steps(task.federated, task.batch) for work in works]
    none = np.empty(0, dtype=np.int64)
    for step in range(max(steps)):
        active = [step < own for own in steps]
        rows = [
            work.data.samples_of_step(task.federated, task.batch, turn=work.state.turn, step=step) if goes_on else none
            for work, goes_on in zip(works, active, strict=True)
        ]
        batch = max(1, *map(len, rows))
        yield cohort_batch(task.data.train, rows, batch=batch, denominator=task.denominator, active=active)
