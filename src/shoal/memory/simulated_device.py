"""A device that is ordinary memory with a hard limit: what a GPU does with a run, shown where there is none.

Every storage that an operator makes is entered into a ledger, and leaves it when it is freed. An operator whose result
does not fit raises `OutOfMemory`, as `cudaMalloc` would. Memory that counts as the host's (offloaded state, staging,
data, libraries) is made outside of operators or of `counting`, and never enters.

What the ledger does not see are temporaries inside of one operator, which PyTorch's profiler counts
(`shoal.memory.tracker`): a test holds the two beside each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal import units
from shoal.comm.shm.host import windows
from shoal.errors import OutOfMemory

Holders = Callable[[], Mapping[str, Iterable[Tensor]]]
"""What is on the device now, by what a sentence calls it; the rest are activations."""

ACTIVATIONS = "activations and temporaries"


@dataclass(frozen=True)
class _Entry:
    """A storage on the device. One that lives between steps may be emptied and filled again, as ZeRO-3 does.
    `in_window`: it lies in one of this run's windows, whose bytes then are not all messages.
    """

    bytes: int
    lasting: weakref.ref[torch.UntypedStorage] | None = None
    in_window: bool = False

    @property
    def now_bytes(self) -> int:
        storage = None if self.lasting is None else self.lasting()
        return self.bytes if storage is None else storage.nbytes()


class SimulatedDevice:
    """The ledger of one rank. `limit_bytes` is the device's size; None: it is counted and never refused."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.holders: Holders = dict
        self.advice: Mapping[str, str] = {}
        """For a holder the key that would free some of it."""
        self._made_bytes, self._peak_bytes = 0, 0
        self._others, self._window_bytes = windows(), 0
        """Windows that are not this run's, and bytes of messages in those that are."""
        self._made: dict[int, _Entry] = {}
        self._lasting: dict[int, _Entry] = {}
        self._mode = _Counting(self)
        self._entered = self._pausing = False

    @property
    def live_bytes(self) -> int:
        """What is on the device now."""
        return self._made_bytes + sum(entry.now_bytes for entry in self._lasting.values()) + self._window_bytes

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Enters what lives between steps, such as parameters, wherever it was made: it may lie in a window."""
        spans = self._own_windows()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._leave(storage._cdata, self._made)
            if storage._cdata not in self._lasting:
                in_window = any(storage.data_ptr() in span for span in spans)
                self._lasting[storage._cdata] = _Entry(storage.nbytes(), weakref.ref(storage), in_window)
                weakref.finalize(storage, self._leave, storage._cdata, self._lasting)
        self._window_bytes = self._windows()
        self._check("what a rank keeps between steps")

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, what operators of this thread make is on the device, the backward's on a CPU too."""
        if self._entered:
            yield
            return
        self._entered, self._window_bytes = True, self._windows()
        try:
            with self._mode:
                yield
        finally:
            self._entered = False

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Inside, operators compute on the host."""
        before, self._pausing = self._pausing, True
        try:
            yield
        finally:
            self._pausing = before

    @contextmanager
    def building(self) -> Iterator[None]:
        """As `counting`; what is made inside and stays, lives between steps."""
        with self.counting():
            yield
        self._window_bytes = self._windows()
        for key, entry in list(self._made.items()):
            storage = self._mode.storages.get(key)
            if storage is not None:
                self._made_bytes -= entry.bytes
                self._lasting[key] = _Entry(entry.bytes, weakref.ref(storage))
                del self._made[key]

    def take_peak(self) -> int:
        """The most there was since the last call, bytes."""
        peak, self._peak_bytes = max(self._peak_bytes, self.live_bytes), 0
        return peak

    def by_holder(self) -> dict[str, int]:
        """Bytes by holder, the largest first."""
        lying = set(self._made) | set(self._lasting)
        found, seen = {}, set[int]()
        for name, tensors in self.holders().items():
            storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}
            found[name] = sum(size for key, size in storages.items() if key in lying and key not in seen)
            seen |= storages.keys()
        if self._window_bytes:
            found["windows of messages"] = self._window_bytes
        found[ACTIVATIONS] = self.live_bytes - sum(found.values())
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _own_windows(self) -> list[range]:
        """Those of this run. Others are forgotten when they end: what lies there later is this run's."""
        spans = windows()
        self._others = [span for span in self._others if span in spans]
        return [span for span in spans if span not in self._others]

    def _windows(self) -> int:
        entered = sum(entry.bytes for entry in self._lasting.values() if entry.in_window)
        return max(0, sum(map(len, self._own_windows())) - entered)

    def _enter(self, storage: torch.UntypedStorage, operator: str) -> None:
        key = storage._cdata
        if self._pausing or key in self._made or key in self._lasting or not storage.nbytes():
            return
        self._made[key] = _Entry(storage.nbytes())
        self._made_bytes += storage.nbytes()
        self._mode.storages[key] = storage
        weakref.finalize(storage, self._forget, key)
        self._check(operator)

    def _forget(self, key: int) -> None:
        self._leave(key, self._made)
        self._leave(key, self._lasting)

    def _leave(self, key: int, entries: dict[int, _Entry]) -> None:
        entry = entries.pop(key, None)
        if entry is not None and entries is self._made:
            self._made_bytes -= entry.bytes

    def _check(self, operator: str) -> None:
        live_bytes = self.live_bytes
        if self.limit_bytes is not None and live_bytes > self.limit_bytes:
            raise OutOfMemory(self._sentence(operator, live_bytes - self.limit_bytes))
        self._peak_bytes = max(self._peak_bytes, live_bytes)

    def _sentence(self, operator: str, short_bytes: int) -> str:
        holders = self.by_holder()
        largest = ", ".join(f"{units.memory_size(size)} {name}" for name, size in holders.items() if size > 0)
        advised = next((name for name, size in holders.items() if size > 0 and name in self.advice), None)
        repair = "" if advised is None else f"{self.advice[advised]} frees {advised}, or "
        return (
            f"the simulated device of {units.memory_size(self.limit_bytes or 0)} is short by "
            f"{units.memory_size(short_bytes)} in {operator}: it holds {largest}; {repair}raise "
            "memory.simulate_device, or the memory.budget that stands for it"
        )


class _Counting(TorchDispatchMode):
    """Shows the ledger what operators make."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self.storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [result] if isinstance(result, Tensor) else _tensors(result)
        for tensor in made:
            if tensor.device.type != "meta":
                self._see(func, tensor, args)
        return result

    def _see(self, func: Any, tensor: Tensor, args: Sequence[Any]) -> None:
        """A view of something that is not on the device, such as the host's, is not on it either."""
        storage = tensor.untyped_storage()
        if not any(storage._cdata == given.untyped_storage()._cdata for given in _tensors(args)):
            self._device._enter(storage, str(func))


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of an operator's arguments or results: lists lie one deep."""
    found = []
    for one in tree if isinstance(tree, tuple | list) else (tree,):
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, tuple | list):
            found += [each for each in one if isinstance(each, Tensor)]
    return found
