"""Where a rank keeps tensors between two uses: on the host, or on disk. Both keep images, bytes of one or more tensors.

    host    device <-> image in host memory (pinned where there is a GPU)
    disk    device <-> buffer of a pool <-> spill file;  reads run ahead, writes behind, as far as the pools reach

Moves run in lanes, a thread with a stream of its own each, beside the computation. On a CPU a move is a copy by one
thread, which needs no core of the computation's team.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.errors import ShoalError, UserCodeError
from shoal.memory.spill_file import Piece, SpillFile, Traffic, aligned_buffer, rounded
from shoal.state import works_in_streams

T = TypeVar("T")

ALIGNMENT = 64
DISK_THREADS = 2
"""Requests to the disk at a time, in each direction."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in an image: bytes from `start` on, and how they are read."""

    start: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def empty(self, device: torch.device) -> Tensor:
        """A tensor for it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def view(self, image: Tensor) -> Tensor:
        """The tensor that lies in `image`, uint8."""
        own = image[self.start : self.start + self.size_bytes].view(self.dtype)
        return own.as_strided(self.shape, self.stride, own.storage_offset())


def places_of(tensors: Sequence[Tensor]) -> list[Place]:
    """One after the other, aligned. The tensors are dense, in whatever order of dimensions."""
    found, start = [], 0
    for tensor in tensors:
        found.append(Place(start, tensor.nbytes, tensor.dtype, tuple(tensor.shape), tensor.stride()))
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return found


@dataclass
class Image:
    """What a tier keeps of some tensors. `memory` is the host's, `piece` the disk's; `coming` and `going` the moves of
    it that are under way."""

    places: Sequence[Place]
    memory: Tensor | None = None
    piece: Piece | None = None
    coming: Future[Tensor] | None = None
    going: Future[None] | None = None

    @property
    def size_bytes(self) -> int:
        """Of all its tensors, with what aligns them."""
        last = self.places[-1]
        return last.start + last.size_bytes


class Tier(Protocol):
    """Keeps images. `keep` and `fetch` run in a lane, the others in the thread of the step."""

    def image(self, tensors: Sequence[Tensor]) -> Image:
        """A new one, for tensors like these."""
        ...

    def keep(self, image: Image, tensors: Sequence[Tensor]) -> None:
        """Returns when `tensors` may be freed."""
        ...

    def fetch(self, image: Image, tensors: Sequence[Tensor]) -> None:
        """Returns when `tensors` are what was kept."""
        ...

    def ahead(self, images: Sequence[Image]) -> None:
        """Begins to bring nearer what will be fetched next, in this order."""
        ...

    def host_tensors(self, image: Image) -> list[Tensor]:
        """What was kept, until it is kept anew: on the host the image itself, on disk pages of the file."""
        ...

    def to_read(self, size_bytes: int) -> Tensor:
        """Zeros that a checkpoint is read into before `keep`, uint8."""
        ...

    def was_read(self) -> None:
        """All of them are kept."""
        ...

    def close(self) -> None: ...


class HostTier:
    """Images in host memory."""

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._device, self._traffic = device, traffic

    def image(self, tensors: Sequence[Tensor]) -> Image:
        image = Image(places_of(tensors))
        image.memory = aligned_buffer(image.size_bytes, self._device)
        return image

    def keep(self, image: Image, tensors: Sequence[Tensor]) -> None:
        _store(image, tensors, image.memory, self._traffic)

    def fetch(self, image: Image, tensors: Sequence[Tensor]) -> None:
        _load(image, tensors, image.memory, self._traffic)

    def ahead(self, images: Sequence[Image]) -> None:
        """Everything is there."""

    def host_tensors(self, image: Image) -> list[Tensor]:
        assert image.memory is not None
        return [place.view(image.memory) for place in image.places]

    def to_read(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def was_read(self) -> None:
        """Memory goes with whoever has it."""

    def close(self) -> None:
        """The images go with whoever has them."""


class DiskTier:
    """Images in `file`. `pool_bytes` of host memory hold what was read ahead, as many what is still to be written."""

    def __init__(self, file: SpillFile, device: torch.device, traffic: Traffic, *, pool_bytes: int) -> None:
        self._file, self._traffic = file, traffic
        self._failed: ShoalError | None = None
        self._beside: SpillFile | None = None
        self._coming, self._going = Pool(pool_bytes, device), Pool(pool_bytes, device)
        cpu = torch.device("cpu")
        self._readers = Lane(cpu, "spill-read", threads=DISK_THREADS)
        self._writers = Lane(cpu, "spill-write", threads=DISK_THREADS)

    def image(self, tensors: Sequence[Tensor]) -> Image:
        image = Image(places_of(tensors))
        image.piece = self._file.allocate(image.size_bytes)
        return image

    def keep(self, image: Image, tensors: Sequence[Tensor]) -> None:
        if self._failed is not None:
            raise self._failed
        if image.coming is not None:  # read ahead, and old now
            self._coming.give(image.coming.result())
            image.coming = None
        buffer = self._going.take(image.size_bytes, waits=True)
        assert buffer is not None
        _store(image, tensors, buffer, self._traffic)
        image.going = self._writers.submit(partial(self._written, image, buffer))

    def fetch(self, image: Image, tensors: Sequence[Tensor]) -> None:
        self._readers.check_open()  # what was read ahead is there, and the rest is not
        if image.coming is None:
            image.coming = self._begin(image, beyond=True)
        assert image.coming is not None
        buffer = image.coming.result()
        _load(image, tensors, buffer, self._traffic)
        image.coming = None
        self._coming.give(buffer)

    def ahead(self, images: Sequence[Image]) -> None:
        for image in images:
            if image.coming is None:
                image.coming = self._begin(image)
            if image.coming is None:
                return

    def host_tensors(self, image: Image) -> list[Tensor]:
        self._readers.check_open()
        if image.going is not None:
            image.going.result()
        assert image.piece is not None
        memory = self._file.look(image.piece)
        self._traffic.add(disk_read_bytes=rounded(memory.nbytes))
        return [place.view(memory) for place in image.places]

    def to_read(self, size_bytes: int) -> Tensor:
        """In a file of its own, whose space is given back."""
        self._beside = self._beside or self._file.another()
        return self._beside.mapped(size_bytes).tensor

    def was_read(self) -> None:
        if self._beside is not None:
            self._beside.close()
        self._beside = None

    def close(self) -> None:
        self.was_read()
        for lane in (self._readers, self._writers):
            lane.close()
        self._file.close()

    def _begin(self, image: Image, *, beyond: bool = False) -> Future[Tensor] | None:
        """Reads it into a buffer; None where the pool has none left and may not go `beyond`."""
        buffer = self._coming.take(image.size_bytes, beyond=beyond)
        return None if buffer is None else self._readers.submit(partial(self._read, image, buffer))

    def _read(self, image: Image, buffer: Tensor) -> Tensor:
        if image.going is not None:
            image.going.result()
        assert image.piece is not None
        self._traffic.add(disk_read_bytes=self._file.read(image.piece, buffer))
        return buffer

    def _written(self, image: Image, buffer: Tensor) -> None:
        assert image.piece is not None
        try:
            self._traffic.add(disk_written_bytes=self._file.write(image.piece, buffer))
        except ShoalError as error:
            self._failed = error
            raise
        finally:
            self._going.give(buffer)


class Pool:
    """Buffers of host memory, `limit_bytes` of them at most, each used again for what has its size."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._limit_bytes, self._device, self._lent_bytes = limit_bytes, device, 0
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._changed = threading.Condition()

    def take(self, size_bytes: int, *, waits: bool = False, beyond: bool = False) -> Tensor | None:
        """A buffer; one alone may be larger than the limit. Where none is left, waits for one, goes `beyond` the
        limit, or gives None.
        """
        size_bytes = rounded(size_bytes)
        with self._changed:
            while self._lent_bytes and self._lent_bytes + size_bytes > self._limit_bytes and not beyond:
                if not waits:
                    return None
                self._changed.wait()
            self._lent_bytes += size_bytes
            if self._free[size_bytes]:
                return self._free[size_bytes].pop()
            self._drop_free(size_bytes)
        return aligned_buffer(size_bytes, self._device)

    def give(self, buffer: Tensor) -> None:
        """Takes it back."""
        with self._changed:
            self._lent_bytes -= buffer.nbytes
            self._free[buffer.nbytes].append(buffer)
            self._changed.notify_all()

    def _drop_free(self, wanted_bytes: int) -> None:
        """Frees buffers of other sizes until the new one fits beside what is lent."""
        kept = sum(size * len(buffers) for size, buffers in self._free.items())
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._lent_bytes + kept > self._limit_bytes:
                self._free[size].pop()
                kept -= size


