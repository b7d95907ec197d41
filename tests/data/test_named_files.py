"""The hash of every file that `[data]` names: of its content, for each kind, read again only where it has changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.data.config import DataConfig
from shoal.data.named_files import hashes, local_files, patterns_of

KINDS: dict[str, dict[str, Any]] = {
    "text": {"kind": "text", "files": ["corpus/*.txt"]},
    "tokens": {"kind": "tokens", "path": "a.bin", "held_out": "b.bin"},
    "arrays": {"kind": "arrays", "inputs": "x.npy", "targets": "y.npy"},
    "parquet": {"kind": "parquet", "files": ["corpus/**"], "inputs": "x", "targets": "y"},
    "arrow": {"kind": "arrow", "files": ["a.bin"], "held_out_files": ["b.bin"], "inputs": "x", "targets": "y"},
    "jsonl": {"kind": "jsonl", "files": ["a.bin"], "text": "t", "tokenizer": "b.bin"},
    "webdataset": {"kind": "webdataset", "files": ["a.bin"], "inputs": "x", "targets": "y"},
    "images": {"kind": "images", "folder": "corpus", "held_out_folder": "more"},
    "datasets": {"kind": "datasets", "folder": "corpus", "inputs": "x", "targets": "y"},
    "mixture": {"kind": "mixture", "sources": {"a": {"kind": "tokens", "path": "a.bin"},
                                               "b": {"kind": "text", "files": ["corpus/*.txt"]}}},
}  # fmt: skip
NO_FILES: dict[str, dict[str, Any]] = {
    "stdlib": {"kind": "stdlib"},
    "digits": {"kind": "digits"},
    "python": {"kind": "python", "build": "own:data"},
    "stream": {"kind": "stream", "path": "a.bin", "inputs": "x", "targets": "y"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.bin", "b.bin", "x.npy", "y.npy", "corpus/one.txt", "corpus/two.txt", "more/three.png"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "data"


def config(table: dict[str, Any]) -> Any:
    return msgspec.convert(table, DataConfig)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_files_names_each_of_them(kind: str, folder: Path, tmp_path: Path) -> None:
    """Each file has a hash, and another content another one; no other file's hash changes."""
    table = config(KINDS[kind])
    names = local_files(table, folder)
    before = hashes(table, folder, cache=tmp_path / "cache")
    assert names
    assert before.keys() == names.keys()
    assert len(set(before.values())) == len(before)
    for name, path in names.items():
        path.write_text("other content")
        after = hashes(table, folder, cache=tmp_path / "cache")
        assert {one for one in before if before[one] != after[one]} == {name}
        before = after
        path.write_text(name)
        before = hashes(table, folder, cache=tmp_path / "cache")


def test_every_kind_is_known(folder: Path) -> None:
    """A new kind of data has to say which files it names, or that it names none."""
    kinds = {struct.__struct_config__.tag for struct in DataConfig.__args__}
    assert kinds == KINDS.keys() | NO_FILES.keys()
    for table in NO_FILES.values():
        assert patterns_of(config(table)) == {}


def test_a_file_is_read_again_only_where_it_changed(folder: Path, tmp_path: Path) -> None:
    """A file that cannot be read any more keeps its hash while nothing says that it is another; an edit of the same
    size is seen, though its time was set back."""
    table = config(KINDS["tokens"])
    before = hashes(table, folder, cache=tmp_path)
    status = (folder / "a.bin").stat()
    (tmp_path / "data-hashes.json").write_bytes((tmp_path / "data-hashes.json").read_bytes().replace(
        before["a.bin"].encode(), b"f" * 32))  # fmt: skip
    assert hashes(table, folder, cache=tmp_path)["a.bin"] == "f" * 32  # taken from the cache
    (folder / "a.bin").write_text("A.BIN")
    os.utime(folder / "a.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hashes(table, folder, cache=tmp_path)["a.bin"] not in ("f" * 32, before["a.bin"])


def test_files_behind_urls_are_known_by_their_version(tmp_path: Path) -> None:
    """They are listed, not fetched."""
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/named/a.jsonl", b"{}")
    table = config({"kind": "jsonl", "files": ["memory://named/*.jsonl"], "text": "t"})
    (found,) = [hashes(table, tmp_path, cache=tmp_path)]
    assert list(found) == ["memory:///named/a.jsonl"] or list(found) == ["memory://named/a.jsonl"]
    fsspec.filesystem("memory").pipe("/named/a.jsonl", b"{ }")
    assert hashes(table, tmp_path, cache=tmp_path) != found
