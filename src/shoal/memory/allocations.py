"""Bytes of tensors that the CPU's allocator has given out: what stays, and the most there was at once.

The counterpart of `torch.cuda.max_memory_allocated`. It counts all that PyTorch allocates, temporaries inside of an
operator too, and what a group of ranks has given out for tensors; no libraries, no Python, no segments that carry
messages. PyTorch's profiler tells of every allocation of its own; it slows a step down, so that steps are not timed
while it looks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from shoal.comm.shm.segment import window_bytes

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
