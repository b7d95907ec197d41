"""What a failing rank leaves behind, in real processes where the process's end matters."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shoal import errors
from shoal.launcher.failure import Failure, failure_of, read_failures, write_failure, write_for_torchrun
from shoal.observe.facts import write_facts
from tests.waiting import HANG_S

SOURCE = Path(__file__).parents[2] / "src"


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class DistNetworkError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "code", "secondary", "traced"),
    [
        (ValueError("x"), 1, False, True),
        (errors.ConfigError("x"), 2, False, False),
        (errors.CollectiveError("x"), 3, True, False),
        (errors.Stopped("x"), 75, False, False),
        (MemoryError("x"), 5, False, False),
        (OutOfMemoryError("x"), 5, False, False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 5, False, False),
        (RuntimeError("Connection closed by peer [127.0.0.1]"), 1, True, True),
        (DistNetworkError("x"), 3, True, False),
        (OSError(errno.ENOSPC, "No space left on device", "model.pt"), 3, False, False),
        (OSError(errno.ENOSPC, "No space left on device"), 3, False, True),
        (OSError(errno.EIO, "Input/output error"), 1, False, True),
        (KeyboardInterrupt(), 130, False, False),
        (SystemExit(7), 7, False, False),
        (SystemExit("no"), 1, False, False),
    ],
)
def test_each_error_has_its_code(error, code, secondary, traced):
    """Exit code, echo or cause, and whether a traceback helps: all from the error's type."""
    record = failure_of(error, 3)
    assert (record.exit_code, record.secondary, bool(record.traceback)) == (code, secondary, traced)
    assert record.rank == 3
    assert record.pid == os.getpid()


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes. Error", "2.00 GiB"),
        ("Unable to allocate 7.45 GiB for an array with shape (1000000000,)", "7.45 GiB"),
        ("", "more memory"),
    ],
)
def test_out_of_memory_is_one_sentence(text, asked):
    """What was asked for, what is left of what, and what limits it; no traceback."""
    record = failure_of(MemoryError(text), 0)
    wanted = rf"out of memory: asked for {asked}, and [\d.]+ GiB are left of [\d.]+ GiB \([a-z -]+\)"
    assert re.fullmatch(wanted, record.text)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    """Which file could not be written, though `write` does not say it, and what to do; no traceback."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_facts(tmp_path, {"steps": 3})
    told = failure_of(raised.value, 0).text
    wanted = f"{tmp_path}/facts.json cannot be written (No space left on device): mend that disk, or write to another"
    assert told.startswith(wanted)
    assert not list(tmp_path.iterdir())


def test_a_record_is_read_as_it_was_written(tmp_path):
    """Every field survives, and no partial file is left."""
    record = failure_of(ValueError("naïve \udce9".encode("utf-8", "replace").decode()), 4)
    write_failure(record, tmp_path)
    assert read_failures(tmp_path) == [record]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-4.json"]


def test_torchrun_reads_what_is_written_for_it(tmp_path):
    """Its own reader finds the message and the second of the failure."""
    record, path = failure_of(errors.DataError("corpus.bin ends early"), 1), tmp_path / "error.json"
    write_for_torchrun(record, path)
    read = ProcessFailure(local_rank=1, pid=record.pid, exitcode=record.exit_code, error_file=str(path))
    assert (read.message, read.timestamp) == ("corpus.bin ends early", record.time_ns // 10**9)


def run(body: str, folder: str, *, rank: int = 0) -> subprocess.CompletedProcess[str]:
    """A rank under `report_failure`, in a process."""
    script = f"""
import os, sys, threading, time
from pathlib import Path
from shoal.launcher.environment import Place
from shoal.launcher.failure import report_failure
with report_failure(Place({rank}, {rank + 1}, 0, 1, 0, "torchrun"), {folder}):
    {body}
print("went on")
"""
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=HANG_S)


def test_a_thread_that_hangs_does_not_hold_the_exit(tmp_path):
    """A non-daemon thread that sleeps would keep a normal exit waiting; the failed rank leaves at once."""
    done = run(
        "threading.Thread(target=time.sleep, args=(3600,)).start(); raise ValueError('x')", f"Path({str(tmp_path)!r})"
    )
    assert done.returncode == 1
    (record,) = read_failures(tmp_path)
    assert record.message == "x"
    assert done.stderr == ""


def test_without_a_folder_the_text_goes_to_standard_error():
    """Under another launcher the rank speaks for itself."""
    done = run("raise ValueError('odd weight')", "None")
    assert done.returncode == 1
    assert done.stderr.startswith("rank 0 (")
    assert "ValueError: odd weight" in done.stderr


def test_a_failure_gives_the_terminal_no_orders(tmp_path):
    """What a user's error holds is shown as Python writes it: on standard error, in a log, and in torchrun's file."""
    evil = r"raise ValueError('\x1b]0;owned\x07 odd')"
    for folder, rank in (("None", 0), (f"Path({str(tmp_path)!r})", 1)):
        done = run(evil, folder, rank=rank)
        assert "\x1b" not in done.stderr
        assert r"\x1b]0;owned\x07 odd" in done.stderr
    write_for_torchrun(failure_of(ValueError("\x1b[2J"), 0), tmp_path / "torchrun")
    assert "\\x1b[2J" in msgspec.json.decode((tmp_path / "torchrun").read_bytes())["message"]


def test_a_folder_that_is_gone_does_not_hold_the_exit(tmp_path):
    """Where the record cannot be written the code still counts."""
    assert run("sys.exit(6)", f"Path({str(tmp_path / 'gone')!r})").returncode == 6


def test_without_an_error_nothing_happens(tmp_path):
    """A rank that succeeds runs on, and leaves no record."""
    done = run("pass", f"Path({str(tmp_path)!r})")
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_is_not_one_is_refused():
    """Unknown shapes do not become failures."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"rank": 1}', type=Failure)
