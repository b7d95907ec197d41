"""Damaged files and records are named; a run stops at them, or leaves them out with weight 0 and counts them."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data.feed import Feed, StepShare
from shoal.errors import ConfigError, DataError, EnvironmentFault
from tests.data.sources import SAMPLES, built, number_of, written


def lines_with_a_bad_one(folder: Path, *, bad: str = '{"x": [5, 5], "y": ') -> dict:
    lines = [json.dumps({"x": [i, i], "y": 0}) for i in range(20)]
    lines[5] = bad
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return {"kind": "jsonl", "files": [str(folder / "lines.jsonl")], "inputs": "x", "targets": "y"}


def fed(dataset, *, samples: int, micro: int | None = None):
    order = dataset.order(0, shuffle=False)
    with Feed(dataset.train, order, StepShare(samples, micro_samples=micro)) as feed:
        return feed.next()


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ('{"x": [5, 5], "y": ', "is no JSON"),
        ("[1, 2]", "is no JSON object"),
        ('{"y": 0}', "There is no field 'x': the record has y"),
        ('{"x": "five", "y": 0}', "holds text"),
        ('{"x": [[1], [2, 3]], "y": 0}', "no array of numbers"),
        ('{"x": null, "y": 0}', "is null"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, sentence: str):
    """The message has the file, the number of the record, and what is wrong with it."""
    dataset = built(lines_with_a_bad_one(tmp_path, bad=bad), tmp_path / "cache")
    with pytest.raises(DataError, match=rf"Sample 5 at position 5: .*lines\.jsonl, record 5: .*{sentence}"):
        fed(dataset, samples=8)


def test_a_skipped_record_counts_for_nothing(tmp_path: Path):
    """The others keep their weights and places; the denominator is that of the readable samples."""
    dataset = built(lines_with_a_bad_one(tmp_path) | {"bad_records": "skip"}, tmp_path / "cache")
    step = fed(dataset, samples=8)
    (batch,) = step.microbatches
    assert batch.weights.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]
    assert batch.weight == 7
    assert batch.positions.tolist() == list(range(8))
    assert [row[0] for i, row in enumerate(batch.inputs.tolist()) if i != 5] == [0, 1, 2, 3, 4, 6, 7]  # type: ignore[union-attr]
    assert len(step.skipped) == 1
    assert "record 5" in step.skipped[0]


def test_a_batch_of_nothing_but_a_skipped_record(tmp_path: Path):
    """A microbatch whose only sample is damaged has the next readable one's shape, and weight 0."""
    dataset = built(lines_with_a_bad_one(tmp_path) | {"bad_records": "skip"}, tmp_path / "cache")
    step = fed(dataset, samples=8, micro=1)
    assert [batch.weight for batch in step.microbatches] == [1, 1, 1, 1, 1, 0, 1, 1]


def test_too_much_damage_is_not_skipped(tmp_path: Path):
    """A stretch of nothing but damage stops the run, and so does a file that changes under it."""
    table = lines_with_a_bad_one(tmp_path) | {"bad_records": "skip"}
    (tmp_path / "lines.jsonl").write_text("{\n" * 100)
    with pytest.raises(DataError, match="too much damage to skip"):
        fed(built(table, tmp_path / "cache"), samples=2)
    dataset = built(lines_with_a_bad_one(tmp_path) | {"bad_records": "skip"}, tmp_path / "cache")
    (tmp_path / "lines.jsonl").write_text("{\n" * 100)
    with pytest.raises(EnvironmentFault, match="has changed since the run opened it"):
        fed(dataset, samples=2)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "webdataset", "images"])
def test_flipped_bytes_are_named(kind: str, tmp_path: Path):
    """Wherever bytes of a file are overwritten, reading raises DataError that names it, or gives the samples of the
    other files as they were."""
    table = written(kind, tmp_path / "data")
    path = sorted(p for p in (tmp_path / "data").rglob("*") if p.is_file())[-1]
    content = path.read_bytes()
    sentences: list[str] = []
    for place in np.linspace(0, len(content) - 40, 12).astype(int):
        path.write_bytes(content[:place] + bytes(b ^ 0xA5 for b in content[place : place + 40]) + content[place + 40 :])
        try:
            train = built(table, tmp_path / "cache").train
            for i in range(18):
                assert number_of(kind, np.asarray(train[i]["inputs"])) == i
            for i in range(18, SAMPLES):
                train[i]
        except DataError as error:
            sentences.append(str(error))
    assert sentences
    assert all(path.name in sentence for sentence in sentences)


