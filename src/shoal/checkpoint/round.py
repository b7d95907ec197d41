"""The commit: what all ranks wrote becomes a checkpoint by one atomic rename, and not before it is durable.

Order: objects (durable, verified) -> manifest in a temporary folder (durable, verified) -> rename of that folder ->
fsync of its parent -> the file `latest`. A crash between any two leaves the checkpoint before, or this one, whole.

One save after the copy, as one rank lives it: write and verify its share, tell, and hear whether it counts.

    rank 0       says that the round has begun
    every rank   objects -> disk, read back -> Share
    rank 0       all Shares -> manifest -> commit -> retention -> Verdict
    the others   wait for the Verdict

A fault never leaves this file as an exception: it becomes a sentence in a Share or in the Verdict, so that training
goes on and no rank waits for one that has failed. Rank 0 deletes before it gives the Verdict, so that no other rank
can be at the next save by then and count on an object that is about to go. It also deletes at its start, what an
interrupted save left, and when a round has failed: so the others write nothing before its word.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.agreement import Exchange
from shoal.checkpoint.durable import Disk, sentence, sentence_after_commit
from shoal.checkpoint.grid import Parcel
from shoal.checkpoint.manifest import FORMAT_VERSION, BoxEntry, Manifest, TensorEntry
from shoal.checkpoint.objects import MANIFEST, Places, Stored, damage, settle, step_name, store, temporary
from shoal.checkpoint.plan import Plan
from shoal.checkpoint.retention import retain, sweep
from shoal.checkpoint.staging import Staging
from shoal.checkpoint.verdict import Share, Verdict, decode_share, decode_verdict, encode
from shoal.errors import CorruptCheckpoint, EnvironmentFault, UsageError


def tensor_entries(parcels: Sequence[Parcel], stored: Sequence[Stored]) -> list[TensorEntry]:
    """The manifest's tensors, by name, where parcel `i` became the object `stored[i]`."""
    entries: dict[str, TensorEntry] = {}
    for parcel, item in zip(parcels, stored, strict=True):
        for key, (spec, box) in enumerate(parcel):
            entry = entries.setdefault(spec.name, TensorEntry(spec.name, spec.dtype, list(spec.shape), []))
            entry.boxes.append(BoxEntry(list(box.offset), list(box.shape), item.digest, str(key)))
    for entry in entries.values():
        entry.boxes.sort(key=lambda box: box.offset)
    return [entries[name] for name in sorted(entries)]


def writer() -> dict[str, str]:
    """The versions that wrote a checkpoint."""
    try:
        shoal = version("shoal")
    except PackageNotFoundError:
        shoal = "not installed"
    return {"shoal": shoal, "torch": str(torch.__version__)}


def commit(manifest: Manifest, places: Places, *, disk: Disk) -> None:
    """Make `manifest`, whose objects are durable and verified, the checkpoint of its step."""
    _require_visible(manifest, places)
    folder = _unfinished(manifest, places, disk)
    target = places.step(manifest.step)
    if target.exists():
        # The step was saved before, by a run that then went back: the new manifest takes the old one's place.
        disk.rename(folder / MANIFEST, target / MANIFEST, action="commit/rename")
        disk.sync_folder(target, action="folder/fsync")
    else:
        disk.rename(folder, target, action="commit/rename")
    disk.sync_folder(places.root, action="commit/fsync")


def _require_visible(manifest: Manifest, places: Places) -> None:
    for digest, nbytes in manifest.objects.items():
        path = places.object(digest)
        if not path.is_file() or path.stat().st_size != nbytes:
            raise EnvironmentFault(
                f"{path} was written by one rank and is not seen by rank 0: "
                "put run.directory on a file system that all ranks share"
            )


def _unfinished(manifest: Manifest, places: Places, disk: Disk) -> Path:
    folder = temporary(places.step(manifest.step), "commit")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    content = manifests.encode(manifest)
    path = folder / MANIFEST
    disk.write(path, content, kind="manifest")
    problem = damage(path, blake3(content).hexdigest(), nbytes=len(content))
    if problem:
        raise CorruptCheckpoint(f"{path} {problem} right after it was written: check this disk")
    disk.sync_folder(folder, action="folder/fsync")
    return folder


