"""Saving without stopping: training waits for a copy in memory, and a thread brings it to the disk.

    save.py        `Saver.save`: agree on who writes what (once), copy, hand over to the thread
    plan.py        which rank writes which part of which tensor, on the cells of a grid (tensorfile.py)
    staging.py     the copy, laid out as the files will be (tensorfile.py)
    encoding.py    the thread: objects in fewer bytes (planes.py), where that is asked for
    round.py       the thread: write, read back, publish what was written, learn whether it counts
    agreement.py   what a rank says meanwhile, so that nobody waits for a dead one
    objects.py     files that survive a crash; commit.py: the rename that makes a checkpoint of them
    manifest.py    what the checkpoint says it contains

The thread hands large buffers to calls that release the interpreter's lock (hashing, writing, fsync), so that the
thread that trains keeps it. One save is under way at a time; the next one waits for it, as part of its own stall.

All waits follow from one number, `timeout_s`: ranks wait that long after the last sign of life of another, and the
thread that trains twice as long for a save that makes no progress, because its disk hangs.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.agreement import InventoryAgreement, MessageExchange, Ranks
from shoal.checkpoint.commit import sweep
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.encoding import Encoder
from shoal.checkpoint.manifest import plain
from shoal.checkpoint.objects import Disk, OnPoint, Places, make_folders, unheard
from shoal.checkpoint.plan import Inventory, SavePlan, inventory_of, plan_for
from shoal.checkpoint.round import Round, Seat, sentence
from shoal.checkpoint.staging import FileStaging, Staging
from shoal.checkpoint.tensorfile import Parcel
from shoal.errors import EnvironmentFault
from shoal.state import Held, Target, parts_of, works_in_streams
from shoal.topology.holding import Box

STUCK_AFTER = 2.0
"""A save hangs when it has made no progress for this many `timeout_s`."""
CLOSE_S = 10.0


@dataclass(frozen=True)
class SaveReport:
    """What became of a save. Bytes are of all ranks together; `seconds` run from the call to the verdict.

    `state_bytes` are those of the tensors; written to the disk, or found there, were as many or fewer, encoded ones.
    `committed` says whether the checkpoint counts. `error` can be set beside it: the checkpoint is there, but `latest`
    could not be changed, older ones not deleted, or an object of older ones is damaged.
    """

    step: int
    seconds: float
    bytes_written: int
    bytes_reused: int
    committed: bool
    error: str | None
    state_bytes: int = 0


class Saver:
    """Saves named tensors and a JSON-able state into the checkpoints of the run directory `directory`.

    Every rank has one; all call `check`, `prepare` and `save` for the same steps in the same order. Rank 0's start
    deletes what an interrupted save left; the others make no object before rank 0 saves, too, but lay out their shares
    in files beside the objects where `config.staging` is "disk". `directory` lies on a file system that all ranks
    share. Raises `EnvironmentFault` at once where nothing can be saved.

    `split` says that ranks may hold different tensors or parts of them: then all ranks first exchange inventories.
    Without it all hold the same whole tensors, and no rank waits for another before it copies. `on_commit` is called
    on the saving thread with the step of a checkpoint that counts, before the next save begins. `timeout_s`: how long a
    rank may say nothing before the others give the save up.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        exchange: MessageExchange,
        config: CheckpointConfig,
        timeout_s: float,
        split: bool = False,
        on_point: OnPoint = unheard,
    ) -> None:
        self.on_commit: Callable[[int], None] | None = None
        self._seat = Seat(
            rank=rank,
            world_size=world_size,
            exchange=exchange,
            timeout_s=timeout_s,
            places=Places(directory),
            on_point=on_point,
            keep=config.keep,
        )
        self._object_bytes, self._in_files = config.object_bytes, config.staging == "disk"
        self._encoder = Encoder(config)
        self._split = split
        self._agreement = InventoryAgreement(exchange, rank=rank, world_size=world_size, timeout_s=timeout_s)
        self._ready: _Ready | None = None
        self._thread: threading.Thread | None = None
        self._round: Round | None = None
        self._reports: queue.SimpleQueue[SaveReport] = queue.SimpleQueue()
        self._rounds = 0
        _open(self._seat)

    def check(self, tensors: Mapping[str, Held], state: Mapping[str, Any], *, generation: int = 0) -> None:
        """Agree on who would write what, and write nothing: what cannot be saved is known before the first step.

        Raises `UsageError` as `save` does. All ranks call it; one that does not answer is told by the next that waits
        for it.
        """
        plain(state, "state")
        parts, call = parts_of(tensors), self._rounds
        self._rounds += 1
        with suppress(TimeoutError, EnvironmentFault):
            held = self._held_by_all(parts, generation, call)
            plan_for(held.by_ranks, world_size=self._seat.world_size, object_bytes=self._object_bytes)

    def prepare(self, tensors: Mapping[str, Held], *, generation: int = 0) -> None:
        """Agree on who writes what, and allocate the memory, so that the first save stalls no longer than the others.

        Raises as `save` does, and what the exchange raises when a rank does not answer.
        """
        parts, call = parts_of(tensors), self._rounds
        self._rounds += 1
        self._require_free()
        self._make_ready(parts, self._held_by_all(parts, generation, call))

    def save(
        self,
        step: int,
        tensors: Mapping[str, Held],
        state: Mapping[str, Any],
        *,
        layout: Mapping[str, Any],
        generation: int = 0,
    ) -> float:
        """Copy this rank's share of `tensors` and start to save it; returns the seconds that training was blocked.

        A plain tensor is whole, and equal on all ranks that name it; of any other the rank names the parts that it
        has, and none where others have it all. `state` and `layout` are JSON, and those of rank 0 count. Raises
        `UsageError` for what a checkpoint cannot hold, and on all ranks alike where a part of a tensor has no holder or
        parts overlap; a fault of the disk or of another rank is never raised, but reported by `poll`.
        """
        started_s = time.perf_counter()
        parts, sequence = parts_of(tensors), self._rounds
        self._rounds += 1
        try:
            self._require_free()
            held = self._held_by_all(parts, generation, sequence)
        except (TimeoutError, EnvironmentFault) as error:
            failed = sentence(error, step=step, root=self._seat.places.root)
            self._reports.put(SaveReport(step, time.perf_counter() - started_s, 0, 0, committed=False, error=failed))
            return time.perf_counter() - started_s
        ready = self._make_ready(parts, held)
        ready.staging.fill(parts)
        round_ = self._round = Round(
            self._seat,
            ready.plan,
            step=step,
            generation=generation,
            sequence=sequence,
            state=plain(state, "state"),
            layout=plain(layout, "layout"),
            before=self._round,
        )
        self._thread = threading.Thread(
            target=self._run, args=(round_, ready.staging, started_s), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        return time.perf_counter() - started_s

    def poll(self) -> list[SaveReport]:
        """The reports that came in since the last call, oldest first; never waits."""
        reports: list[SaveReport] = []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return reports

    def wait(self, timeout_s: float = math.inf) -> list[SaveReport]:
        """Wait for the save on its way, at most `timeout_s` seconds, and return as `poll` does.

        A disk that hangs ends the wait, too, and the last report says so.
        """
        self._join(timeout_s)
        reports = self.poll()
        if timeout_s == math.inf and self._thread is not None and self._round is not None:
            step, seconds = self._round.step, STUCK_AFTER * self._seat.timeout_s
            reports.append(SaveReport(step, seconds, 0, 0, committed=False, error=str(self._stuck(self._round))))
        return reports

    def close(self, timeout_s: float = CLOSE_S) -> list[SaveReport]:
        """Wait at most `timeout_s` seconds for the save on its way, give the memory back, return the last reports.

        A save that is then still on its way (its peers may be dead) is left to the end of the process: that is a kill
        like any other, and costs that save alone.
        """
        self._join(timeout_s)
        self._ready = None
        if self._thread is None:
            self._encoder.forget()
        return self.poll()

    def _held_by_all(self, parts: Mapping[str, Sequence[Target]], generation: int, call: int) -> _HeldByAll:
        """What each rank holds; this rank's own inventory is made anew only when its tensors are others."""
        signature = [(name, *map(_signature, targets)) for name, targets in parts.items()]
        known = self._ready
        own = known.held.own if known is not None and known.held.signature == signature else inventory_of(parts)
        if self._split:
            return _HeldByAll(signature, own, self._agreement.inventories(own, generation=generation, call=call))
        return _HeldByAll(signature, own, {tuple(range(self._seat.world_size)): own})

    def _make_ready(self, parts: Mapping[str, Sequence[Target]], held: _HeldByAll) -> _Ready:
        if self._ready is not None and self._ready.held == held:
            return self._ready
        self._ready = None  # The old memory goes before the new is asked for.
        plan = plan_for(held.by_ranks, world_size=self._seat.world_size, object_bytes=self._object_bytes)
        boxes: dict[str, Sequence[Box]] = {item.name: item.boxes for item in held.own}
        self._ready = _Ready(held, plan, self._staging(plan.share(self._seat.rank), boxes, parts))
        return self._ready

    def _staging(
        self, parcels: list[Parcel], boxes: Mapping[str, Sequence[Box]], parts: Mapping[str, Sequence[Target]]
    ) -> Staging | FileStaging:
        if self._in_files:
            seat = self._seat
            return FileStaging(
                parcels, boxes, places=seat.places, disk=Disk(seat.on_point), owner=f"rank-{seat.rank:05d}"
            )
        pinned = any(works_in_streams(target.tensor.device) for targets in parts.values() for target in targets)
        return Staging(parcels, boxes, pinned=pinned)

    def _run(self, round_: Round, staging: Staging | FileStaging, started_s: float) -> None:
        parcels = round_.plan.share(self._seat.rank)
        verdict = round_.run(self._encoder.objects(staging, parcels))
        unkept = self._encoder.settle(staging, parcels, round_.stored if verdict.committed else None)
        staging.clear()
        if verdict.committed and self.on_commit is not None:
            self.on_commit(round_.step)
        self._reports.put(
            SaveReport(
                step=round_.step,
                seconds=time.perf_counter() - started_s,
                bytes_written=verdict.bytes_written,
                bytes_reused=verdict.bytes_reused,
                committed=verdict.committed,
                error=verdict.error or unkept,
                state_bytes=sum(piece.nbytes for parcel in round_.plan.parcels for piece in parcel),
            )
        )

    def _require_free(self) -> None:
        """Waits for the save before. Raises `EnvironmentFault` where that hangs."""
        self._join(math.inf)
        if self._thread is not None and self._round is not None:
            raise self._stuck(self._round)

    def _stuck(self, round_: Round) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self._seat.places.root} has not answered the save of step {round_.step} for "
            f"{STUCK_AFTER * self._seat.timeout_s:g} s: check the disk and its mount"
        )

    def _join(self, within_s: float) -> None:
        """Until the save before is over, has made no progress for a time in which every other wait ends, or `within_s`
        are over.
        """
        thread, round_ = self._thread, self._round
        if thread is None or round_ is None:
            return
        end_s, progress = time.monotonic() + within_s, -1
        while thread.is_alive() and progress != round_.progress and (left_s := end_s - time.monotonic()) > 0:
            progress = round_.progress
            thread.join(min(left_s, STUCK_AFTER * self._seat.timeout_s))
        if not thread.is_alive():
            self._thread = None


@dataclass(frozen=True)
class _HeldByAll:
    """What this rank holds (`signature` tells it cheaply from another state, `own` in full), and what all do."""

    signature: list[tuple[Any, ...]]
    own: Inventory
    by_ranks: dict[Ranks, Inventory]


@dataclass(frozen=True)
class _Ready:
    """All that is made once for tensors that stay the same."""

    held: _HeldByAll
    plan: SavePlan
    staging: Staging | FileStaging


def _signature(target: Target) -> tuple[Any, ...]:
    return target.tensor.dtype, target.tensor.shape, target.global_shape, target.offset


def _open(seat: Seat) -> None:
    """Make the folders, and delete what an interrupted save left."""
    places = seat.places
    try:
        make_folders(places)
        if seat.rank == 0:
            sweep(places, disk=Disk(), staged=True)
            for folder in (places.root, places.run_directory):
                Disk().sync_folder(folder, action="folder/fsync")
    except OSError as error:
        raise EnvironmentFault(
            f"no checkpoint can be saved in {places.root} ({error.strerror}): make it writable, or change run.directory"
        ) from error
