"""One save after the copy, as one rank does it: write and verify its share, publish it, learn whether the save counts.

    rank 0       says that the round has begun
    every rank   objects -> disk, read back -> Share   (and signs of life meanwhile: agreement.py)
    rank 0       all Shares -> manifest -> commit -> retention -> SaveOutcome
    the others   wait for the SaveOutcome

A fault never leaves this file as an exception: it becomes a sentence in a Share or in the SaveOutcome, so that training
goes on and no rank waits for one that has failed. Rank 0 deletes before it publishes the SaveOutcome, so that no other
rank can be at the next save by then and count on an object that is about to go. Rank 0 also deletes at its start, what
an interrupted save left, and when a round has failed; so the others write nothing before it says that a round has
begun.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.checkpoint.agreement import (
    FIRST_HEARD,
    Chain,
    MessageExchange,
    NotTold,
    SaveOutcome,
    Share,
    decode_message,
    encode_message,
    hear,
)
from shoal.checkpoint.commit import Pointer, best_step, commit, point_best, point_latest, retain, sweep
from shoal.checkpoint.encoding import Made, listed
from shoal.checkpoint.manifest import BoxEntry, Manifest, TensorEntry
from shoal.checkpoint.objects import Disk, OnPoint, Places, Stored, damage, make_folders, settle, store
from shoal.checkpoint.plan import SavePlan
from shoal.checkpoint.tensorfile import Parcel
from shoal.errors import ShoalError, UsageError


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a rank has for all its saves: its rank among those that save together, and where they save to.

    Nobody waits longer than `timeout_s` after the last sign of life of the rank that it waits for.
    """

    rank: int
    world_size: int
    exchange: MessageExchange
    timeout_s: float
    places: Places
    on_point: OnPoint
    keep: int