def list_of(table: dict, cache: Path) -> list:
    """All samples."""
    train = built(table, cache).train
    return [train[i] for i in range(len(train))]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "webdataset"])
def test_truncated_shards_are_named(kind: str, tmp_path: Path):
    """A file that was cut short is refused when the data is opened."""
    table = written(kind, tmp_path / "data")
    path = sorted((tmp_path / "data").glob("2.*"))[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=path.name):
        list_of(table, tmp_path / "cache")


def test_files_of_another_kind_are_refused(tmp_path: Path):
    """A text that is no parquet, Arrow or tar, a compressed file, missing columns and files, paths beside URLs."""
    (tmp_path / "text").write_text("no table\n" * 200)
    for kind in ("parquet", "arrow", "webdataset"):
        with pytest.raises(DataError, match="text"):
            built({"kind": kind, "files": [str(tmp_path / "text")], "inputs": "x", "targets": "y"}, tmp_path / "cache")
    import gzip

    (tmp_path / "lines.gz").write_bytes(gzip.compress(b"{}\n" * 10))
    with pytest.raises(DataError, match=r"lines\.gz is compressed"):
        built(
            {"kind": "jsonl", "files": [str(tmp_path / "lines.gz")], "inputs": "x", "targets": "y"}, tmp_path / "cache"
        )
    for kind in ("parquet", "arrow", "datasets"):
        with pytest.raises(DataError, match="no column 'z': it has x, y"):
            built(written(kind, tmp_path / kind) | {"inputs": "z"}, tmp_path / "cache")
    with pytest.raises(DataError, match="no file matches"):
        built({"kind": "jsonl", "files": [f"{tmp_path}/*.nothing"], "inputs": "x", "targets": "y"}, tmp_path / "cache")
    files = [str(tmp_path / "text"), "memory://x.jsonl"]
    with pytest.raises(ConfigError, match="mixes URLs and paths"):
        built({"kind": "jsonl", "files": files, "inputs": "x", "targets": "y"}, tmp_path / "cache")


def test_an_edited_file_gets_a_new_index(tmp_path: Path):
    """Indexes are kept under size and time of change: an edited file is read as it is, a damaged index remade."""
    table = lines_with_a_bad_one(tmp_path)
    assert len(built(table, tmp_path / "cache").train) == 20
    (tmp_path / "lines.jsonl").write_text('{"x": [1], "y": 1}\n' * 3)
    assert len(built(table, tmp_path / "cache").train) == 3
    for index in (tmp_path / "cache" / "indexes").iterdir():
        index.write_bytes(index.read_bytes()[:-7])
    train = built(table, tmp_path / "cache").train
    assert (len(train), train[2]["inputs"].tolist()) == (3, [1])


def test_an_image_bomb_is_refused(tmp_path: Path):
    """An image that claims more pixels than memory holds is refused before it is decoded."""
    import struct
    import zlib

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "bomb.png").write_bytes(bomb)
    train = built({"kind": "images", "folder": str(tmp_path / "root")}, tmp_path / "cache").train
    with pytest.raises(DataError, match=r"bomb\.png: "):
        train[0]


def test_tars_keep_to_webdatasets_rules(tmp_path: Path):
    """Names are cut at the first dot of the last part; hidden files and folders are no samples."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("v1.0/a.x.npy", "v1.0/a.cls", "v1.0/.hidden.cls", "v1.0/b.cls"):
            member = tarfile.TarInfo(name)
            member.size = 1
            import io

            tar.addfile(member, io.BytesIO(b"7"))
    table = {"kind": "webdataset", "files": [str(tmp_path / "a.tar")], "inputs": "cls", "targets": "cls"}
    train = built(table, tmp_path / "cache").train
    assert len(train) == 2
    assert torch.tensor([train[0]["inputs"], train[1]["inputs"]]).tolist() == [7, 7]
