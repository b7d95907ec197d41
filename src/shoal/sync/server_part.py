"""`ServedPart`: the part of the parameters that one server has, and what it does with contributions to it.

Threads bring contributions, one for each worker; the rule of `admission` says which of them make an update, and who may
read. An update is the mean of its contributions, weighted by what their samples weigh and added in the order of the
workers, so that the same contributions make the same bits; an asynchronous one is a share of the gradient of the global
batch: the worker has divided it by the number of workers, and here its weight is compared with those that all sent
last, or are about to send. So all rules move the parameters equally far for the same samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoal.errors import CollectiveError
from shoal.sync.admission import Accounts, Contribution, Effects, Rule, Update, staleness_of
from shoal.sync.event_order import CONTRIBUTE, LEAVE, LOOK_UP, READ, AsTheyCome, EventOrder
from shoal.sync.server_tables import ServedTable

# What an old contribution is worth. tau is the number of updates made since its worker read the parameters.
#
#     plain        g
#     scaled       g / max(1, tau)                       Zhang et al. 2015, arXiv:1511.05950, section 3.2
#     compensated  g + strength * g * g * (x - x_old)    DC-ASGD, Zheng et al. 2016, arXiv:1609.08326, equation 10
#
# x are the parameters that the contribution meets and x_old those that it was computed from; the product is
# elementwise, and g * g stands for the diagonal of the Hessian. With strength = 0, or x = x_old, "compensated" is
# "plain".


def scaled_by_staleness(gradient: Tensor, tau: int) -> Tensor:
    """`gradient` / max(1, tau); itself where that changes nothing."""
    return gradient / tau if tau > 1 else gradient


def compensated(gradient: Tensor, now: Tensor, then: Tensor, *, strength: float) -> Tensor:
    """`gradient` + strength * g * g * (now - then). All have one shape.

    `now` are the parameters that it will update, `then` those that it was computed from.
    """
    return gradient.addcmul(gradient.square(), now - then, value=strength)


# Which chunks of a row of numbers have changed: pushes and pulls leave the others out.
#
#     push    chunks of the gradient that are not all zero
#     pull    chunks of the parameters that differ from what the worker read before
#
# A chunk is `CHUNK` elements; the last one may be shorter. Where the first element of every chunk has changed, all are
# taken as changed without another look: that is the usual case, and costs one element in `CHUNK`.


CHUNK = 256
"""Elements: a bit in 2,048 of float64, and small beside a layer."""


def changed_chunks(now: Tensor, before: Tensor | None = None) -> Tensor | None:
    """Bool [chunks] for `now` [numel] beside `before` [numel] (None: zeros); None: all have changed.

    What is not a number has changed.
    """
    if not bool((now[::CHUNK] == (0 if before is None else before[::CHUNK])).any()):
        return None
    differs = now != (0 if before is None else before)
    whole = len(now) // CHUNK * CHUNK
    chunks = differs[:whole].view(-1, CHUNK).any(1)
    if whole < len(now):
        chunks = torch.cat([chunks, differs[whole:].any()[None]])
    return None if bool(chunks.all()) else chunks


def elements_of(chunks: Tensor, numel: int) -> Tensor:
    """Bool [numel]: the elements of `chunks`, bool [chunks]."""
    return chunks.repeat_interleave(CHUNK)[:numel]


def chunks_in(numel: int) -> int:
    """Chunks of a row of `numel`."""
    return -(-numel // CHUNK)


StalenessPolicy = Literal["plain", "scaled", "compensated"]


class Merge(NamedTuple):
    """How contributions become a gradient: by their mean, or, if an update `adds` shares of a global batch's, by their
    sum.

    `staleness` and `strength`: see `shoal.sync.server_part`. Of a share of 1 / n, the strength is n times as large.
    """

    adds: bool = False
    staleness: StalenessPolicy = "plain"
    strength: float = 0.0


class Sent(NamedTuple):
    """A contribution's gradient of this part, [numel], the learning rate that it was made for, and the weight of its
    samples. `rows`: for each table, the ids [n] of rows that this server has, and their gradients [n, width].

    None: the worker's gradient was not finite; it takes part in the update and adds nothing. `lent`: the gradient is
    the worker's own memory, which changes once `contribute` has returned; else it came from `ServedPart.buffer`.
    """

    gradient: Tensor | None
    lr: float
    weight: float = 1.0
    rows: Sequence[tuple[Tensor, Tensor]] = ()
    lent: bool = False


class Standing(NamedTuple):
    """What a worker learns with its read: the part's version, and what became of its contributions of this round."""

    version: int = 0
    counted: int = 0
    dropped: int = 0
    staleness: int = 0