class Lane:
    """Threads, and on a GPU a stream, in which moves begin in order. They are daemons: a rank that ends leaves them."""

    def __init__(self, device: torch.device, name: str, *, threads: int = 1) -> None:
        self._device = device
        self._stream = torch.Stream(device) if works_in_streams(device) else None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        own = [threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True) for _ in range(threads)]
        self._threads = own
        for thread in own:
            thread.start()

    def submit(self, move: Callable[[], T]) -> Future[T]:
        """Begins `move`, behind what the calling thread has launched; done when the bytes have moved. Raises
        `UserCodeError` where nobody would move them any more.
        """
        self.check_open()
        future: Future[T] = Future()
        launched = None if self._stream is None else torch.accelerator.current_stream(self._device).record_event()
        self._queue.put(partial(_fulfil, future, partial(self._moved, move, launched)))
        return future

    def check_open(self) -> None:
        """Raises `UserCodeError` after `close`."""
        if self._closed:
            raise UserCodeError(
                "the run is over, and with it what it kept on the host or on disk (memory.offload): read the "
                "optimizer's state before the run ends, or from its last checkpoint"
            )

    def _moved(self, move: Callable[[], T], launched: Any) -> T:
        if self._stream is None:
            return move()
        with self._stream:
            self._stream.wait_event(launched)
            found = move()
        self._stream.synchronize()
        return found

    def close(self) -> None:
        """Ends the threads, behind what has been submitted."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := queue.get()) is not None:
        task()
        del task  # what it moved may be freed while this thread waits


def _fulfil(future: Future[T], move: Callable[[], T]) -> None:
    try:
        future.set_result(move())
    except BaseException as error:  # whoever waits for it raises it
        future.set_exception(error)


@contextmanager
def exposed(traffic: Traffic) -> Iterator[None]:
    """Around a wait of the step for moves."""
    begin_s = time.perf_counter()
    yield
    traffic.add(exposed_s=time.perf_counter() - begin_s)


def _store(image: Image, tensors: Sequence[Tensor], memory: Tensor | None, traffic: Traffic) -> None:
    assert memory is not None
    for place, tensor in zip(image.places, tensors, strict=True):
        _copy(memory[place.start : place.start + place.size_bytes], _bytes_of(tensor))
    traffic.add(to_host_bytes=sum(place.size_bytes for place in image.places))


def _load(image: Image, tensors: Sequence[Tensor], memory: Tensor | None, traffic: Traffic) -> None:
    assert memory is not None
    for place, tensor in zip(image.places, tensors, strict=True):
        _copy(_bytes_of(tensor), memory[place.start : place.start + place.size_bytes])
    traffic.add(to_device_bytes=sum(place.size_bytes for place in image.places))


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, in the order in which it lies."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _copy(target: Tensor, source: Tensor) -> None:
    """On a CPU by one thread: PyTorch would start a team of its own in every lane."""
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)
