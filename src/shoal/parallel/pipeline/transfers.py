"""Which results travel between ranks: read off a table, once, and the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.schedules.action import Action
from shoal.schedules.order import needs
from shoal.schedules.table import Table


@dataclass(frozen=True)
class Transfer:
    """The result of `producer`, an activation (F) or a gradient (B, I), that `consumer` takes.

    `boundary` is the stage whose output it is or belongs to. The places are positions in the two ranks' rows, and
    `announces` marks the first activation of its boundary.
    """

    producer: Action
    consumer: Action
    sender: int
    receiver: int
    sent_at: int
    taken_at: int
    tag: int
    announces: bool

    @property
    def is_activation(self) -> bool:
        return self.producer.kind == "F"

    @property
    def boundary(self) -> int:
        return self.producer.stage if self.is_activation else self.consumer.stage


def transfers(table: Table) -> list[Transfer]:
    """All of a table, in the order in which their senders have them; those within one rank among them."""
    places = {action: (rank, place) for rank, row in enumerate(table.rows) for place, action in enumerate(row)}
    edges = [(made, taken) for taken, all_ in needs(table).items() for made in all_ if made.stage != taken.stage]
    edges.sort(key=lambda edge: places[edge[0]])
    announced: set[int] = set()
    found = []
    for producer, consumer in edges:
        (sender, sent_at), (receiver, taken_at) = places[producer], places[consumer]
        first = producer.kind == "F" and producer.stage not in announced
        announced.update([producer.stage] if first else [])
        tag = 2 * (producer.stage * table.microbatches + producer.microbatch) + (producer.kind != "F")
        found.append(Transfer(producer, consumer, sender, receiver, sent_at, taken_at, tag, first))
    return found


def header_tag(transfer: Transfer, table: Table) -> int:
    """A tag that no transfer has."""
    return 2 * table.stages * table.microbatches + transfer.boundary
