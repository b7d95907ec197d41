"""One save after the copy, as one rank does it: write and verify its share, publish it, learn whether the save counts.

    rank 0       says that the round has begun
    every rank   objects -> disk, read back -> Share
    rank 0       all Shares -> manifest -> commit -> retention -> Verdict
    the others   wait for the Verdict

A fault never leaves this file as an exception: it becomes a sentence in a Share or in the Verdict, so that training
goes on and no rank waits for one that has failed. Rank 0 deletes before it publishes the Verdict, so that no other rank
can be at the next save by then and count on an object that is about to go. Rank 0 also deletes at its start, what an
interrupted save left, and when a round has failed; so the others write nothing before it says that a round has begun.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.checkpoint.agreement import Exchange, Share, Verdict, decode_message, encode_message
from shoal.checkpoint.commit import Pointer, commit, point_latest, retain, sweep
from shoal.checkpoint.grid import Parcel
from shoal.checkpoint.manifest import BoxEntry, Manifest, TensorEntry
from shoal.checkpoint.objects import Disk, Places, Stored, make_folders, settle, store
from shoal.checkpoint.plan import Plan
from shoal.checkpoint.staging import Staging
from shoal.errors import ShoalError, UsageError


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a rank has for all its saves: its rank among those that save together, and where they save to."""

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
        """Under which rank 0 publishes the verdict."""
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
            make_folders(seat.places)  # somebody may have removed them since the last save
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
        self.seat.exchange.publish(self._key(f"share-{self.seat.rank}"), encode_message(share))

    def _follow(self, share: Share) -> Verdict:
        seat = self.seat
        try:
            self._tell(share)
            # Rank 0 may itself wait that long for a rank that never answers.
            (verdict,) = seat.exchange.collect([self.verdict_key], 2 * seat.timeout_s)
            return decode_message(verdict, Verdict)
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
            self.seat.exchange.publish(self.verdict_key, encode_message(verdict))
        except Exception as error:
            told = f"the other ranks were not told what became of the checkpoint of step {self.step} ({error})"
            return msgspec.structs.replace(verdict, error=verdict.error or told)
        return verdict

    def _others(self) -> list[Share]:
        seat = self.seat
        if seat.world_size == 1:
            return []
        keys = [self._key(f"share-{rank}") for rank in range(1, seat.world_size)]
        shares = [decode_message(value, Share) for value in seat.exchange.collect(keys, seat.timeout_s)]
        seat.exchange.forget([self._begun_key, *keys, *([self.stale] if self.stale is not None else [])])
        return shares

    def _decide(self, shares: Sequence[Share]) -> Verdict:
        failed = {rank: share.error for rank, share in enumerate(shares) if share.error}
        if failed:
            rank, error = next(iter(failed.items()))
            raise _RankFailed(error if self.seat.world_size == 1 else f"rank {rank}: {error}")
        strangers = [rank for rank, share in enumerate(shares) if share.plan != self.plan.fingerprint]
        if strangers:
            raise UsageError(
                f"rank {strangers[0]} saves tensors of other names, types or shapes than rank 0: "
                "pass the same ones on every rank, or give all savers split=True"
            )
        stored = self._in_order(shares)
        pointer = commit(self._manifest(stored), self.seat.places, disk=self.seat.disk)
        written = sum(item.nbytes for item in stored if item.written)
        total = sum(item.nbytes for item in stored)
        return Verdict(True, self._tidy(pointer), written, total - written)

    def _in_order(self, shares: Sequence[Share]) -> list[Stored]:
        by_parcel: dict[int, Stored] = {}
        for indices, share in zip(self.plan.shares, shares, strict=True):
            by_parcel.update(zip(indices, share.stored, strict=True))
        return [by_parcel[index] for index in range(len(self.plan.parcels))]

    def _manifest(self, stored: Sequence[Stored]) -> Manifest:
        return Manifest(
            step=self.step,
            generation=self.generation,
            created=time.time(),
            tensors=tensor_entries(self.plan.parcels, stored),
            objects={item.digest: item.nbytes for item in stored},
            state=self.state,
            layout=self.layout,
            writer=writer(),
        )

    def _tidy(self, pointer: Pointer) -> str | None:
        seat = self.seat
        try:
            point_latest(pointer, seat.places, disk=seat.disk)
            retain(seat.places, self.step, keep=seat.keep, disk=seat.disk)
        except OSError as error:
            return sentence_after_commit(error, step=self.step, root=seat.places.root)
        return None

    def _sentence(self, error: Exception) -> str:
        if isinstance(error, _RankFailed):
            return str(error)
        return sentence(error, step=self.step, root=self.seat.places.root)

    @property
    def _begun_key(self) -> str:
        return self._key("begun")

    def _key(self, name: str) -> str:
        return f"checkpoint/{self.generation}/{self.step}/{self.sequence}/{name}"


class _RankFailed(Exception):
    """A rank's own sentence, on its way to the verdict."""


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


_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def sentence(error: Exception, *, step: int, root: Path) -> str:
    """Why the checkpoint of `step` under `root` was not saved; training goes on, so the sentence must say it all."""
    return f"the checkpoint of step {step} was not saved, and the one before it stays: {_reason(error, root)}"


def sentence_after_commit(error: OSError, *, step: int, root: Path) -> str:
    """Why the end of a save did not succeed, though the checkpoint of `step` is there and counts."""
    found = _reason(error, root)
    return f"the checkpoint of step {step} is saved, but `latest` was not changed or older ones not deleted: {found}"


def _reason(error: Exception, root: Path) -> str:
    if isinstance(error, ShoalError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"a rank did not answer ({error}); look for a dead or stuck rank"
    if isinstance(error, OSError):
        where = error.filename or root
        return f"{where}: {error.strerror or error}; {_repair(error)}"
    return f"{type(error).__name__}: {error}; please report this as a defect of Shoal"


def _repair(error: OSError) -> str:
    if error.errno in _FULL:
        return "free space on that disk, or lower checkpoint.keep"
    if error.errno in _READ_ONLY:
        return "make the folder writable, or point run.directory to one that is"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f), or lower checkpoint.object_bytes"
    return "check the disk and its mount"
