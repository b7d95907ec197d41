"""The tables of data and batch are strict, and read without torch."""

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from shoal.data.config import ArrayFiles, BatchConfig, DataConfig, StdlibText, Tokens
from shoal.runfile.load import renamed_keys


def read(table: dict) -> object:
    return msgspec.convert(table, DataConfig)


def test_kinds_pick_their_table():
    """`kind` picks the variant; every variant carries the keys of reading."""
    assert read({"kind": "stdlib"}) == StdlibText(held_out_fraction=0.05, shuffle=True, prefetch_steps=2, readers=1)
    assert read({"kind": "tokens", "path": "x", "dtype": "uint16"}) == Tokens(path="x", dtype="uint16")
    assert read({"kind": "arrays", "inputs": "a", "targets": "b"}) == ArrayFiles(inputs="a", targets="b")
    for table in ({"kind": "digits"}, {"kind": "text", "files": ["*"]}, {"kind": "python", "build": "a.b:c"}):
        assert read(table).prefetch_steps == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "std"},
        {"kind": "stdlib", "path": "x"},
        {"kind": "stdlib", "readers": 0},
        {"kind": "stdlib", "held_out_fraction": 1.0},
        {"kind": "stdlib", "packing": "both"},
        {"kind": "text", "files": []},
        {"kind": "tokens"},
        {"kind": "tokens", "path": "x", "dtype": "int8"},
        {"kind": "arrays", "inputs": "a", "targets": "b", "held_out_inputs": "c"},
        {"kind": "python", "build": "no_colon"},
    ],
)
def test_wrong_tables_are_refused(table: dict):
    """Unknown keys, kinds and values, missing keys and half pairs do not pass."""
    with pytest.raises(msgspec.ValidationError):
        read(table)


@pytest.mark.parametrize("table", [{}, {"global_samples": 0}, {"global_samples": 4, "micro_samples": 8}])
def test_wrong_batches_are_refused(table: dict):
    """A batch states its samples, and a microbatch is a part of it."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, BatchConfig)
    assert msgspec.convert({"global_samples": 4, "micro_samples": 4}, BatchConfig).denominator == "auto"


def test_no_torch_is_needed():
    """Importing the tables imports neither torch nor numpy."""
    code = "import sys, shoal.data.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


RECORDS = {"kind": "jsonl", "files": ["a"], "inputs": "x", "targets": "y"}


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"kind": "jsonl", "files": ["a"]}, "name either inputs and targets, or text"),
        ({"kind": "jsonl", "files": ["a"], "inputs": "x"}, "name either inputs and targets, or text"),
        (RECORDS | {"text": "t"}, "name either inputs and targets, or text"),
        (RECORDS | {"tokenizer": "t.json"}, "a tokenizer needs text"),
        (RECORDS | {"augment": ["spin"]}, "augment names 'spin'"),
        (RECORDS | {"shuffle_window": 8}, ">= 16"),
        (RECORDS | {"image_channels": 2}, "image_channels"),
        ({"kind": "text", "files": ["a"], "end_token": "<end>"}, "give the tokenizer too"),
        ({"kind": "stream", "path": "p", "inputs": "x", "targets": "y", "socket": "here"}, "socket"),
        ({"kind": "stream", "path": "p", "inputs": "x", "targets": "y", "augment": ["flip"]}, "taken as it comes"),
    ],
)
def test_wrong_records_and_streams_are_refused(table: dict, sentence: str):
    """The message has the rule."""
    with pytest.raises(msgspec.ValidationError, match=sentence):
        read(table)


@pytest.mark.parametrize(
    ("data", "now"),
    [
        ({"kind": "stream", "weights": "w"}, {"kind": "stream", "loss_weights": "w"}),
        ({"kind": "jsonl", "weights": "own:draws"}, {"kind": "jsonl", "weights": "own:draws"}),
        ({"kind": "mixture", "weights": {"a": 1.0}}, {"kind": "mixture", "weights": {"a": 1.0}}),
    ],
    ids=["a stream's field", "what samples are drawn by", "shares of sources"],
)
def test_a_key_that_moved_is_read_where_its_kind_has_no_such_key_today(
    data: dict[str, Any], now: dict[str, Any]
) -> None:
    assert renamed_keys({"data": data})[0] == {"data": now}
