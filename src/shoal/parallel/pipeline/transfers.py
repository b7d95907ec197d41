"""Which results travel between ranks: read off a table, once, and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.schedules.action import Action
from shoal.schedules.order import needs
from shoal.schedules.table import Table


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


def transfers(table: Table, likenesses: Sequence[int]) -> list[Transfer]:
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


def header_tag(transfer: Transfer, table: Table) -> int:
    """A tag that no transfer has."""
    return (2 * table.stages + transfer.boundary) * table.microbatches + transfer.likeness
