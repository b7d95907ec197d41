"""Where a rank is that waits for others on a GPU: its thread stands at an event of the device, not in a collective."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.assembly.hang_watch import DEVICE, HangWatch, groups_of, waits
from shoal.assembly.run import Run
from shoal.comm.board import Board
from shoal.engine.tally import _read
from shoal.resilience.hang_verdict import hang_verdict
from shoal.topology.layout import Layout
from tests.comm.groups import alone
from tests.waiting import HANG_S


class Event:
    """Of a device that waits for another rank, until it is let go."""

    def __init__(self) -> None:
        self.asked, self.done = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.asked.set()
        assert self.done.wait(HANG_S)


@pytest.mark.parametrize("on_device", [True, False])
def test_a_thread_that_waits_for_its_device_waits_for_other_ranks(tmp_path: Path, on_device: bool) -> None:
    """All newest calls may be those that it waits for. On a CPU the same reads wait for nobody."""
    mesh, event = alone(), Event()
    mesh.process_group([0], lane="sums").allreduce([torch.ones(2)]).wait()
    found: dict[str, Any] = {}

    def look(watch: HangWatch) -> None:
        if on_device:
            assert event.asked.wait(HANG_S)
        found["activity"], found["report"] = watch.activity(), watch.report()
        event.done.set()

    with HangWatch(mesh, Board(dist.HashStore(), timeout_s=1.0), tmp_path, after_s=0.0, say=print) as watch:
        thread = threading.Thread(target=look, args=(watch,))
        thread.start()
        _read(torch.ones(1), event if on_device else None)  # type: ignore[arg-type]
        thread.join()
    assert found["activity"].doing == ("waits" if on_device else "computes")
    assert waits(found["report"]) == on_device
    reports = {0: found["report"]}
    assert ("their GPUs compute for so long" in hang_verdict(groups_of(reports), reports).sentence) == on_device
    assert watch._waiting() is None
    assert DEVICE not in found["report"].calls


@pytest.mark.parametrize("on_device", [True, False])
def test_a_rank_leaves_when_all_devices_have_done_their_work(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    """First its own, where the watch on hangs sees that it waits, then all. On a CPU nothing is under way."""
    done: list[str] = []
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: done.append(watched())))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: done.append("own"))
    barrier = SimpleNamespace(wait=lambda: done.append("all"))
    mesh = SimpleNamespace(layout=Layout(replicate=2), world=SimpleNamespace(barrier=lambda: barrier))
    run: Any = SimpleNamespace(device=torch.device("cuda" if on_device else "cpu"), mesh=mesh)
    Run.settle(run)
    assert done == (["wait_for", "own", "all"] if on_device else [])


def watched() -> str:
    """Who waits for the event that calls this."""
    return sys._getframe(2).f_code.co_name
