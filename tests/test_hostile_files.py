"""Files that anybody may have put there end every reader with an error of Shoal's own, soon and in bounded memory."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.assembly.data_record import recorded_data
from shoal.assembly.proofs import _passed
from shoal.checkpoint import manifest, tensorfile
from shoal.checkpoint.objects import require_weights
from shoal.config.load import read as read_tables
from shoal.errors import ShoalError
from shoal.experiments.sweep import Decision, read_state
from shoal.models.huggingface.config import _keys_of
from shoal.observe.capsule import INDEX, RUN_FILE, read_capsule, unpack
from shoal.observe.events import scan_events
from shoal.observe.facts import read_facts
from shoal.planning.history import remembered
from shoal.resilience.faults import read_faults
from shoal.resilience.hang_verdict import read_verdict

SOON_S = 3.0
"""Of this process's own time, whatever else the machine does; a second on an idle machine."""
MOST_BYTES = 512 << 20
"""Of resident memory, beyond what there was: a file that may be read at all has 64 MiB."""


def _facts(path: Path) -> object:
    path.rename(path.parent / "facts.json")
    return read_facts(path.parent)


def _tensors(path: Path) -> object:
    return [tensor.sum() for tensor in tensorfile.read(path).values()]


def _named(path: Path, name: str) -> Path:
    """The file under the name by which its reader looks for it; its folder."""
    (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
    path.rename(path.parent / name)
    return path.parent


def _verdict_of_a_hang(path: Path) -> object:
    return read_verdict(_named(path, "hang.json"), since_s=0.0)


def _history(path: Path) -> object:
    folder = _named(path, "predictions.jsonl")
    return remembered({"SHOAL_CACHE": str(folder)})


READERS: dict[str, Callable[[Path], object]] = {
    "run file": read_tables,
    "facts": _facts,
    "config of transformers": lambda path: _keys_of(path, key="model.folder"),
    "manifest": manifest.read,
    "object": _tensors,
    "weights": require_weights,
    "capsule": read_capsule,
    "files of a capsule": lambda path: unpack(path, path.parent / "unpacked"),
    "decisions of a sweep": lambda path: read_state(path, dict[str, Decision], "stopped trials are trained on"),
    "proposals of a sweep": lambda path: read_state(path, list[dict[str, Any]], "the search begins anew"),
    "scenario of a rehearsal": lambda path: read_faults(_named(path, "scenario.json")),
}

TOLERANT: dict[str, Callable[[Path], object]] = {
    "events": lambda path: scan_events(_named(path, "events/rank-00000.jsonl"))[0],
    "history of plans": _history,
    "verdict of a hang": _verdict_of_a_hang,
    "layouts that passed verify": _passed,
    "hashes of a run's data": lambda path: recorded_data(_named(path, "data.json")),
}
"""Readers of what can be done without: they find nothing."""

DIGITS = "9" * 5_000


def _header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def _huge_tensor() -> bytes:
    entry = {"a": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 4]}}
    return _header(json.dumps(entry).encode()) + b"1234"


CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "noise": random.Random(0).randbytes(4096),
    "deep lists": b"a = " + b"[" * 100_000,
    "deep JSON": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep JSON in an object": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a long integer in TOML": f"a = {DIGITS}".encode(),
    "a lone surrogate": b'{"a": "\\ud800", "format": "\\udfff"',
    "a lone surrogate in TOML": b'a = "\\ud800"',
    "surrogate bytes": b'{"a": "\xed\xa0\x80"}',
    "a deep header": _header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a header of 2^63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "a tensor of 2^62": _huge_tensor(),
    "many lists": b"[" + b"[]," * (1 << 20) + b"[]]",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", CONTENTS)
def test_hostile_contents_are_refused(tmp_path: Path, reader: str, content: str) -> None:
    if (reader, content) == ("run file", "nothing"):
        pytest.skip("an empty file is TOML without keys; which ones are needed, the tables say")
    _refused(READERS[reader], tmp_path, lambda path: path.write_bytes(CONTENTS[content]))


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, reader: str) -> None:
    """A FIFO without a writer, a folder, and a device without an end; facts that are no file are none."""
    for number, make in enumerate((os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path))):
        (tmp_path / str(number)).mkdir()
        if reader != "facts":
            _refused(READERS[reader], tmp_path / str(number), make)


