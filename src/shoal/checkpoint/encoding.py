"""Objects whose boxes are streams of fewer bytes (`planes.py`): how a rank's share becomes such, and how they are read.

An encoded object is a safetensors file, too: under each key it holds bytes, the stream of a box. What a stream holds,
and the object that its differences begin with, follow from its own bytes, so that the hash of an object still names its
content. The manifest lists encoded objects and what they begin with; all of it must be there, and is verified alike.

Differences: of each object a rank keeps in memory the numbers of the last one that begins with none, and codes what
comes after against those, until the next checkpoint that begins with none, every `full_every`-th. So a reader needs two
objects at most, and a checkpoint keeps one older one alive. After a save that failed, and after a start, nothing is
kept. An object whose numbers are those that are kept is the one on the disk.
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
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint import planes, tensorfile
from shoal.checkpoint.config import MOMENT_SLOTS, CheckpointConfig
from shoal.checkpoint.manifest import BoxEntry, Manifest, TensorEntry
from shoal.checkpoint.objects import Places, Stored
from shoal.checkpoint.staging import FileStaging, Staging
from shoal.checkpoint.tensorfile import BY_NAME, Parcel, Piece
from shoal.errors import CorruptCheckpoint
from shoal.launcher.devices import cores
from shoal.topology.holding import Box

THREADS = max(1, min(4, cores() // 2))
"""That code and decode objects: half of the cores, as the rest train, and no more than fill a disk."""
MOMENTS: dict[str, planes.Form] = dict(zip(MOMENT_SLOTS, (planes.SIGNED, planes.UNSIGNED), strict=True))
_SLOT = re.compile(rf"(?:replica-\d+/)?optimizer/({'|'.join(MOMENTS)})/")
LEAST_NUMEL = 4096
"""Numbers of a parameter from which on its moments are written in 8 bits, as `adamw_8bit` keeps them."""

T = TypeVar("T")
Result = TypeVar("Result")


class Made(NamedTuple):
    """The bytes of an object. `base` is the object on the disk from which they differ; without bytes it is that object.

    `alone` makes an object of the same numbers that needs no base. `file` has the bytes already.
    """

    data: memoryview | bytes | None
    encoded: bool = False
    base: Stored | None = None
    alone: Callable[[], Made] | None = None
    file: Path | None = None


@dataclass
class _Bases:
    """By parcel, the plain bytes of an object that begins with none, and where it is on the disk; `saves` since all
    objects did.
    """

    parcels: Sequence[Parcel]
    contents: list[memoryview]
    stored: list[Stored]
    saves: int = 0


class Encoder:
    """Makes objects of a rank's share, as `[checkpoint]` asks; what later saves begin with is kept here."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._bases: _Bases | None = None

    def objects(self, staging: Staging | FileStaging, parcels: Sequence[Parcel]) -> Iterator[Made]:
        """The objects of `parcels`, whose bytes are in `staging`, in their order; a few are coded ahead of the disk."""
        if self._config.compress == "none":
            yield from (Made(laid.content, file=laid.file) for laid in staging.objects())
            return
        if self._bases is not None and (
            self._bases.parcels != parcels or self._bases.saves + 1 >= self._config.full_every
        ):
            self._bases = None
        bases: Iterable[tuple[memoryview, Stored] | None] = [None] * len(parcels)
        if self._bases is not None:
            bases = zip(self._bases.contents, self._bases.stored, strict=True)
        work = zip(parcels, (laid.content for laid in staging.objects()), bases, strict=True)
        with ThreadPoolExecutor(THREADS, initializer=partial(os.nice, 5)) as pool:
            yield from in_order(pool, lambda each: self._made(*each), work)

    def settle(
        self, staging: Staging | FileStaging, parcels: Sequence[Parcel], stored: Sequence[Stored] | None
    ) -> str | None:
        """What became of the objects: `stored`, in a checkpoint that counts, or None. A sentence where there is no
        memory for what later ones would begin with.
        """
        if stored is None or self._config.compress != "deltas":
            self.forget()
            return None
        contents = [laid.content for laid in staging.objects()]
        try:
            self._keep(contents, parcels, stored)
        except MemoryError:
            self.forget()
            nbytes = sum(map(len, contents))
            return (
                f"there is no memory for the {nbytes} bytes that differences begin with, so the next checkpoint has "
                'none: use a larger machine, or checkpoint.compress = "planes"'
            )
        return None

    def forget(self) -> None:
        """Gives the memory back; the next checkpoint begins with none."""
        self._bases = None

    def _keep(self, contents: Sequence[memoryview], parcels: Sequence[Parcel], stored: Sequence[Stored]) -> None:
        if self._bases is None:
            memory = [np.empty(len(content), np.uint8).data for content in contents]
            self._bases = _Bases(parcels, memory, list(stored))
        else:
            self._bases.saves += 1
        for number, (item, content) in enumerate(zip(stored, contents, strict=True)):
            if not item.base:
                self._bases.contents[number][:] = content
                self._bases.stored[number] = item

    def _made(self, parcel: Parcel, content: memoryview, base: tuple[memoryview, Stored] | None) -> Made:
        before: Sequence[memoryview | None] = [None] * len(parcel)
        digest = ""
        if base is not None:
            kept, stored = base
            if np.array_equal(np.frombuffer(content, np.uint8), np.frombuffer(kept, np.uint8)):
                return Made(None, encoded=True, base=stored, alone=lambda: self._made(parcel, content, None))
            digest, before = stored.digest, list(tensorfile.data_of(parcel, kept))
        boxes = zip(parcel, tensorfile.data_of(parcel, content), before, strict=True)
        found = [self._stream(piece, numbers, earlier, digest) for piece, numbers, earlier in boxes]
        begins = base[1] if base is not None and any(each.differs for each in found) else None
        data = tensorfile.file_of([each.stream for each in found])
        return Made(data, encoded=True, base=begins, alone=lambda: self._made(parcel, content, None))

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
    for base in set(encoded.values()) - {"", *encoded}:
        if before is None:
            raise CorruptCheckpoint(f"object {base}, which another one begins with, is in no checkpoint")
        objects[base], encoded[base] = before.objects[base], ""
    return objects, encoded


class EncodedObject:
    """One encoded object of a checkpoint, which is read. Raises `CorruptCheckpoint` where it is not one."""

    def __init__(self, digest: str, manifest: Manifest, places: Places) -> None:
        self._path = places.object(digest)
        self._content = tensorfile.read(self._path)
        self._base_digest = manifest.encoded[digest]
        self._base = lambda: EncodedObject(self._base_digest, manifest, places)
        self._opened: EncodedObject | None = None
        self._streams: dict[tuple[str, int, int], planes.Stream] = {}

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
            return self._stream(key, len(like), like.itemsize).chunk(
                chunk, lambda: self._before()._chunk(key, chunk, like)
            )
        except planes.Damaged as error:
            raise CorruptCheckpoint(f"{self._path}, box {key}, {error}: use another checkpoint") from error

    def _stream(self, key: str, numel: int, itemsize: int) -> planes.Stream:
        """Opened once: its table is read from end to end."""
        found = self._streams.get((key, numel, itemsize))
        if found is None:
            found = planes.Stream(self._bytes(key), numel=numel, itemsize=itemsize)
            if found.base not in ("", self._base_digest):
                raise planes.Damaged(f"begins with {found.base}, and not with what the manifest names")
            self._streams[key, numel, itemsize] = found
        return found

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
