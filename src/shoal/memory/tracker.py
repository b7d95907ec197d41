"""Bytes that a rank holds for training, counted by the storages of tensors, each once.

Not the resident memory of the process: that knows of allocators and libraries, and not what a byte is for.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.comm.shm.host import window_bytes


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


class LivingStorages(TorchDispatchMode):
    """Counts, while it is entered, the storages that operators make and that still live, whoever holds them.

    What autograd saves is among them, and what a recomputed block keeps beside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """What is held now."""
        return sum(self._living.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        behind = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in behind:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._living:
            self._living[key] = storage.nbytes()
            weakref.finalize(storage, self._living.pop, key, None)


def measured_activation_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that the graph of `forward()`, a loss, holds when it returns: what existed before, as parameters and
    inputs did, not counted."""
    with LivingStorages() as living:
        loss = forward()
        held_bytes = living.bytes
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