@pytest.mark.parametrize("reader", TOLERANT)
@pytest.mark.parametrize("content", CONTENTS)
def test_hostile_contents_are_passed_over(tmp_path: Path, reader: str, content: str) -> None:
    """As soon, and in as little memory."""
    path = tmp_path / "file"
    path.write_bytes(CONTENTS[content])
    before, begin_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert not TOLERANT[reader](path)
    assert time.process_time() - begin_s < SOON_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


@pytest.mark.parametrize("reader", TOLERANT)
def test_what_is_no_regular_file_is_passed_over_or_refused(tmp_path: Path, reader: str) -> None:
    """A FIFO without a writer, a folder, and a device without an end."""
    for number, make in enumerate((os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path))):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / "file")
        begin_s = time.process_time()
        with contextlib.suppress(ShoalError):
            assert not TOLERANT[reader](folder / "file")
        assert time.process_time() - begin_s < SOON_S


@pytest.mark.parametrize("reader", ["capsule", "files of a capsule"])
@pytest.mark.parametrize("index", ["deep", "surrogate", "list", "digits"])
def test_capsules_with_hostile_members_are_refused(tmp_path: Path, reader: str, index: str) -> None:
    """Whatever its index says, and where its members would lie outside of it."""
    said = {"deep": '{"a":' + "[" * 100_000, "surrogate": '{"a": "\\ud800"}', "list": "[]", "digits": DIGITS}[index]

    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(INDEX, said)
            archive.writestr(RUN_FILE, "")
            archive.writestr("../outside", "")

    _refused(READERS[reader], tmp_path, make)


def test_a_list_of_very_many_files_is_not_read(tmp_path: Path) -> None:
    """`zipfile` would make an object of each."""

    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(INDEX, "{}")
        content = path.read_bytes()
        at = content.rfind(b"PK\x05\x06")
        path.write_bytes(content[: at + 12] + (57 << 20).to_bytes(4, "little") + content[at + 16 :])

    said = _refused(read_capsule, tmp_path, make)
    assert "lists more files" in said


@pytest.mark.stress
@pytest.mark.parametrize("reader", READERS)
def test_files_of_57_MiB_are_refused_in_bounded_memory(tmp_path: Path, reader: str) -> None:
    many = b"[]," * (19 << 20)
    for number, content in enumerate((b"[" + many + b"[]]", b'{"a":[' + many + b"[]]}", b"a = [" + many + b"]")):
        (tmp_path / str(number)).mkdir()
        _refused(READERS[reader], tmp_path / str(number), lambda path, content=content: path.write_bytes(content))
        (tmp_path / str(number)).rename(tmp_path / f"{number}-done")


@pytest.mark.stress
@pytest.mark.parametrize("reader", READERS)
def test_damaged_and_random_files_never_end_otherwise(tmp_path: Path, reader: str) -> None:
    """Pieces of hostile files, cut, repeated and flipped: read, or refused by an error of Shoal's."""
    draw, pieces = random.Random(1), list(CONTENTS.values())
    for number in range(300):
        folder = tmp_path / str(number)
        folder.mkdir()
        content = bytearray(b"".join(draw.choice(pieces)[: draw.randrange(1, 2_000)] for _ in range(3)))
        for _ in range(draw.randrange(4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        try:
            (folder / "file").write_bytes(content)
            READERS[reader](folder / "file")
        except ShoalError as error:
            str(error).encode()


def _refused(reader: Callable[[Path], object], folder: Path, make: Callable[[Path], object]) -> str:
    """Makes a file and reads it: an error of Shoal's, whose sentence a terminal takes, soon, and its text."""
    path = folder / "file"
    make(path)
    before, begin_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ShoalError) as caught:
        reader(path)
    assert time.process_time() - begin_s < SOON_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
    said = str(caught.value)
    said.encode()
    assert len(said) < 4_000
    return said
