"""`hvd.elastic`: training that goes on while ranks are lost, leave and join.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(state)

`shoal launch -n 4 --min 2 script.py` starts it. A commit is a copy in memory. Where a call fails because a rank is
lost, all that are left go back to the newest commit that one of them holds, take it from rank 0, and call the function
again; where a rank joins or leaves, the same happens at a commit, with nothing lost (Horovod's "Elastic Horovod").
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Sampler

from shoal.errors import Stopped, UsageError
from shoal.horovod.engine import HorovodInternalError
from shoal.horovod.operations import Sum, allgather_object, allreduce, broadcast_object
from shoal.horovod.optimizer import abandon_gradients, broadcast_optimizer_state, broadcast_parameters
from shoal.horovod.process import process

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
T = TypeVar("T")


class HostsUpdatedInterrupt(Exception):
    """Ranks join or leave: `run` catches it, and calls the function again with all that are there."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("ranks join or leave")
        self.skip_sync = skip_sync


class State:
    """What ranks have in common. A subclass says how it is kept (`save`), taken back (`restore`) and made equal to rank
    0's (`sync`).
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Called whenever there are other ranks than before: to scale the learning rate, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """There are other ranks; nothing is synchronized yet."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keeps the state as it is now; all ranks call it. Raises `HostsUpdatedInterrupt` on all where ranks join or
        leave.
        """
        self.save()
        if (members := process().members) is not None:
            members.committed()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """The second half of `commit`; all ranks call it. Raises `Stopped` on all where all leave."""
        members = process().members
        if members is None:
            return
        own = torch.tensor([int(members.changing), int(members.leaving)])
        changing, leaving = allreduce(own, name="elastic.updates", op=Sum).tolist()
        if leaving == process().there().world_size:
            raise Stopped("all ranks were asked to leave")
        if changing:
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keeps a copy."""
        raise NotImplementedError

    def restore(self) -> None:
        """Back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Rank 0's state on all ranks, and a copy of it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Before the callbacks of `on_reset`."""


class ObjectState(State):
    """Attributes by the names of `values`: numbers, strings, tensors, lists and dictionaries of them, and what has
    `state_dict` and `load_state_dict`.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = tuple(values)
        self.__dict__.update(values)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(self._content(name)) for name in self._names}

    def restore(self) -> None:
        for name in self._names:
            self._take(name, copy.deepcopy(self._saved[name]))

    def sync(self) -> None:
        plain = [name for name in self._names if not self._shared(name)]
        whole = broadcast_object({name: self._content(name) for name in plain}, name="elastic.objects")
        for name in plain:
            self._take(name, whole[name])
        self.save()

    def _shared(self, name: str) -> bool:
        """Whether ranks have agreed on it in a way of its own, which this call is."""
        return False

    def _content(self, name: str) -> Any:
        value = getattr(self, name)
        return value.state_dict() if _has_state(value) else value

    def _take(self, name: str, content: Any) -> None:
        value = getattr(self, name)
        if _has_state(value):
            value.load_state_dict(content)
        else:
            setattr(self, name, content)


class TorchState(ObjectState):
    """A model, an optimizer, samplers and other objects (`ObjectState`), all by their names.

    Where a step has failed, gradients that it has computed are dropped (`grad = None`).
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Any = None, **values: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)

    def restore(self) -> None:
        super().restore()
        for name in self._names:
            if isinstance(value := getattr(self, name), torch.optim.Optimizer):
                abandon_gradients(value)

    def _shared(self, name: str) -> bool:
        value = getattr(self, name)
        if isinstance(value, nn.Module):
            broadcast_parameters(value.state_dict())
        elif isinstance(value, torch.optim.Optimizer):
            broadcast_optimizer_state(value)
        elif isinstance(value, ElasticSampler):
            states, members = allgather_object(value.state_dict(), name=f"elastic.{name}"), process().members
            value.join_states(states if members is None or members.state_held else states[:1])
        else:
            return False
        return True


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class ElasticSampler(Sampler[int]):
    """Divides over the ranks what none of them has used of the epoch. Ranks tell it what they have (`record_batch`),
    and the state that holds it divides the rest anew where ranks change. The last indices are filled up from the first
    ones, so that all ranks have as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """At the end of an epoch, for the next one: every index is unused again."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have used their batches number `batch_idx` since they began to draw, of `batch_size` each: also
        those of a rank that is lost later are used.
        """
        of_all = batch_size * self._ranks
        self.record_indices(self._dealt[batch_idx * of_all : (batch_idx + 1) * of_all])

    def record_indices(self, indices: Sequence[int]) -> None:
        """These are used."""
        self.processed_indices.update(indices)

    def reset(self) -> None:
        """Divides what is left over the ranks that are there."""
        place = process().there()
        left = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            draws = torch.Generator().manual_seed(self.seed + self.epoch)
            left = [left[at] for at in torch.randperm(len(left), generator=draws).tolist()]
        self._ranks = place.world_size
        each = math.ceil(len(left) / self._ranks)
        self._dealt = list(itertools.islice(itertools.cycle(left), each * self._ranks))
        self.indices = self._dealt[place.rank :: self._ranks]

    def join_states(self, states: Sequence[dict[str, Any]]) -> None:
        """What all ranks together have used, in the epoch of rank 0, which is the first of `states`."""
        epoch = states[0]["epoch"]
        used = [index for state in states if state["epoch"] == epoch for index in state["processed_indices"]]
        self.load_state_dict({"epoch": epoch, "processed_indices": used})

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what this rank knows to be used."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""
        self.epoch, self.processed_indices = state["epoch"], set(state["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def run(function: Callable[..., T]) -> Callable[..., T]:
    """`function(state, ...)`, called again whenever ranks were lost, have left or joined, until it returns.

    Under a launcher that replaces no ranks a lost one ends the script, with `HorovodInternalError`.
    """

    @functools.wraps(function)
    def wrapper(state: State, *given: Any, **named: Any) -> T:
        if not isinstance(state, State):
            raise UsageError(f"a {type(state).__name__} is no state: give hvd.elastic.TorchState(...) first")
        skip_sync = False
        with _leaving_when_asked():
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    process().ready()
                    return function(state, *given, **named)
                except HorovodInternalError as error:
                    if process().members is None:
                        error.add_note("ranks are replaced under `shoal launch -n N --min M script.py`")
                        raise
                    process().reset(failed=True)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as update:
                    process().reset(failed=False)
                    skip_sync = update.skip_sync
                state.on_reset()

    return wrapper


@contextmanager
def _leaving_when_asked() -> Iterator[None]:
    """SIGTERM to this rank, and SIGINT, which its launcher sends when it is told to stop, ask it to leave at the next
    commit, where others can go on without it.
    """
    members = process().members
    if members is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    leave = members.leave
    before = {number: signal.signal(number, lambda *_: leave()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
