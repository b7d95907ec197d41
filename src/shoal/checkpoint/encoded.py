"""Objects whose boxes are streams of fewer bytes (`planes.py`): how a rank's share becomes such, and how they are read.

An encoded object is a safetensors file, too: under each key it holds bytes, the stream of a box. What a stream holds,
and the object that its differences begin with, follow from its own bytes, so that the hash of an object still names its
content. The manifest lists encoded objects and what they begin with; all of it must be there, and is verified alike.

Differences: a rank keeps the numbers of the last checkpoint that counts in memory. Each object is coded against the
object of the same boxes there, every `full_every`-th checkpoint without. After a save that failed, and after a start,
nothing is kept, and the next checkpoint begins with none. An object that did not change is that of the last checkpoint.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint import planes, tensorfile
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.manifest import BoxEntry, Manifest, TensorEntry
from shoal.checkpoint.objects import Places, Stored
from shoal.checkpoint.tensorfile import BY_NAME, Parcel, Piece, Staging
from shoal.errors import CorruptCheckpoint
from shoal.topology.holding import Box

THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
"""That code and decode objects: half of the cores, as the rest train, and no more than fill a disk."""
MOMENTS: dict[str, planes.Form] = {"exp_avg": planes.SIGNED, "exp_avg_sq": planes.UNSIGNED}
"""Slots of optimizers that `checkpoint.moments` may write in 8 bits."""
_SLOT = re.compile(rf"(?:replica-\d+/)?optimizer/({'|'.join(MOMENTS)})/")
LEAST_NUMEL = 4096
"""Numbers of a parameter from which on its moments are written in 8 bits, as `adamw_8bit` keeps them."""

T = TypeVar("T")
Result = TypeVar("Result")


class Made(NamedTuple):
    """The bytes of an object; `known`: it is on the disk already, as one of the last checkpoint."""

    data: memoryview | bytes
    encoded: bool = False
    base: str = ""
    known: Stored | None = None


@dataclass(frozen=True)
class _Last:
    """This rank's share of the last checkpoint that counts: by parcel, its plain bytes and the object on the disk.

    `age`: how many checkpoints one needs, beside itself, that begins with it.
    """

    parcels: Sequence[Parcel]
    contents: list[memoryview]
    stored: Sequence[Stored]
    age: int


class Encoder:
    """Makes objects of a rank's share, as `[checkpoint]` asks; what one save needs of the save before is kept here."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._last: _Last | None = None
        self._memory = np.empty(0, np.uint8)

    def objects(self, staging: Staging, parcels: Sequence[Parcel]) -> Iterator[Made]:
        """The objects of `parcels`, whose bytes are in `staging`, in their order; a few are coded ahead of the disk."""
        if self._config.compress == "none":
            yield from map(Made, staging.objects())
            return
        last = self._base(parcels)
        known: Iterable[tuple[memoryview, Stored] | None] = (
            [None] * len(parcels) if last is None else zip(last.contents, last.stored, strict=True)
        )
        work = zip(parcels, staging.objects(), known, strict=True)
        with ThreadPoolExecutor(THREADS, initializer=partial(os.nice, 5)) as pool:
            yield from in_order(pool, lambda each: self._made(*each), work)

    def settle(self, staging: Staging, parcels: Sequence[Parcel], stored: Sequence[Stored] | None) -> None:
        """What became of the objects: `stored`, in a checkpoint that counts, or None."""
        last = self._base(parcels)
        self._last = None
        if stored is None or self._config.compress != "deltas":
            return
        sizes = [len(content) for content in staging.objects()]
        if len(self._memory) != sum(sizes):
            self._memory = np.empty(sum(sizes), np.uint8)
        contents = [part.data for part in np.split(self._memory, np.cumsum(sizes)[:-1])]
        for kept, content in zip(contents, staging.objects(), strict=True):
            kept[:] = content
        self._last = _Last(parcels, contents, stored, 0 if last is None else last.age + 1)

    def _base(self, parcels: Sequence[Parcel]) -> _Last | None:
        last = self._last
        fits = last is not None and last.age + 1 < self._config.full_every and last.parcels == parcels
        return last if fits else None

    def _made(self, parcel: Parcel, content: memoryview, last: tuple[memoryview, Stored] | None) -> Made:
        before: Sequence[memoryview | None] = [None] * len(parcel)
        digest = ""
        if last is not None:
            if np.array_equal(np.frombuffer(content, np.uint8), np.frombuffer(last[0], np.uint8)):
                return Made(b"", known=last[1]._replace(written=False))
            digest, before = last[1].digest, list(tensorfile.data_of(parcel, last[0]))
        boxes = zip(parcel, tensorfile.data_of(parcel, content), before, strict=True)
        found = [self._stream(piece, numbers, base, digest) for piece, numbers, base in boxes]
        differs = any(each.differs for each in found)
        return Made(tensorfile.file_of([each.stream for each in found]), True, digest if differs else "")

    def _stream(self, piece: Piece, content: memoryview, base: memoryview | None, digest: str) -> planes.Encoded:
        bits = f"<u{piece.spec.itemsize}"
        before = None if base is None else np.frombuffer(base, bits)
        numbers = np.frombuffer(content, bits)
        return planes.encode(numbers, form=self._form(piece), base=before, base_digest=digest)

    def _form(self, piece: Piece) -> planes.Form:
        slot = _SLOT.match(piece.spec.name)
        narrow = self._config.moments == "8bit" and piece.spec.dtype == "float32"
        if slot is None or not narrow or prod(piece.spec.shape) < LEAST_NUMEL:
            return planes.EXACT
        return MOMENTS[slot[1]]