def point_latest(step: int, places: Places, *, disk: Disk) -> None:
    """Let the file `latest` name the checkpoint of `step`, which is committed."""
    unfinished = temporary(places.latest, "commit")
    disk.write(unfinished, f"{step_name(step)}\n".encode(), kind="latest")
    disk.rename(unfinished, places.latest, action="latest/rename")
    disk.sync_folder(places.root, action="pointer/fsync")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a rank has for all its saves: its place among those that save together, and where they save to."""

    rank: int
    world_size: int
    exchange: Exchange
    timeout_s: float
    places: Places
    disk: Disk
    keep: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """One save. `sequence` counts a saver's rounds, so that saving one step twice does not confuse the board.

    `stale` is a key of the round before, which every rank has read before it answers in this one.
    """

    seat: Seat
    plan: Plan
    step: int
    generation: int
    sequence: int
    state: dict[str, Any]
    layout: dict[str, Any]
    stale: str | None = None

    @property
    def verdict_key(self) -> str:
        """Where rank 0 tells the others what became of it."""
        return self._key("verdict")

    def run(self, staging: Staging) -> Verdict:
        """Bring the content of `staging` to the disk and to a verdict; raises nothing."""
        if self.seat.rank == 0:
            return self._lead(staging)
        try:
            self.seat.exchange.collect([self._begun_key], self.seat.timeout_s)
        except Exception as error:
            return self._unled(self._sentence(error))
        return self._follow(self._write(staging))

    def _write(self, staging: Staging) -> Share:
        seat = self.seat
        try:
            owner = f"rank-{seat.rank:05d}"
            stored = [store(data, seat.places, disk=seat.disk, owner=owner) for data in staging.objects()]
            settle(stored, seat.places, disk=seat.disk)
            return Share(self.plan.fingerprint, stored)
        except Exception as error:
            return Share(self.plan.fingerprint, [], self._sentence(error))

    def _unled(self, error: str) -> Verdict:
        """Rank 0 has not come. Should it come later, it need not wait."""
        with suppress(Exception):
            self._tell(Share(self.plan.fingerprint, [], error))
        return Verdict(False, error)

    def _tell(self, share: Share) -> None:
        self.seat.exchange.publish(self._key(f"share-{self.seat.rank}"), encode(share))

    def _follow(self, share: Share) -> Verdict:
        seat = self.seat
        try:
            self._tell(share)
            # Rank 0 may itself wait that long for a rank that never answers.
            (verdict,) = seat.exchange.collect([self.verdict_key], 2 * seat.timeout_s)
            return decode_verdict(verdict)
        except Exception as error:
            return Verdict(False, self._sentence(error))

    def _lead(self, staging: Staging) -> Verdict:
        seat = self.seat
        try:
            if seat.world_size > 1:
                seat.exchange.publish(self._begun_key, b"")
            verdict = self._decide([self._write(staging), *self._others()])
        except Exception as error:
            verdict = Verdict(False, self._sentence(error))
            with suppress(OSError):
                sweep(seat.places, disk=seat.disk)
        return self._announce(verdict)

    def _announce(self, verdict: Verdict) -> Verdict:
        if self.seat.world_size == 1:
            return verdict
        try:
            self.seat.exchange.publish(self.verdict_key, encode(verdict))
        except Exception as error:
            told = f"the other ranks were not told what became of the checkpoint of step {self.step} ({error})"
            return msgspec.structs.replace(verdict, error=verdict.error or told)
        return verdict

    def _others(self) -> list[Share]:
        seat = self.seat
        if seat.world_size == 1:
            return []
        keys = [self._key(f"share-{rank}") for rank in range(1, seat.world_size)]
        shares = [decode_share(value) for value in seat.exchange.collect(keys, seat.timeout_s)]
        seat.exchange.forget([self._begun_key, *keys, *([self.stale] if self.stale is not None else [])])
        return shares

    def _decide(self, shares: Sequence[Share]) -> Verdict:
        failed = {rank: share.error for rank, share in enumerate(shares) if share.error}
        if failed:
            rank, error = next(iter(failed.items()))
            raise _Failed(error if self.seat.world_size == 1 else f"rank {rank}: {error}")
        strangers = [rank for rank, share in enumerate(shares) if share.plan != self.plan.fingerprint]
        if strangers:
            raise UsageError(
                f"rank {strangers[0]} saves tensors of other names, types or shapes than rank 0: "
                "pass the same ones on every rank, or give all savers split=True"
            )
        stored = self._in_order(shares)
        commit(self._manifest(stored), self.seat.places, disk=self.seat.disk)
        written = sum(item.nbytes for item in stored if item.written)
        total = sum(item.nbytes for item in stored)
        return Verdict(True, self._tidy(), written, total - written)

    def _in_order(self, shares: Sequence[Share]) -> list[Stored]:
        by_parcel: dict[int, Stored] = {}
        for indices, share in zip(self.plan.shares, shares, strict=True):
            by_parcel.update(zip(indices, share.stored, strict=True))
        return [by_parcel[index] for index in range(len(self.plan.parcels))]

    def _manifest(self, stored: Sequence[Stored]) -> Manifest:
        return Manifest(
            format_version=FORMAT_VERSION,
            step=self.step,
            generation=self.generation,
            created=time.time(),
            tensors=tensor_entries(self.plan.parcels, stored),
            objects={item.digest: item.nbytes for item in stored},
            state=self.state,
            layout=self.layout,
            writer=writer(),
        )

    def _tidy(self) -> str | None:
        seat = self.seat
        try:
            point_latest(self.step, seat.places, disk=seat.disk)
            retain(seat.places, self.step, keep=seat.keep, disk=seat.disk)
        except OSError as error:
            return sentence_after_commit(error, step=self.step, root=seat.places.root)
        return None

    def _sentence(self, error: Exception) -> str:
        if isinstance(error, _Failed):
            return str(error)
        return sentence(error, step=self.step, root=self.seat.places.root)

    @property
    def _begun_key(self) -> str:
        return self._key("begun")

    def _key(self, name: str) -> str:
        return f"checkpoint/{self.generation}/{self.step}/{self.sequence}/{name}"


class _Failed(Exception):
    """A rank's own sentence, on its way to the verdict."""
