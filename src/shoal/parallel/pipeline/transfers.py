"""Activations and gradients on their way between stages: which they are is read off a table, the same on every rank.

Three rules make every table that `schedules.timeline` accepts run without a deadlock, and keep nothing longer than
needed.

- A rank never waits for a send while it has work. A message from a peer proves what the peer did before it: sends that
  it had taken by then are complete, and are let go.
- Receives from a peer are posted in the order in which the peer sends, which both know from the table: backends that
  ignore tags agree with those that match them. Those that keep all calls of a group in one sequence need a group for
  each sender and receiver (`shoal.comm.messages`).
- Receives are posted ahead of need where the form is known, and blocked for only when needed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Handle
from shoal.comm.messages import Messages
from shoal.errors import UserCodeError
from shoal.parallel.pipeline.packing import AS_IT_IS, HEADER_NUMEL, Form, Packing
from shoal.schedules.table import Action, ScheduleTable
from shoal.schedules.timeline import needs


@dataclass(frozen=True)
class Transfer:
    """The result of `producer`, an activation (F) or a gradient (B, I), that `consumer` takes.

    `boundary` is the stage whose output it is or belongs to, and `likeness` which microbatches have one form there. The
    places are positions in the two ranks' rows, and `announces` marks the first activation of a form.
    """

    producer: Action
    consumer: Action
    sender: int
    receiver: int
    sent_at: int
    taken_at: int
    tag: int
    likeness: int
    announces: bool

    @property
    def is_activation(self) -> bool:
        return self.producer.kind == "F"

    @property
    def boundary(self) -> int:
        return self.producer.stage if self.is_activation else self.consumer.stage


def transfers(table: ScheduleTable, likenesses: Sequence[int]) -> list[Transfer]:
    """All of a table, in the order in which their senders have them; those within one rank among them.

    Microbatches with the same number in `likenesses` have one form at each boundary.
    """
    places = {action: (rank, place) for rank, row in enumerate(table.rows) for place, action in enumerate(row)}
    edges = [(made, taken) for taken, all_ in needs(table).items() for made in all_ if made.stage != taken.stage]
    edges.sort(key=lambda edge: places[edge[0]])
    announced: set[tuple[int, int]] = set()
    found = []
    for producer, consumer in edges:
        (sender, sent_at), (receiver, taken_at) = places[producer], places[consumer]
        likeness = likenesses[producer.microbatch]
        first = producer.kind == "F" and (producer.stage, likeness) not in announced
        announced.update([(producer.stage, likeness)] if first else [])
        tag = 2 * (producer.stage * table.microbatches + producer.microbatch) + (producer.kind != "F")
        found.append(Transfer(producer, consumer, sender, receiver, sent_at, taken_at, tag, likeness, first))
    return found


def header_tag(transfer: Transfer, table: ScheduleTable) -> int:
    """A tag that no transfer has."""
    return (2 * table.stages + transfer.boundary) * table.microbatches + transfer.likeness


class Wire:
    """One rank's end, for one pass through a table.

    `likenesses` has a number for each microbatch, the same for those of one form and below the number of microbatches.
    `packing` says what tensors become between ranks; what stays on a rank stays as it is.
    """

    def __init__(
        self,
        table: ScheduleTable,
        messages: Messages,
        *,
        device: torch.device,
        likenesses: Sequence[int],
        packing: Packing = AS_IT_IS,
    ) -> None:
        self._packing = packing
        self._table, self._rank, self._device = table, messages.rank, device
        self._messages = messages
        self._forms: dict[tuple[int, int], Form] = {}
        self._out: dict[Action, Transfer] = {}
        self._in: dict[Action, Transfer] = {}
        self._queues: defaultdict[int, deque[Transfer]] = defaultdict(deque)
        for transfer in transfers(table, likenesses):
            if transfer.sender == self._rank:
                self._out[transfer.producer] = transfer
            if transfer.receiver == self._rank:
                self._in[transfer.consumer] = transfer
                self._queues[transfer.sender].append(transfer)
        self._headers: dict[tuple[int, int], tuple[Tensor, Handle]] = {}
        self._posted: dict[Action, tuple[Tensor, Handle]] = {}
        self._here: dict[Action, Tensor] = {}
        self._sent: defaultdict[int, list[tuple[int, Handle, Tensor]]] = defaultdict(list)

    def expect(self, actions: Iterable[Action]) -> None:
        """Posts the receives of actions that come soon, as far as their forms are known."""
        for action in actions:
            transfer = self._in.get(action)
            if transfer is not None and transfer.sender != self._rank:
                self._post(transfer, needed=False)

    def take(self, action: Action) -> Tensor | None:
        """What `action` computes from: an activation or a gradient. None where none is sent to it."""
        transfer = self._in.get(action)
        if transfer is None:
            return None
        if transfer.sender == self._rank:
            return self._here.pop(action)
        self._post(transfer, needed=True)
        buffer, handle = self._posted.pop(action)
        handle.wait()
        self._let_go(transfer)
        tensor = self._packing.unpacked(buffer, self._forms[_key(transfer)])
        return tensor.requires_grad_(transfer.is_activation and self._forms[_key(transfer)].differentiable)

    def give_activation(self, action: Action, output: Tensor) -> None:
        """Sends a stage's output on. Raises `UserCodeError` where its form is not that of the microbatches before."""
        transfer = self._out[action]
        form = Form.of(output, stage=action.stage)
        known = self._forms.setdefault(_key(transfer), form)
        if form != known:
            raise UserCodeError(
                f"stage {action.stage} gave {form} for microbatch {action.microbatch} and {known} for an earlier one "
                f"with inputs of the same shapes; what a stage gives must have a form that follows from these shapes"
            )
        if transfer.announces and transfer.receiver != self._rank:
            self._send(transfer, form.header(self._device), tag=header_tag(transfer, self._table))
        self._hand_over(transfer, output.detach().requires_grad_(output.requires_grad))

    def give_gradient(self, action: Action, gradient: Tensor) -> None:
        """Sends the gradient of a stage's input back."""
        self._hand_over(self._out[action], gradient)

    def finish(self) -> None:
        """Waits until everything has left. Raises `CollectiveError` where a rank is dead, stopped or late."""
        for sends in self._sent.values():
            for _, handle, _ in sends:
                handle.wait()
        self._sent.clear()

    def _hand_over(self, transfer: Transfer, tensor: Tensor) -> None:
        if transfer.receiver == self._rank:
            self._here[transfer.consumer] = tensor
        else:
            self._send(transfer, self._packing.packed(tensor), tag=transfer.tag)

    def _send(self, transfer: Transfer, tensor: Tensor, *, tag: int) -> None:
        handle = self._messages.send(tensor, to=transfer.receiver, tag=tag)
        self._sent[transfer.receiver].append((transfer.taken_at, handle, tensor))

    def _let_go(self, arrived: Transfer) -> None:
        """Forgets sends that the peer took before it sent `arrived`; their handles are done, so waiting is short."""
        kept = []
        for sent in self._sent[arrived.sender]:
            if sent[0] <= arrived.sent_at:
                sent[1].wait()
            else:
                kept.append(sent)
        self._sent[arrived.sender] = kept

    def _post(self, wanted: Transfer, *, needed: bool) -> None:
        queue = self._queues[wanted.sender]
        while queue and queue[0].sent_at <= wanted.sent_at:
            form = self._form(queue[0], needed=needed)
            if form is None:
                return
            transfer = queue.popleft()
            if transfer.is_activation or form.differentiable:
                buffer = self._packing.buffer(form, self._device)
                handle = self._messages.recv(buffer, source=transfer.sender, tag=transfer.tag)
                self._posted[transfer.consumer] = buffer, handle

    def _form(self, transfer: Transfer, *, needed: bool) -> Form | None:
        """The form of what comes next from a peer; None where it is not known yet and nothing needs it now."""
        key = _key(transfer)
        if key in self._forms or not transfer.is_activation:
            return self._forms.get(key)
        if key not in self._headers:
            header = torch.empty(HEADER_NUMEL, dtype=torch.int64, device=self._device)
            tag = header_tag(transfer, self._table)
            self._headers[key] = header, self._messages.recv(header, source=transfer.sender, tag=tag)
        if not needed:
            return None
        header, handle = self._headers.pop(key)
        handle.wait()
        self._forms[key] = Form.read(header)
        return self._forms[key]


def _key(transfer: Transfer) -> tuple[int, int]:
    """Of what has one form."""
    return transfer.boundary, transfer.likeness