class Round:
    """One save of `plan`. `sequence` counts a saver's rounds, so that saving one step twice does not confuse the board.

    `before` is the round before: every rank has read its keys before it answers in this one, and rank 0 has its
    manifest. Afterwards `stored` are this rank's objects, and `manifest` on rank 0 is what was committed.
    """

    def __init__(
        self,
        seat: Seat,
        plan: SavePlan,
        *,
        step: int,
        generation: int,
        sequence: int,
        state: dict[str, Any],
        layout: dict[str, Any],
        before: Round | None = None,
    ) -> None:
        self.seat, self.plan, self.step, self.generation, self._sequence = seat, plan, step, generation, sequence
        self._state, self._layout = state, layout
        self._stale = [] if before is None else before.verdict_keys
        self._manifest_before = None if before is None else before.manifest
        self.stored: list[Stored] = []
        self._damaged: str | None = None
        self.manifest: Manifest | None = None
        own = self._verdict_key if seat.rank == 0 else self._share_key(seat.rank)
        self._own = Chain(seat.exchange if seat.world_size > 1 else None, own, timeout_s=seat.timeout_s)
        self._disk = Disk(self._on_point)

    @property
    def progress(self) -> int:
        """Grows with every action of the disk and every message: what stays the same is stuck."""
        return self._own.progress

    @property
    def verdict_keys(self) -> list[str]:
        """What rank 0 has said, once the round is over."""
        return self._own.keys if self.seat.rank == 0 else []

    def run(self, objects: Iterable[Made]) -> SaveOutcome:
        """Bring `objects`, this rank's, to the disk and to a verdict; raises nothing."""
        if self.seat.rank == 0:
            return self._lead(objects)
        try:
            self.seat.exchange.collect([self._begun_key], self.seat.timeout_s)
        except Exception as error:
            sentence = self._sentence(error)
            # Should rank 0 come later, it need not wait.
            self._tell_behind(encode_message(Share(self.plan.fingerprint, [], sentence)))
            return SaveOutcome(False, sentence)
        return self._follow(objects)

    def _on_point(self, label: str) -> None:
        self.seat.on_point(label)
        self._own.moved()

    def _write(self, objects: Iterable[Made]) -> Share:
        seat = self.seat
        try:
            make_folders(seat.places)  # somebody may have removed them since the last save
            owner = f"rank-{seat.rank:05d}"
            for made in objects:
                self.stored.append(self._store(made, owner))
                self._own.moved()
            settle(self.stored, seat.places, disk=self._disk)
            return Share(self.plan.fingerprint, self.stored, damaged=self._damaged)
        except Exception as error:
            return Share(self.plan.fingerprint, [], self._sentence(error))

    def _store(self, made: Made, owner: str) -> Stored:
        if made.base is not None and self._is_damaged(made.base):
            assert made.alone is not None, "it begins with one"
            made = made.alone()
        base = made.base
        if made.data is None:
            assert base is not None, "it is its base, or has bytes"
            return base._replace(written=False)
        stored = store(memoryview(made.data), self.seat.places, disk=self._disk, owner=owner, file=made.file)
        return stored._replace(encoded=made.encoded, base="" if base is None else base.digest)

    def _is_damaged(self, base: Stored) -> bool:
        path = self.seat.places.object(base.digest)
        problem = damage(path, base.digest, nbytes=base.nbytes)
        if problem:
            self._damaged = f"{path} {problem}"
        return problem is not None

    def _follow(self, objects: Iterable[Made]) -> SaveOutcome:
        seat = self.seat
        try:
            self._own.say(encode_message(self._write(objects)))
            (verdict,), _ = hear(seat.exchange, [self._verdict_key], timeout_s=seat.timeout_s, on_sign=self._count)
            return decode_message(verdict, SaveOutcome)
        except Exception as error:
            return SaveOutcome(False, self._sentence(error))

    def _count(self) -> None:
        self._own.progress += 1

    def _lead(self, objects: Iterable[Made]) -> SaveOutcome:
        seat = self.seat
        try:
            if seat.world_size > 1:
                seat.exchange.publish(self._begun_key, b"")
            own = self._write(objects)
            self._own.require_whole()
            verdict = self._decide([own, *self._others()])
        except Exception as error:
            verdict = SaveOutcome(False, self._sentence(error))
            with suppress(OSError):
                sweep(seat.places, disk=Disk(seat.on_point))
            self._tell_behind(encode_message(verdict))
            return verdict
        return self._announce(verdict)

    def _announce(self, verdict: SaveOutcome) -> SaveOutcome:
        try:
            self._own.say(encode_message(verdict))
        except NotTold as error:
            told = f"the other ranks were not told what became of the checkpoint of step {self.step} ({error})"
            return msgspec.structs.replace(verdict, error=verdict.error or told)
        return verdict

    def _tell_behind(self, message: bytes) -> None:
        """Says it without a wait: the exchange may be what failed, and has cost `timeout_s` already."""

        def tell() -> None:
            with suppress(NotTold):
                self._own.say(message)

        if self.seat.world_size > 1:
            threading.Thread(target=tell, name="checkpoint-failed", daemon=True).start()

    def _others(self) -> list[Share]:
        seat = self.seat
        if seat.world_size == 1:
            return []
        keys = [self._share_key(rank) for rank in range(1, seat.world_size)]
        within_s = FIRST_HEARD * seat.timeout_s
        messages, links = hear(seat.exchange, keys, timeout_s=within_s, on_sign=self._own.moved)
        seat.exchange.forget([self._begun_key, *links, *self._stale])
        return [decode_message(message, Share) for message in messages]

    def _decide(self, shares: Sequence[Share]) -> SaveOutcome:
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
        manifest = self._manifest_of(stored)
        pointer = commit(manifest, self.seat.places, disk=self._disk)
        self.manifest = manifest
        written = sum(item.nbytes for item in stored if item.written)
        total = sum(item.nbytes for item in stored)
        damaged = next((share.damaged for share in shares if share.damaged), None)
        return SaveOutcome(True, self._tidy(pointer) or self._despite(damaged), written, total - written)

    def _despite(self, damaged: str | None) -> str | None:
        if damaged is None:
            return None
        return (
            f"the checkpoint of step {self.step} is saved, and does not begin with what earlier ones need: {damaged}; "
            f"see 'shoal checkpoint verify {self.seat.places.run_directory}', and check this disk"
        )

    def _in_order(self, shares: Sequence[Share]) -> list[Stored]:
        by_parcel: dict[int, Stored] = {}
        for indices, share in zip(self.plan.shares, shares, strict=True):
            by_parcel.update(zip(indices, share.stored, strict=True))
        return [by_parcel[index] for index in range(len(self.plan.parcels))]

    def _manifest_of(self, stored: Sequence[Stored]) -> Manifest:
        objects, encoded = listed(stored, self._manifest_before)
        return Manifest(
            step=self.step,
            generation=self.generation,
            created=time.time(),
            tensors=tensor_entries(self.plan.parcels, stored),
            objects=objects,
            encoded=encoded,
            state=self._state,
            layout=self._layout,
            writer=writer(),
        )

    def _tidy(self, pointer: Pointer) -> str | None:
        seat = self.seat
        try:
            best = best_step(self._state)
            point_latest(pointer, seat.places, disk=self._disk)
            point_best(best, seat.places)
            retain(seat.places, self.step, keep=seat.keep, disk=self._disk, best=best)
        except OSError as error:
            return sentence_after_commit(error, step=self.step, root=seat.places.root)
        return None

    def _sentence(self, error: Exception) -> str:
        if isinstance(error, _RankFailed):
            return str(error)
        if isinstance(error, NotTold) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        return sentence(error, step=self.step, root=self.seat.places.root)

    @property
    def _begun_key(self) -> str:
        return self._key("begun")

    @property
    def _verdict_key(self) -> str:
        return self._key("verdict")

    def _share_key(self, rank: int) -> str:
        return self._key(f"share-{rank}")

    def _key(self, name: str) -> str:
        return f"checkpoint/{self.generation}/{self.step}/{self._sequence}/{name}"


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
    """Why the checkpoint of `step` under `root` was not saved, and what is there; training goes on, so the sentence
    must say it all.
    """
    there = ""
    with suppress(OSError):
        newest = next((one for one in Places(root.parent).steps() if one != step), None)
        there = ", and there is none yet" if newest is None else f", that of step {newest} is still the newest"
    return f"the checkpoint of step {step} was not saved{there}: {_reason(error, root)}"


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
        where = root if error.errno in _FULL else error.filename or root
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
