"""A TOML file from anywhere is read, or refused with a `ConfigError`, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.config.load import FILE_LIMIT_BYTES, load, parse
from shoal.errors import ConfigError
from shoal.launcher.lab.lab_file import load_lab
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.topology.cluster_file import load_cluster
from tests.memory_limit import memory_limit

RUN = """
[run]
name = "a"
steps = 3
[model]
kind = "mlp"
[data]
kind = "digits"
[batch]
global_samples = 4
[optimizer]
kind = "sgd"
lr = 0.1
[layout]
replicate = 2
"""
CLUSTER = '[cluster]\nnodes = 4\nmachine = "dgx-h100"\n[scale_out]\ngb_s = 50.0\nlatency_us = 2.0\n'
LAB = "[lab]\nhosts = 2\nranks_per_host = 2\nrate_mbit = 100\n[[link]]\nbetween = [0, 1]\nrate_mbit = 10\n"

READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "run": (load_run, RUN),
    "cluster": (load_cluster, CLUSTER),
    "lab": (load_lab, LAB),
}

MANY = FILE_LIMIT_BYTES - 16
LARGE = {
    "lists inside lists": "a = " + "[" * MANY,
    "as deep as Python's parser goes": "a = " + "[" * 200 + "]" * 200,
    "tables inside tables": "a = " + "{a = " * 200_000,
    "a dotted key": ".".join("a" * (MANY // 2)) + " = 1",
    "a dotted key in quotes": '."b"'.join("a" * (MANY // 5)) + " = 1",
    "a dotted header": f"[{'.'.join('a' * (MANY // 2))}]",
    "one word": "a" * MANY,
    "quotes": '"' * MANY,
    "spaces": " " * MANY,
    "words between spaces": ("a" + " " * 1000) * 1000,
    "headers": "[[a]]\n" * (MANY // 6),
    "deep headers": "".join(f"[{'a.' * 30}b{number}]\n" for number in range(12_000)),
    "a list of numbers": f"a = [{'1,' * (MANY // 2)}]",
    "an integer": f"a = {'9' * MANY}",
    "a hexadecimal integer": f"a = 0x{'f' * MANY}",
}

VALUES = [
    "9" * 5000,
    "-" + "9" * 4000,
    "0x" + "f" * 9999,
    "9223372036854775808",
    "1e999",
    "nan",
    "-inf",
    "[]",
    "{}",
    "[[[[1]]]]",
    "{ kind = { kind = 1 } }",
    '"\\u0000"',
    "'" + "x" * 10_000 + "'",
    "true",
    "1979-05-27T07:32:00Z",
    "07:32:00",
    "-1",
    "0",
    "[-1, 1e400]",
    '""',
]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize("kind", READERS)
def test_a_large_file_is_refused_in_bounded_memory(tmp_path, kind, text):
    """A megabyte of anything takes at most a quarter of a gigabyte; the test's time limit bounds the time."""
    path = tmp_path / "large.toml"
    path.write_text(text)
    with memory_limit(256 << 20), pytest.raises(ConfigError) as caught:
        READERS[kind][0](path)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_regular_file_is_refused(tmp_path, kind):
    """Folders, FIFOs and devices, which would block or never end."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="not a regular file"):
            READERS[kind][0](path)


def test_depth_is_counted_in_tables_and_lists_alike():
    """What 32 levels hold is read; one more is refused, whatever it is made of."""
    for opening, closing in (("[", "]"), ("{a = ", "}")):
        inner = "1" if opening != "[" else ""
        parse(f"a = {opening * 31}{inner}{closing * 31}")
        with pytest.raises(ValueError, match="deeper than 32"):
            parse(f"a = {opening * 32}{inner}{closing * 32}")
    with pytest.raises(ValueError, match="more than 32 parts"):
        parse(f"{'.'.join('a' * 33)} = 1")


def property_of_a_changed_file(folder: Path, kind: str, data: st.DataObject) -> None:
    """A value replaced by an odd one, or some bytes by others: tables, or a `ConfigError` that can be printed."""
    reader, text = READERS[kind]
    lines = text.splitlines()
    if data.draw(st.booleans()):
        number = data.draw(st.sampled_from([n for n, line in enumerate(lines) if "=" in line]))
        key = data.draw(st.sampled_from([lines[number].partition("=")[0], "kind ", "x "]))
        lines[number] = f"{key}= {data.draw(st.sampled_from(VALUES))}"
        content = "\n".join(lines).encode()
    else:
        at, gone = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 8))
        content = text.encode()[:at] + data.draw(st.binary(max_size=8)) + text.encode()[at + gone :]
    path = folder / f"{kind}.toml"
    path.write_bytes(content)
    try:
        reader(path)
    except ConfigError as error:
        str(error).encode()


@pytest.mark.parametrize("kind", READERS)
@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_file_is_read_or_refused(tmp_path, kind, data):
    """No exception of Python's or msgspec's reaches the user."""
    property_of_a_changed_file(tmp_path, kind, data)


@pytest.mark.stress
@pytest.mark.parametrize("kind", READERS)
@settings(deadline=None, max_examples=10_000, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_changed_files_are_read_or_refused(tmp_path, kind, data):
    """The same property with a hundred times the examples."""
    property_of_a_changed_file(tmp_path, kind, data)


@settings(deadline=None, max_examples=100)
@given(key=st.sampled_from(["run.steps", "model.kind", "a.b", "run.", "layout.replicate"]) | st.text(), value=st.text())
def test_an_override_is_taken_or_refused(tmp_path_factory, key, value):
    """Any text in the place of a key or a value; lone surrogates are how a shell passes bytes that are not UTF-8."""
    path = tmp_path_factory.getbasetemp() / "override.toml"
    path.write_text(RUN)
    for text in (f"{key}={value}", f"{key}={value}\udcff", *(f"{key}={odd}" for odd in VALUES)):
        with contextlib.suppress(ConfigError):
            load(RunFile, path, [text])
