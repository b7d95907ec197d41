"""Spill files: what the disk may do wrong is said, and what a kill leaves behind is nothing."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.errors import EnvironmentFault, VerificationFailed
from shoal.memory.spill_file import PREFIX, SpillFile, aligned_buffer

CPU = torch.device("cpu")
SIZE = 10_000


def filled(value: int) -> torch.Tensor:
    return aligned_buffer(SIZE, CPU).fill_(value)


def failing(error: int) -> Callable[..., int]:
    def transfer(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    return transfer


def test_pieces_come_back_as_they_were(tmp_path: Path) -> None:
    """Written again and in any order, with transfers that move a block at a time."""

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, [buffers[0][:4096]], offset)

    file = SpillFile(tmp_path, write=short)
    pieces = [file.allocate(SIZE) for _ in range(3)]
    for value in (1, 2):
        for number, piece in enumerate(pieces):
            file.write(piece, filled(10 * value + number))
    for number, piece in reversed(list(enumerate(pieces))):
        buffer = filled(0)
        file.read(piece, buffer)
        assert bool((buffer[:SIZE] == 20 + number).all())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "said"), [(errno.EIO, "Input/output error"), (errno.ENOSPC, "No space left")])
def test_faults_of_the_disk_are_one_sentence(tmp_path: Path, error: int, said: str) -> None:
    for keys in ({"write": failing(error)}, {"read": failing(error)}):
        file = SpillFile(tmp_path, **keys)
        piece = file.allocate(SIZE)
        move = file.write if "write" in keys else file.read
        with pytest.raises(EnvironmentFault, match=rf"{said}.*memory\.offload\.folder.*checkpoint is whole"):
            move(piece, filled(1))


def test_a_file_that_may_not_grow_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The kernel's own refusal: a limit on the size of files, which stands for a full disk."""
    file, (soft, hard) = SpillFile(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
    try:
        for grow in (file.allocate, file.mapped):
            with pytest.raises(EnvironmentFault, match="could not grow by"):
                grow(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_mapped_places_are_memory_that_lies_in_the_file(tmp_path: Path) -> None:
    """They begin as zeros, keep what is written, apart from each other and from other pieces, and outlive the file's
    descriptor; what they say of the process's memory is that it is a file's.
    """
    file = SpillFile(tmp_path)
    places, piece = [file.mapped(SIZE) for _ in range(2)], file.allocate(SIZE)
    assert all(place.tensor.shape == (SIZE,) and not place.tensor.any() for place in places)
    file.write(piece, filled(9))
    for number, place in enumerate(places):
        place.tensor.fill_(number + 1)
        place.ahead()
    large = file.mapped(8 << 20)
    before = file_bytes()
    large.tensor.fill_(1)
    assert file_bytes() - before > 7 << 20
    file.close()
    assert [int(place.tensor.float().mean()) for place in places] == [1, 2]
    assert not list(tmp_path.iterdir())


def file_bytes() -> int:
    """Of this process's memory, those that belong to files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssFile"))) << 10


def test_other_bytes_than_were_written_are_refused(tmp_path: Path) -> None:
    def flipped(fd: int, buffers: list[memoryview], offset: int) -> int:
        moved = os.preadv(fd, buffers, offset)
        buffers[0][77] ^= 1
        return moved

    file = SpillFile(tmp_path, read=flipped)
    piece = file.allocate(SIZE)
    file.write(piece, filled(3))
    with pytest.raises(VerificationFailed, match="other bytes than were written"):
        file.read(piece, filled(0))


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    """The file has no name; one with a name, as on a file system without such files, is swept by the next start."""
    script = (
        "import os, sys, signal\nfrom pathlib import Path\nfrom shoal.memory.spill_file import SpillFile\n"
        "SpillFile(Path(sys.argv[1])).allocate(1 << 20)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    (tmp_path / f"{PREFIX}left").write_bytes(b"x")
    SpillFile(tmp_path).close()
    assert not list(tmp_path.iterdir())
