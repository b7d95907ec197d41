"""Copies of one thing are equal: what several ranks hold of the state is the same bits on each of them.

Replicas begin equal, and every update keeps them so. A bit that flips in the memory of one rank, or on its way there,
breaks that: nothing fails, the copies train apart, and a save keeps one of them. `Copies.compare` finds it.

Every rank takes the fingerprint f of each part that it holds, and adds up over its parts

    s = sum w f  modulo 2^64,    w = 1 - n at the first of the n ranks that hold the part, 1 at the others

The weights of a part add up to 0, and so do the sums of all ranks if all copies are equal. A comparison sends 8 bytes a
rank; only where the total is another number do ranks tell each other the fingerprints, to name rank and tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from shoal import units
from shoal.checkpoint.agreement import InventoryAgreement
from shoal.checkpoint.plan import Inventory, inventory_of, said
from shoal.comm.board import Board
from shoal.comm.collective import Collective, gather_texts
from shoal.errors import VerificationFailed
from shoal.maths.fingerprint import fingerprint
from shoal.state import Held, parts_of
from shoal.topology.holding import Box

Ranks = tuple[int, ...]
NOT_COMPARED = "extra/"
"""What a script saves of its own may differ between ranks: a save keeps that of one rank."""


class TensorBox(NamedTuple):
    """A box of a tensor of the unsplit model."""

    name: str
    box: Box


class Copies:
    """One rank's side of a comparison. All ranks of `group` make the same calls.

    `board` is where ranks say what they hold; no other part of the program uses it. `device` takes the collective.
    """

    def __init__(self, group: Collective, board: Board, *, device: torch.device) -> None:
        self._group, self._board, self._device = group, board, device
        self._held = InventoryAgreement(board, rank=group.rank, world_size=group.size, timeout_s=board.timeout_s)
        self._inventory: Inventory = []
        self._compared = self._calls = 0

    def compare(self, tensors: Mapping[str, Held], *, when: str) -> None:
        """Compares every part of `tensors` that more than one rank holds. `when` is for the message.

        Raises `VerificationFailed` on all ranks, which names the first tensor whose copies differ, and the ranks that
        have another copy than most.
        """
        if self._group.size == 1:
            return
        parts = parts_of({name: held for name, held in tensors.items() if not name.startswith(NOT_COMPARED)})
        found = inventory_of(parts)
        self._inventory = self._inventory if found == self._inventory else found  # what was published once is known
        self._compared += 1
        inventories = self._held.inventories(self._inventory, generation=0, call=self._compared)
        holders = _holders(inventories, self._group.rank)
        own = {
            TensorBox(name, target.box): fingerprint({name: target.tensor})
            for name, targets in parts.items()
            for target in targets
            if len(holders.get(TensorBox(name, target.box), ())) > 1
        }
        total = sum(_weight(self._group.rank, holders[part]) * value for part, value in own.items())
        if self._sum(total) != 0:
            self._name_the_difference(own, when)

    def require_same(self, text: str, *, what: str, repair: str) -> None:
        """Raises `VerificationFailed` on all ranks where one passes another `text` (at most 1024 bytes) than rank 0."""
        texts = gather_texts(text, self._group, device=self._device)
        other = next((rank for rank, found in enumerate(texts) if found != texts[0]), None)
        if other is not None:
            raise VerificationFailed(
                f"rank {other} {what} {texts[other]}, and rank 0 {texts[0]}: all ranks go on from the same one. "
                f"{repair}"
            )

    def _sum(self, own: int) -> int:
        """The sum of `own` over all ranks, modulo 2^64."""
        everyone = torch.empty(self._group.size, dtype=torch.int64, device=self._device)
        signed = (own + 2**63) % 2**64 - 2**63
        self._group.all_gather(everyone, torch.tensor([signed], dtype=torch.int64, device=self._device)).wait()
        return sum(everyone.tolist()) % 2**64

    def _name_the_difference(self, own: Mapping[TensorBox, int], when: str) -> None:
        self._calls += 1
        keys = [f"fingerprints/{self._calls}/{rank}" for rank in range(self._group.size)]
        self._board.publish(keys[self._group.rank], msgspec.msgpack.encode(list(own.items())))
        found = [_FINGERPRINTS.decode(value) for value in self._board.collect(keys)]
        raise VerificationFailed(f"{when}, {difference([dict(values) for values in found])}")


_FINGERPRINTS = msgspec.msgpack.Decoder(list[tuple[TensorBox, int]])


def difference(fingerprints: Sequence[Mapping[TensorBox, int]]) -> str:
    """A sentence about the first part whose copies differ, by the ranks' fingerprints of all that they hold."""
    by_part: dict[TensorBox, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(fingerprints):
        for part, value in own.items():
            by_part[part][value].append(rank)
    differing = {part: sorted(ranks.values(), key=len) for part, ranks in by_part.items() if len(ranks) > 1}
    part, groups = next(iter(differing.items()))
    *minority, majority = groups
    odd = [rank for ranks in minority for rank in ranks]
    what = f"{part.name} {said(part.box)}" if part.box.shape else part.name
    more = f" (and of {units.plural(len(differing) - 1, 'other part')})" if len(differing) > 1 else ""
    if len(majority) > len(minority[-1]):
        where = f"rank {_listed(odd)} has another copy of {what}{more} than rank {_listed(majority)}"
    else:
        where = f"rank {_listed(odd)} and rank {_listed(majority)} have different copies of {what}{more}"
    return (
        f"{where}: copies are the same bits on every rank. {_likely(len(differing), len(by_part))}. Start the run "
        "again: it resumes from its newest checkpoint"
    )


def _likely(differing: int, compared: int) -> str:
    """What has made so many of the compared parts differ, the likeliest first."""
    if 4 * differing >= compared and compared > 1:
        return (
            f"{differing} of {compared} parts differ, so an update did. Likely is code that decides differently on "
            "some ranks: gradients, learning rates or weights changed under an `if` of the rank or by numbers drawn at "
            "random, a scheduler that looks at a rank's own loss, another version of a library"
        )
    return (
        f"{differing} of {compared} parts differ. Likely is code that writes to this tensor on some ranks alone, in "
        "place or by `.data`; if there is none, memory or a wire has failed: test that host"
    )


def _holders(inventories: Mapping[Ranks, Inventory], rank: int) -> dict[TensorBox, Ranks]:
    """The ranks that hold each part that `rank` holds, ascending."""
    own = next(inventory for ranks, inventory in inventories.items() if rank in ranks)
    holders: dict[TensorBox, list[int]] = {TensorBox(item.name, box): [] for item in own for box in item.boxes}
    for ranks, inventory in inventories.items():
        for item in inventory:
            for box in item.boxes:
                if (part := TensorBox(item.name, box)) in holders:
                    holders[part].extend(ranks)
    return {part: tuple(sorted(ranks)) for part, ranks in holders.items()}


def _weight(rank: int, holders: Ranks) -> int:
    """None is 0 where there are several holders, so that every copy counts."""
    return 1 - len(holders) if rank == holders[0] else 1


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, sorted(ranks)[:most])) + more