class ServedPart:
    """`values` are its parameters, [numel]. `step` makes an update of `values` at a learning rate from a gradient,
    [numel], which may be memory of a worker, and of `tables` from the sparse gradients of their weights. `rows`: by
    worker, where it has the parameters that it read last, [numel]; none: the part keeps copies of what they read.

    A round is what happens between two agreements of all workers. Methods may be called from any thread; where a
    round repeats another one, they wait for their turn.
    """

    def __init__(
        self, values: Tensor, *, merge: Merge, tables: Sequence[ServedTable] = (), rows: Sequence[Tensor] = ()
    ) -> None:
        self.values, self.tables = values, tables
        self.step: Callable[[float, Tensor], None] | None = None
        self._merge = merge
        self._changed = threading.Condition()
        self._rule: Rule | None = None
        self._order: EventOrder = AsTheyCome()
        self._accounts = Accounts()
        self._sent: dict[Contribution, Sent] = {}
        self._spare: list[Tensor] = []
        self._rows, self._read = rows, dict(enumerate(rows))
        self._gradient: Tensor | None = None
        self._released: set[int] = set()
        self._failed: BaseException | None = None
        self._weights: dict[int, float] = {}
        self._reached = 0

    def begin(
        self, rule: Rule, values: Tensor, *, weights: Mapping[int, float] | None = None, order: EventOrder | None = None
    ) -> None:
        """A round begins, from these values, [numel]; all workers have read them. `weights`: what the samples of each
        worker's first contribution weigh. `order`: who may do what when.
        """
        with self._changed:
            self._order = order or AsTheyCome()
            self.values.copy_(values)
            self._rule, self._accounts, self._reached = rule, Accounts(), 0
            self._sent, self._released, self._weights = {}, set(), dict(weights or {})
            for worker in () if self._rows else rule.present:
                self._read.setdefault(worker, torch.empty_like(values)).copy_(values)

    def buffer(self) -> Tensor:
        """Memory for a gradient, [numel], until its contribution has been used."""
        with self._changed:
            return self._spare.pop() if self._spare else torch.empty_like(self.values)

    def contribute(self, contribution: Contribution, sent: Sent) -> None:
        """A contribution is here; `await_release` says when its worker may go on."""
        with self._turn(f"{CONTRIBUTE}{contribution.worker}"):
            self._sent[contribution] = sent
            self._reached = max(self._reached, contribution.number + 1)
            if sent.gradient is not None:  # else its next one counts as much as its last
                self._weights[contribution.worker] = sent.weight
            effects = self._present_rule.arrive(contribution)
            self._accounts.followed(effects, now_s=0.0)  # how long it waits, the worker measures itself
            self._follow(effects)
            if sent.lent and sent.gradient is not None and contribution in self._sent:  # it waits for others
                kept = self.buffer().copy_(sent.gradient)
                self._sent[contribution] = sent._replace(gradient=kept, lent=False)

    def await_release(self, worker: int, into: Tensor) -> Standing:
        """Blocks until `worker` may read, and copies the parameters, [numel], to where it wants them.

        Raises `CollectiveError` if another thread of this server had to give up.
        """
        with self._turn(f"{READ}{worker}", lambda: worker in self._released):
            into.copy_(self.values)
            if self._merge.staleness == "compensated" and not self._rows:
                self._read[worker].copy_(self.values)
            return self._read_by(worker)

    def await_changes(self, worker: int) -> tuple[Tensor, Standing, Tensor | None]:
        """The same, but what it returns stays as it is until the next read of `worker`, and which chunks of it have
        changed since the read before (`changed_chunks`). A worker reads in one of the two ways.
        """
        with self._turn(f"{READ}{worker}", lambda: worker in self._released):
            chunks = changed_chunks(self.values, self._read[worker])
            return self._read[worker].copy_(self.values), self._read_by(worker), chunks

    def _read_by(self, worker: int) -> Standing:
        """It waits for nothing any more."""
        self._released.discard(worker)
        account = self._accounts.of(worker)
        return Standing(self._present_rule.version, account.counted, account.dropped, account.staleness)

    def look_up(self, worker: int, table: int, ids: Tensor) -> Tensor:
        """The rows `ids` [n] of a table as they are now, [n, width]."""
        with self._turn(f"{LOOK_UP}{worker}"):
            return self.tables[table].look_up(ids)

    def leave(self, worker: int) -> None:
        """`worker` has made all its contributions of this round."""
        with self._turn(f"{LEAVE}{worker}"):
            self._follow(self._present_rule.leave(worker))

    def fail(self, error: BaseException) -> None:
        """A thread cannot go on: those that wait raise."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()

    @property
    def writes_rows(self) -> bool:
        """Whether what a worker reads is where that worker has it."""
        return bool(self._rows)

    @property
    def reached(self) -> int:
        """The steps of this round that the worker furthest ahead has contributed to."""
        with self._changed:
            return self._reached

    @property
    def version(self) -> int:
        """The updates made in this round."""
        with self._changed:
            return self._present_rule.version

    def end(self) -> Tensor:
        """All workers have left: the parameters, [numel]. Raises `CollectiveError`: see `await_release`."""
        with self._changed:
            self._check()
            self._order = AsTheyCome()  # what is looked up between two rounds changes nothing
            return self.values

    def check(self) -> None:
        """Raises `CollectiveError` where a thread of this server had to give up."""
        with self._changed:
            self._check()

    @contextmanager
    def _turn(self, event: str, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Holds the lock when it is the turn of `event`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or (when() and self._order.may(event)))
            self._check()
            yield
            self._order.happened(event)
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failed is not None:
            raise CollectiveError(f"this rank can serve its parameters no longer: {self._failed}") from self._failed

    @property
    def _present_rule(self) -> Rule:
        assert self._rule is not None, "a round has begun"
        return self._rule

    def _follow(self, effects: Effects) -> None:
        for update in effects.updates:
            self._make(update)
        if effects.dropped is not None:
            self._forget(effects.dropped)
        self._released.update(effects.released)
        self._changed.notify_all()

    @torch.no_grad()
    def _make(self, update: Update) -> None:
        ordered = sorted(update.contributions)
        counted = [c for c in ordered if self._sent[c].gradient is not None]
        if counted:
            mean = self._mean_weight(counted)
            gradient = self._merged([self._weighed(c, staleness_of(c, update), mean) for c in counted])
            for number, table in enumerate(self.tables):
                table.weight.grad = self._rows_of(table, number, counted, update, mean)
            assert self.step is not None, "the optimizer is there before the first round"
            self.step(self._sent[max(counted, key=lambda c: c.number)].lr, gradient)
        for contribution in ordered:
            self._forget(contribution)

    def _mean_weight(self, counted: Sequence[Contribution]) -> float:
        """Of the contributions that make a global batch: those of the update, or what the workers sent last."""
        if not self._merge.adds:
            return fmean(self._sent[contribution].weight for contribution in counted)
        return fmean(self._weights.values())

    def _merged(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum or the mean of `gradients`, each [numel]; of a single one, itself."""
        first, *others = gradients
        if not others:
            return first
        if self._gradient is None:
            self._gradient = torch.empty_like(self.values)
        torch.add(first, others[0], out=self._gradient)
        for other in others[1:]:
            self._gradient.add_(other)
        return self._gradient if self._merge.adds else self._gradient.div_(len(gradients))

    def _weighed(self, contribution: Contribution, tau: int, mean_weight: float) -> Tensor:
        """What a contribution is worth, [numel]; its gradient stays as it is."""
        sent = self._sent[contribution]
        gradient = sent.gradient
        assert gradient is not None, "those without are left out"
        if self._merge.staleness == "scaled":
            gradient = scaled_by_staleness(gradient, tau)
        elif self._merge.staleness == "compensated" and tau > 0:
            then = self._read[contribution.worker]
            gradient = compensated(gradient, self.values, then, strength=self._merge.strength)
        return gradient if sent.weight == mean_weight else gradient * (sent.weight / mean_weight)

    def _rows_of(
        self, table: ServedTable, number: int, counted: Sequence[Contribution], update: Update, mean_weight: float
    ) -> Tensor:
        """The gradient of a table, in the proportions of the dense one."""
        ids, rows = zip(*(self._sent[contribution].rows[number] for contribution in counted), strict=True)
        divisor = 1 if self._merge.adds else len(counted)
        for contribution, part in zip(counted, rows, strict=True):
            if self._merge.staleness == "scaled":
                part.copy_(scaled_by_staleness(part, staleness_of(contribution, update)))
            part.mul_(self._sent[contribution].weight / mean_weight / divisor)
        return table.gradient(ids, rows)

    def _forget(self, contribution: Contribution) -> None:
        sent = self._sent.pop(contribution)
        if sent.gradient is not None and not sent.lent:
            self._spare.append(sent.gradient)
