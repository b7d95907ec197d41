"""Only regular files are read, only up to the limit, and what is refused is the caller's error with its repair."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import DataError, UsageError
from shoal.files import cache_folder, meant, open_file, read_file
from tests.held import held, none_more

REPAIR = "give another file"


def read(path: Path, limit_bytes: int = 8) -> bytes:
    return read_file(path, limit_bytes=limit_bytes, error=DataError, repair=REPAIR)


def test_a_file_is_read_up_to_the_limit_and_not_beyond(tmp_path):
    """The limit itself is allowed; one byte more is refused."""
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    assert read(path) == b"12345678"
    with pytest.raises(DataError, match=f"file is larger than 7 bytes: {REPAIR}"):
        read(path, 7)


def test_a_fifo_without_a_writer_keeps_nobody_waiting(tmp_path):
    """Opened as a plain file it would block for ever: the test's own time limit is the proof."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match=f"fifo is a FIFO, not a regular file: {REPAIR}"):
        read(tmp_path / "fifo")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/dev/zero", "is a device, not a regular file"),
        ("/", "is a folder, not a regular file"),
        ("/nowhere/at/all", "is missing"),
        ("a\0b", "is no file name"),
        ("a\udcff", r"a\\udcff is missing"),
        ("/proc/self/mem", "cannot be read"),
    ],
)
def test_what_is_no_readable_file_is_named(path, words):
    """The message has the path, what it is, and the repair; it can be printed anywhere."""
    with pytest.raises(DataError, match=words) as caught:
        read(Path(path))
    assert str(caught.value).endswith(REPAIR)
    str(caught.value).encode()


def test_a_sparse_file_of_a_terabyte_costs_no_memory(tmp_path):
    """The size is found out by reading up to the limit, which no file can evade."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="larger than 8 bytes"):
        read(path)


def test_no_descriptor_is_left_open(tmp_path):
    """Neither after a refusal nor after an error of the caller's, which passes through as it is."""
    before = held()
    for _ in range(3):
        with pytest.raises(UsageError):
            read(tmp_path)
        (tmp_path / "file").write_bytes(b"1")
        with pytest.raises(ZeroDivisionError), open_file(tmp_path / "file", error=DataError, repair=REPAIR):
            _ = 1 // 0
    none_more(before)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("runs/frist", "runs/first"),
        ("runs/frist/submit/record.json", "runs/first/submit/record.json"),
        ("rusn/first", "runs/first"),
        ("mnie.py", "mine.py"),
        ("mnie.toml", ""),
        ("mine.py", ""),
        ("elsewhere/first", ""),
        ("runs/first/submit/recrod.json", "runs/first/submit/record.json"),
    ],
)
def test_a_path_that_is_not_there_has_a_neighbour_much_like_it(tmp_path: Path, given: str, found: str) -> None:
    """Of the same suffix, and what lies below it where that is there; nothing for what is there or like nothing."""
    (tmp_path / "runs/first/submit").mkdir(parents=True)
    (tmp_path / "runs/first/submit/record.json").touch()
    (tmp_path / "mine.py").touch()
    (tmp_path / "trainer.py").touch()
    assert meant(tmp_path / given) == (f" (did you mean {tmp_path / found}?)" if found else "")


def test_the_cache_lies_where_the_environment_says():
    """`SHOAL_CACHE` wins; unset or empty, it is the home folder's cache."""
    assert cache_folder({"SHOAL_CACHE": "/somewhere"}) == Path("/somewhere")
    assert cache_folder({}) == cache_folder({"SHOAL_CACHE": ""}) == Path.home() / ".cache" / "shoal"


HOLDS = """
from shoal.files import leave_without_collection

class Log:
    def __init__(self, path):
        self.file = open(path, "w")
        self.write = self.line  # of itself: only a collection finds that nothing else refers to it

    def line(self, text):
        self.file.write(text)

leave_without_collection()
log = Log({path!r})
log.write("the last line")
"""


def test_files_are_written_where_the_last_collection_is_left_out(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HOLDS.format(path=str(tmp_path / "log.txt"))], check=True)
    assert (tmp_path / "log.txt").read_text() == "the last line"