def in_order(pool: ThreadPoolExecutor, work: Callable[[T], Result], items: Iterable[T]) -> Iterator[Result]:
    """The results of `work`, in order; as many are made ahead as there are threads."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def listed(stored: Sequence[Stored], before: Manifest | None) -> tuple[dict[str, int], dict[str, str]]:
    """`Manifest.objects` and `Manifest.encoded` of a checkpoint of `stored`, where `before` is the last one."""
    objects = {item.digest: item.nbytes for item in stored}
    encoded = {item.digest: item.base for item in stored if item.encoded}
    for base in list(encoded.values()):
        while base and base not in encoded:
            if before is None:
                raise CorruptCheckpoint(f"object {base}, which another one begins with, is in no checkpoint")
            objects[base], encoded[base] = before.objects[base], before.encoded[base]
            base = encoded[base]
    return objects, encoded


class EncodedObject:
    """One encoded object of a checkpoint, which is read. Raises `CorruptCheckpoint` where it is not one."""

    def __init__(self, digest: str, manifest: Manifest, places: Places) -> None:
        self._path = places.object(digest)
        self._content = tensorfile.read(self._path)
        self._base_digest = manifest.encoded[digest]
        self._base = lambda: EncodedObject(self._base_digest, manifest, places)
        self._opened: EncodedObject | None = None

    def part(self, entry: TensorEntry, box: BoxEntry, needed: Sequence[Box]) -> Tensor:
        """The box, of which only the chunks with elements of `needed`, in the coordinates of the tensor, are read; what
        the others hold is undefined.
        """
        dtype = BY_NAME[entry.dtype]
        numbers = np.empty(prod(box.shape), f"<u{dtype.itemsize}")
        for chunk in sorted({chunk for each in needed for chunk in _chunks(each.relative_to(tuple(box.offset)), box)}):
            start = chunk * planes.CHUNK
            numbers[start : start + planes.CHUNK] = self._chunk(box.key, chunk, numbers)
        return torch.from_numpy(numbers.view(np.uint8)).view(dtype.torch).view(box.shape)

    def _chunk(self, key: str, chunk: int, like: np.ndarray) -> np.ndarray:
        try:
            stream = planes.Stream(self._bytes(key), numel=len(like), itemsize=like.itemsize)
            if stream.base not in ("", self._base_digest):
                raise planes.Damaged(f"begins with {stream.base}, and not with what the manifest names")
            return stream.chunk(chunk, lambda: self._before()._chunk(key, chunk, like))
        except planes.Damaged as error:
            raise CorruptCheckpoint(f"{self._path}, box {key}, {error}: use another checkpoint") from error

    def _bytes(self, key: str) -> np.ndarray:
        found = self._content.get(key)
        if found is None or found.dtype != torch.uint8 or found.dim() != 1:
            raise planes.Damaged("holds no bytes")
        return found.numpy()

    def _before(self) -> EncodedObject:
        self._opened = self._opened or self._base()
        return self._opened


def _chunks(needed: Box, box: BoxEntry) -> range:
    """The chunks from that of the first element of `needed` to that of the last one."""
    strides = [prod(box.shape[dim + 1 :]) for dim in range(len(box.shape))]
    first = sum(at * stride for at, stride in zip(needed.offset, strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(needed.shape, strides, strict=True))
    return range(first // planes.CHUNK, last // planes.CHUNK + 1)
