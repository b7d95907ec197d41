"""The collector runs when it is told to, and tensors that pile up are named with their line."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.memory.collector import (
    LOOK_EVERY_STEPS,
    STEPS_OF_A_LEAK,
    WARM_UP_STEPS,
    Collector,
    LeakWatch,
    largest_holders,
    living_tensors,
)
from shoal.observe.profile.first_step import StepLook

WITHIN_STEPS = 60
KEPT: list[Tensor] = []


class Cycle:
    """An object that only a collector frees, with a tensor."""

    def __init__(self) -> None:
        self.self, self.tensor = self, torch.zeros(8)


@contextmanager
def collecting(every: int) -> Iterator[Collector]:
    collector = Collector(every)
    try:
        yield collector
    finally:
        collector.close()
        KEPT.clear()


def lines_of(collector: Collector, steps: int, each: Any) -> dict[int, list[str]]:
    """What was said after which step."""
    said = {}
    for step in range(1, steps + 1):
        each(step)
        collector.after_step()
        if lines := collector.take_lines():
            said[step] = lines
    return said


@pytest.mark.slow
def test_a_tensor_a_step_is_named_within_sixty_steps() -> None:
    """Once: its kind, the line that makes it, and what holds it."""

    def leaking(step: int) -> None:
        KEPT.append(torch.ones(33, 7) * step)  # the line that is named

    with collecting(20) as collector:
        said = lines_of(collector, 2 * STEPS_OF_A_LEAK, leaking)
    ((step, (line,)),) = said.items()
    assert step <= WITHIN_STEPS
    named = leaking.__code__.co_firstlineno + 1
    assert f"test_collector.py:{named}" in line
    assert "Tensor of float32 [33, 7]" in line
    assert "in a list of" in line


@pytest.mark.slow
def test_a_holder_that_was_frozen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of before the warm-up is none that the collector follows. Each of two leaks is named once, the second of
    them no later for what was frozen when the first one was.
    """
    monkeypatch.setattr(LeakWatch, "_trace", lambda *_: None)  # takes most of the time, and says nothing of holders
    old, late = [torch.zeros(3, 11)], list[Tensor]()

    def leaking(step: int) -> None:
        old.append(torch.ones(3, 11) * step)
        if step > 20:
            late.append(torch.ones(3, 12) * step)

    frozen = gc.get_freeze_count()
    with collecting(20) as collector:
        said = lines_of(collector, 70, leaking)
        assert gc.get_freeze_count() > frozen
    (first, (line,)), (second, (other,)) = said.items()
    assert "float32 [3, 11]" in line
    assert f"{first - WARM_UP_STEPS} of them in a list of {first + 1}" in line
    assert "float32 [3, 12]" in other
    assert f"in a list of {second - 20}" in other
    assert second <= 20 + STEPS_OF_A_LEAK


def test_what_comes_and_goes_is_not_named() -> None:
    """Garbage between two collections, a cache that fills up, and a window of the last steps."""

    def busy(step: int) -> None:
        Cycle()
        KEPT.append(torch.zeros(5, step % 3 + 1))
        del KEPT[: max(0, len(KEPT) - 30)]

    with collecting(10) as collector:
        assert lines_of(collector, 2 * STEPS_OF_A_LEAK, busy) == {}


def test_it_collects_after_every_step_and_gives_the_collector_back() -> None:
    """What is young is gone after its step; what was old before goes every so many. A pause is measured."""
    assert gc.isenabled()
    living = lambda: sum(type(x) is Cycle for x in gc.get_objects())  # noqa: E731
    with collecting(7) as collector:
        found, old = [], None
        for step in range(1, 16):
            Cycle()
            old = Cycle() if step == 4 else None if step == 9 else old  # two collections make it old
            pause_s = collector.after_step()["memory/collector_s"]
            found.append((living(), pause_s > 0))
        assert not gc.isenabled()
    assert gc.isenabled()
    assert found[WARM_UP_STEPS - 1 : 8] == [(0, True), *[(1, True)] * 5]
    assert found[8:] == [*[(1, True)] * 5, (0, True), (0, True)]
    assert LOOK_EVERY_STEPS < STEPS_OF_A_LEAK


def test_the_largest_holders_are_named_where_memory_ends() -> None:
    """By bytes, each storage once."""
    held = [torch.zeros(700, 1001) for _ in range(3)]
    views = [held[0][:, :1] for _ in range(9)]
    said = largest_holders()
    assert said.startswith("the largest tensors: 8.02 MiB in 3 Tensor of float32 [700, 1001]"), said
    del views


def look_at_a_step() -> None:
    with StepLook(compiled=False).around(nullcontext)():
        torch.ones(2)


@pytest.mark.slow
@pytest.mark.parametrize("look", [living_tensors, look_at_a_step])
def test_no_look_at_all_objects_spoils_another_threads_tuple(look: Callable[[], object]) -> None:
    """CPython fills a tuple from an iterator in place and fails where somebody else holds it, as a list of all does."""
    before_s = sys.getswitchinterval()
    spoilt: list[SystemError] = []
    ends = threading.Event()

    def read_samples() -> None:
        while not ends.is_set() and not spoilt:
            try:
                tuple(number for number in range(64))
            except SystemError as error:
                spoilt.append(error)

    reader = threading.Thread(target=read_samples)
    sys.setswitchinterval(1e-6)
    reader.start()
    try:
        for _ in range(4):
            look()
    finally:
        ends.set()
        reader.join()
        sys.setswitchinterval(before_s)
    assert not spoilt
