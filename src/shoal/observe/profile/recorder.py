"""Recording one rank's steps: PyTorch's profiler for operators and kernels, the journal for collectives.

The profiler's times are Unix nanoseconds, the journal's are `time.perf_counter`; both become seconds of rank 0's clock
since `origin_s`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.comm.clock import ClockOffset
from shoal.comm.ledger import Journal, Ledger
from shoal.observe.profile.recording import Called, Recording, Slice, Step, Waited
from shoal.state import works_in_streams

MARK = "shoal: the thread that trains"
_NANO = 1e-9
_SHORTEST_S = 1e-6
"""Operators below a microsecond are left out: they are thousands, and the profiler's own cost is more."""


@dataclass
class _Taken:
    number: int
    begin_s: float
    data_s: float
    end_s: float
    data_cpu_s: float
    cpu_s: float


@dataclass
class Recorder:
    """Records what happens within `recording()`; `origin_s` is in Unix seconds of rank 0's clock."""

    ledger: Ledger
    device: torch.device
    clock: ClockOffset
    origin_s: float
    _taken: list[_Taken] = field(default_factory=list)
    _begun: list[tuple[float, float]] = field(default_factory=list)
    _journal: Journal = field(default_factory=Journal)
    _slices: list[Slice] = field(default_factory=list)
    _thread: int = 0
    _unix_s: float = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """All calls of the group have ended when this is entered, and when it is left."""
        activities = [ProfilerActivity.CPU]
        if works_in_streams(self.device):
            activities.append(_activity(self.device))
        with profile(activities=activities) as profiler:
            self._unix_s = time.time() - time.perf_counter()
            with record_function(MARK):
                self.ledger.journal = self._journal
            try:
                yield
            finally:
                self.ledger.journal = None
                self._synchronize()
        self._read(events_of(profiler))

    def step(self, number: int, take_data: Callable[[], Any], train: Callable[[Any], None]) -> None:
        """One step: what `take_data` returns goes to `train`."""
        self.begin()
        data = take_data()
        self.has_data()
        train(data)
        self.end(number)

    def begin(self) -> None:
        """A step begins, with the wait for its data."""
        self._begun = [(time.perf_counter(), time.process_time())]

    def has_data(self) -> None:
        """Its data is there."""
        self._begun.append((time.perf_counter(), time.process_time()))

    def end(self, number: int) -> None:
        """Step `number` is over."""
        self._synchronize()
        (begin_s, begin_cpu_s), (data_s, data_cpu_s) = self._begun
        end_s, end_cpu_s = time.perf_counter(), time.process_time()
        self._taken.append(_Taken(number, begin_s, data_s, end_s, data_cpu_s - begin_cpu_s, end_cpu_s - data_cpu_s))

    def result(self, rank: int, host: str, sources: dict[str, str]) -> Recording:
        """What was recorded."""
        at = self._at
        steps = [Step(t.number, at(t.begin_s), at(t.data_s), at(t.end_s), t.data_cpu_s, t.cpu_s) for t in self._taken]
        calls = [
            Called(call.key, call.operation, call.ranks, call.sent_bytes, at(call.begin_s), at(call.end_s))
            for call in self._journal.calls
            if call.end_s is not None
        ]
        waits = [Waited(w.key, w.operation, at(w.begin_s), at(w.end_s)) for w in self._journal.waits]
        return Recording(
            rank, host, self._thread, steps, self._slices, calls, waits, sources, clock_error_s=self.clock.error_s
        )

    def _at(self, perf_s: float) -> float:
        return self._unix_s + perf_s + self.clock.offset_s - self.origin_s

    def _read(self, events: Iterable[Any]) -> None:
        origin_ns = round(self.origin_s / _NANO)  # whole numbers until here, so that what nests still does
        for event in events:
            if event.name() == MARK:
                self._thread = event.start_thread_id()
                continue
            on_device = event.device_type() != DeviceType.CPU
            begin_ns, end_ns = event.start_ns() - origin_ns, event.end_ns() - origin_ns
            if (end_ns - begin_ns) * _NANO < _SHORTEST_S or (on_device and event.is_user_annotation()):
                continue
            thread = event.device_resource_id() if on_device else event.start_thread_id()
            device = event.device_index() if on_device else -1
            begin_s, end_s = (ns * _NANO + self.clock.offset_s for ns in (begin_ns, end_ns))
            self._slices.append(Slice(event.name(), thread, begin_s, end_s, device))

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _activity(device: torch.device) -> ProfilerActivity:
    """What PyTorch's profiler calls kernels of `device`."""
    own = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    return own.get(device.type, ProfilerActivity.PrivateUse1)


def events_of(profiler: profile) -> list[Any]:
    """The raw events of a profile that has ended."""
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return [] if results is None else list(results.events())


# Which line of Python calls an operator: one more step, with PyTorch's profiler recording Python's frames too.
#
# That slows the step down several times, so its times are not used, and its operators only as parts of one another.


_BETWEEN = ("torch/", "<", "__torch_function__")
"""PyTorch's own frames, those of functions in C, and those that see every operator."""


def sources(step: Callable[[], object], names: Collection[str]) -> dict[str, str]:
    """For each operator of these names that a function of the model's called, that function: "file.py(12): forward".

    Takes one step. Of several functions, the one in which the operator took longest.
    """
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        step()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return {} if results is None else callers(frames_in(results.experimental_event_tree()), names)


Frame = tuple[int, int, int, str, bool]
"""Thread, begin and end in ns, name, and whether it is a function of Python."""


def frames_in(tree: Iterable[Any]) -> Iterator[Frame]:
    """What PyTorch's profiler recorded, of which each event knows those within it: from 2.11 on the one place that
    tells functions of Python from operators.
    """
    for event in tree:
        is_python = event.tag in (_EventType.PyCall, _EventType.PyCCall)
        yield event.start_tid, event.start_time_ns, event.end_time_ns, event.name, is_python
        yield from frames_in(event.children)


def callers(frames: Iterable[Frame], names: Collection[str]) -> dict[str, str]:
    """The innermost of the model's functions around each operator."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    stack: list[Frame] = []
    for frame in sorted(frames, key=lambda frame: (frame[0], frame[1], -frame[2])):
        thread, begin, end, name, is_python = frame
        while stack and (stack[-1][0] != thread or stack[-1][2] <= begin):
            stack.pop()
        if is_python:
            stack.append(frame)
        elif name in names and (around := _models_function(stack)) is not None:
            found[name][around] += end - begin
    return {name: counts.most_common(1)[0][0] for name, counts in found.items()}


def _models_function(stack: Sequence[Frame]) -> str | None:
    """The first frame around that is not PyTorch's; None where Shoal's own engine called the operator."""
    name = next((frame[3] for frame in reversed(stack) if not any(part in frame[3] for part in _BETWEEN)), None)
    engine = name is not None and "shoal/" in name and "shoal/models/" not in name
    return None if engine else name
