"""The state that an elastic run's replicas copy from each other, between threads that stand for replicas."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.comm.collective import Alone, Collective, Handle
from shoal.comm.local import local_group
from shoal.errors import CollectiveError
from shoal.recipes.elastic import state_copy
from shoal.recipes.elastic.sinks import membership_sentence
from shoal.recipes.elastic.state_copy import HeldState, share_state

CPU = torch.device("cpu")


def a_state() -> HeldState:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "model/transposed": torch.randn(5, 7, generator=generator).t(),
        "model/empty": torch.empty(0, 3),
        "model/flags": torch.tensor([True, False]),
        "optimizer/step": torch.tensor(12.0),
        "model/weight": torch.randn(300, 70, generator=generator, dtype=torch.float64),
    }
    return HeldState('{"step": 12}', tensors)


def shared(groups: list[Any], states: list[HeldState | None], *, root: int) -> list[HeldState]:
    with ThreadPoolExecutor(len(groups)) as pool:
        pairs = zip(groups, states, strict=True)
        found = [pool.submit(share_state, state, group, root=root, device=CPU) for group, state in pairs]
        return [one.result() for one in found]


def test_a_copy_has_every_bit_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, types, shapes and bits of a holder's state arrive, in several chunks a tensor, and a holder keeps its
    own."""
    monkeypatch.setattr(state_copy, "CHUNK_BYTES", 1 << 10)
    holder = a_state()
    first, second, third = shared(local_group(3), [None, holder, None], root=1)
    assert second is holder
    for copy in (first, third):
        assert copy.facts == holder.facts
        assert {name: (t.dtype, t.shape) for name, t in copy.tensors.items()} == {
            name: (t.dtype, t.shape) for name, t in holder.tensors.items()
        }
        assert all(torch.equal(copy.tensors[name], tensor) for name, tensor in holder.tensors.items())


@dataclass
class Damaging:
    """A group whose wire changes one byte of the first large message."""

    group: Collective

    @property
    def rank(self) -> int:
        return self.group.rank

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0) -> Handle:
        self.group.broadcast(tensor, root=root).wait()
        if tensor.numel() == 300 * 70 * 8:
            tensor[1000] ^= 1
        return Alone().broadcast(tensor)  # is done


def test_a_damaged_chunk_is_refused() -> None:
    """One changed bit on the way to a receiver, in the last tensor: an error that names it."""
    holder, receiver = local_group(2)
    with pytest.raises(CollectiveError, match="chunk 0 of model/weight did not arrive"):
        shared([holder, Damaging(receiver)], [a_state(), None], root=0)


def test_the_membership_in_a_sentence() -> None:
    """Ranks that are gone are named as in the generation before, those that are new as in this one."""
    assert membership_sentence((), ("a", "b"), most=2, step=0) == ""
    assert membership_sentence((), ("a",), most=2, step=0) == "1 of 2 replicas"
    assert (
        membership_sentence(("a", "b", "c"), ("a", "c"), most=3, step=7) == "2 of 3 replicas; rank 1 lost after step 7"
    )
    sentence = membership_sentence(("b", "c"), ("c", "d"), most=2, step=9)
    assert sentence == "2 of 2 replicas; rank 0 lost after step 9; rank 1 joined after step 9"
