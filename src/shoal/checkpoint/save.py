"""Saving without stopping: training waits for a copy in memory, and a thread brings it to the disk.

The thread hands large buffers to calls that release the interpreter's lock (hashing, writing, fsync), so that the
thread that trains keeps it. One save is on its way at a time; the next one waits for it, as part of its own stall.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.dtypes import dtype_name
from shoal.checkpoint.durable import Disk, OnPoint, unheard
from shoal.checkpoint.exchange import Exchange
from shoal.checkpoint.grid import TensorSpec
from shoal.checkpoint.places import Places
from shoal.checkpoint.plain import plain
from shoal.checkpoint.plan import Plan, plan_for
from shoal.checkpoint.retention import sweep
from shoal.checkpoint.round import Round, Seat
from shoal.checkpoint.staging import Staging
from shoal.errors import EnvironmentFault

OBJECT_BYTES = 8 << 20


@dataclass(frozen=True)
class SaveReport:
    """What became of a save. Bytes are of all ranks together; `seconds` run from the call to the verdict.

    `committed` says whether the checkpoint counts. `error` can be set beside it: the checkpoint is there, but `latest`
    could not be changed, or older ones not deleted.
    """

    step: int
    seconds: float
    bytes_written: int
    bytes_reused: int
    committed: bool
    error: str | None


class Saver:
    """Saves named tensors and a JSON-able state into the checkpoints of the run directory `directory`.

    Every rank has one, with the same tensors; all call `save` for the same steps in the same order. Rank 0's start
    deletes what an interrupted save left, so every rank makes its saver before the first save of any. `directory` lies
    on a file system that all ranks share. Raises `EnvironmentFault` at once where nothing can be saved.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        exchange: Exchange,
        keep: int,
        object_bytes: int = OBJECT_BYTES,
        timeout_s: float = 600.0,
        on_point: OnPoint = unheard,
    ) -> None:
        self._seat = Seat(
            rank=rank,
            world_size=world_size,
            exchange=exchange,
            timeout_s=timeout_s,
            places=Places(directory),
            disk=Disk(on_point),
            keep=keep,
        )
        self._object_bytes = object_bytes
        self._specs: list[TensorSpec] = []
        self._plan: Plan | None = None
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._reports: queue.SimpleQueue[SaveReport] = queue.SimpleQueue()
        self._rounds = 0
        _open(self._seat)

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate and touch the memory for `tensors` now, so that the first save stalls no longer than the others."""
        self._join(None)
        self._make_ready(tensors)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        layout: Mapping[str, Any],
        generation: int = 0,
    ) -> float:
        """Copy this rank's share of `tensors` and start to save it; returns the seconds that training was blocked.

        `tensors` are whole and equal on all ranks, of any device and shape; `state` and `layout` are JSON, and those of
        rank 0 count. Raises `UsageError` for what a checkpoint cannot hold; a fault of the disk is never raised, but
        reported by `poll`.
        """
        started_s = time.perf_counter()
        self._join(None)
        plan, staging = self._make_ready(tensors)
        staging.fill(tensors)
        round_ = Round(
            seat=self._seat,
            plan=plan,
            step=step,
            generation=generation,
            sequence=self._rounds,
            state=plain(state, "state"),
            layout=plain(layout, "layout"),
        )
        self._rounds += 1
        self._thread = threading.Thread(
            target=self._run, args=(round_, staging, started_s), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        return time.perf_counter() - started_s

    def poll(self) -> list[SaveReport]:
        """The reports that came in since the last call, oldest first; never waits."""
        reports: list[SaveReport] = []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return reports

    def wait(self, timeout_s: float | None = None) -> list[SaveReport]:
        """Wait for the save on its way, at most `timeout_s` seconds, and return as `poll` does."""
        self._join(timeout_s)
        return self.poll()

    def close(self, timeout_s: float = 10.0) -> list[SaveReport]:
        """Wait at most `timeout_s` seconds for the save on its way, give the memory back, return the last reports.

        A save that is then still on its way (its peers may be dead) is left to the end of the process: that is a kill
        like any other, and costs that save alone.
        """
        self._join(timeout_s)
        self._specs, self._plan, self._staging = [], None, None
        return self.poll()

    def _make_ready(self, tensors: Mapping[str, Tensor]) -> tuple[Plan, Staging]:
        specs = [_spec(name, tensor) for name, tensor in tensors.items()]
        if self._plan is None or self._staging is None or specs != self._specs:
            self._staging = None  # The old memory goes before the new is asked for.
            self._plan = plan_for(specs, world_size=self._seat.world_size, object_bytes=self._object_bytes)
            pinned = any(tensor.is_cuda for tensor in tensors.values())
            self._staging = Staging(self._plan.share(self._seat.rank), pinned=pinned)
            self._specs = specs
        return self._plan, self._staging

    def _run(self, round_: Round, staging: Staging, started_s: float) -> None:
        verdict = round_.run(staging)
        self._reports.put(
            SaveReport(
                step=round_.step,
                seconds=time.perf_counter() - started_s,
                bytes_written=verdict.bytes_written,
                bytes_reused=verdict.bytes_reused,
                committed=verdict.committed,
                error=verdict.error,
            )
        )

    def _join(self, timeout_s: float | None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, dtype_name(tensor, name), tensor.itemsize, tuple(tensor.shape))


def _open(seat: Seat) -> None:
    """Make the folders durable and delete what an interrupted save left."""
    places, disk = seat.places, Disk()
    try:
        places.objects.mkdir(parents=True, exist_ok=True)
        if seat.rank == 0:
            sweep(places, disk=disk)
            for folder in (places.root, places.run_directory):
                disk.sync_folder(folder, action="folder/fsync")
    except OSError as error:
        raise EnvironmentFault(
            f"no checkpoint can be saved in {places.root} ({error.strerror}): make it writable, or change run.directory"
        ) from error
