"""Bytes that a rank holds for training, counted by the storages of tensors, each once.

Not the resident memory of the process: that knows of allocators and libraries, and not what a byte is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from shoal.comm.shm.host import window_bytes
from shoal.memory.simulated_device import SimulatedDevice
from shoal.state import works_in_streams


@dataclass(frozen=True)
class ModelState:
    """Bytes of what outlives a step on this rank."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, those of distributed tensors' local parts; a shared storage once."""
    storages = (_local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def model_state(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], *, gradients: Iterable[Tensor] | None = None
) -> ModelState:
    """What this rank holds now. `gradients`: those that live elsewhere, as in buckets; default the parameters' `grad`.

    The parameters' bytes include those of whole float32 copies that optimizers hold as their own parameters.
    """
    optimizers = list(optimizers)
    parameters = list(model.parameters())
    masters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in {*parameters, *masters} if p.grad is not None] if gradients is None else list(gradients)
    slots = [x for optimizer in optimizers for state in optimizer.state.values() for x in _tensors(state)]
    return ModelState(storage_bytes([*parameters, *masters]), storage_bytes(grads), storage_bytes(slots))


class SavedActivations:
    """Counts, while it is entered, the tensors that autograd saves and has not yet let go.

    `bytes` is what is held now, `peak_bytes` the most there was; storages of `apart`, such as the parameters, are not
    counted. Tensors inside a recomputed block are saved by nobody; its inputs are counted here.
    """

    def __init__(self, *, apart: Iterable[Tensor] = ()) -> None:
        self._apart = {_local(tensor).untyped_storage().data_ptr() for tensor in apart}
        self._holders: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self.bytes = self.peak_bytes = 0

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)

    def _pack(self, tensor: Tensor) -> _Held:
        storage = _local(tensor).untyped_storage()
        pointer, numel = storage.data_ptr(), storage.nbytes()
        if pointer in self._apart or not numel:
            return _Held(tensor, _nothing)
        self._holders[pointer] = self._holders.get(pointer, 0) + 1
        if self._holders[pointer] == 1:
            self.bytes += numel
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return _Held(tensor, lambda: self._let_go(pointer, numel))

    def _let_go(self, pointer: int, storage_bytes: int) -> None:
        self._holders[pointer] -= 1
        if not self._holders[pointer]:
            del self._holders[pointer]
            self.bytes -= storage_bytes


class _Held:
    """A saved tensor. Autograd drops it when the graph is freed, before which its storage cannot be reused.

    Detached: an operator's own result would keep the operator alive, and so itself.
    """

    def __init__(self, tensor: Tensor, let_go: Callable[[], None]) -> None:
        self.tensor, self._let_go = tensor.detach(), let_go

    def __del__(self) -> None:
        self._let_go()


def measured_activation_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that the graph of `forward()`, a loss, holds when it returns: what existed before, as parameters and
    inputs did, not counted."""
    device = SimulatedDevice(None)
    with device.counting():
        loss = forward()
        held_bytes = device.live_bytes
    del loss
    return held_bytes


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)
    elif isinstance(values := getattr(state, "values", None), Tensor):  # what stands for a tensor in fewer numbers
        yield values


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _nothing() -> None:
    """For what is not counted."""


# Bytes of tensors that the CPU's allocator has given out: what stays, and the most there was at once.
#
# The counterpart of `torch.cuda.max_memory_allocated`. It counts all that PyTorch allocates, temporaries inside of an
# operator too, and what a group of ranks has given out for tensors; no libraries, no Python, no segments that carry
# messages. PyTorch's profiler tells of every allocation of its own; it slows a step down, so that steps are not timed
# while it looks.


_MEMORY_EVENT = "[memory]"


@dataclass(frozen=True)
class Allocated:
    """`stayed_bytes` more at the end than at the beginning; at most `peak_bytes` more in between.

    What groups gave out counts from beginning to end, as far as it stays.
    """

    stayed_bytes: int
    peak_bytes: int


def allocated(work: Callable[[], object]) -> Allocated:
    """What `work` allocates on the CPU, in all threads."""
    gc.collect()  # what goes meanwhile should be this work's own
    windows_before = window_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    del result
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None
    events = [event for event in results.events() if event.name() == _MEMORY_EVENT]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  (the stub lacks it)
        peak = max(peak, held)
    windows = window_bytes() - windows_before
    return Allocated(held + windows, peak + windows)


# What an allocator has, and how much of it tensors and other blocks use: the rest is free memory that it keeps, or
# cannot give back because blocks in use lie between.


ALLOCATOR_EVERY_STEPS = 10
"""A look at glibc's heap passes over its free blocks."""


class AllocatorFigures:
    """`take` is called once a step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._steps = device, 0
        self._heap = None if works_in_streams(device) else _mallinfo2()

    def take(self) -> dict[str, float]:
        """In every tenth step, the first included: `memory/live_bytes`, given out and not freed, and
        `memory/held_bytes`, what the allocator of an accelerator has reserved, or what of this process is resident.
        The live bytes of a CPU are those of malloc, whoever asked for them; left out where it is not glibc's.
        """
        self._steps += 1
        if self._steps % ALLOCATOR_EVERY_STEPS != 1:
            return {}
        if works_in_streams(self._device):
            live, held = torch.accelerator.memory_allocated, torch.accelerator.memory_reserved
            return {"memory/live_bytes": live(self._device), "memory/held_bytes": held(self._device)}
        resident = _resident_bytes()
        found = {} if resident is None else {"memory/held_bytes": float(resident)}
        if self._heap is not None:
            numbers = self._heap().numbers
            found["memory/live_bytes"] = float(numbers[4] + numbers[7])
        return found


class _Mallinfo2(ctypes.Structure):
    """mallinfo(3): ten numbers. The fifth are the bytes of blocks that are mapped one by one, the eighth those in use
    in heaps."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """glibc's own, since 2.33."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function


def _resident_bytes() -> int | None:
    """Now; None where there is no Linux /proc."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return None
