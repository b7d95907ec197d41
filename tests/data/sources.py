"""One data set of 61 samples in every form that Shoal reads: sample i is ([i, i], i % 7), in files of odd sizes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from shoal.data.build import build
from shoal.data.config import BatchConfig, BuiltInData, DataConfig
from shoal.data.dataset import Dataset

SAMPLES, CLASSES = 61, 7
PARTS = (range(17), range(17, 18), range(18, 61))
KINDS = ("parquet", "arrow", "arrow-stream", "jsonl", "webdataset", "datasets", "images", "arrays")


def written(kind: str, folder: Path) -> dict:
    """Writes the data set as `kind` into `folder`; the table `[data]` that reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    return globals()[f"_{kind.replace('-', '_')}"](folder)


def built(table: dict, cache: Path, *, sequence: int = 16, vocabulary: int | None = None) -> Dataset:
    """What the table `[data]` names."""
    import msgspec

    config: BuiltInData = msgspec.convert(table, DataConfig)  # type: ignore[assignment]
    return build(config, batch=BatchConfig(global_samples=8, sequence=sequence), vocabulary=vocabulary, cache=cache)


def number_of(kind: str, inputs: np.ndarray) -> int:
    """Which sample this is, by its inputs."""
    return round(float(inputs.reshape(-1)[0]) * (255 if kind == "images" else 1))


def _table(rows: range):
    pyarrow = pytest.importorskip("pyarrow")
    values = pyarrow.array([[i, i] for i in rows], type=pyarrow.list_(pyarrow.int64()))
    return pyarrow.table({"x": values, "y": [i % CLASSES for i in rows], "unused": ["?"] * len(rows)})


def _parquet(folder: Path) -> dict:
    parquet = pytest.importorskip("pyarrow.parquet")
    for number, rows in enumerate(PARTS):
        parquet.write_table(_table(rows), folder / f"{number}.parquet", row_group_size=5)
    return {"kind": "parquet", "files": [f"{folder}/*.parquet"], "inputs": "x", "targets": "y"}


def _arrow(folder: Path) -> dict:
    ipc = pytest.importorskip("pyarrow.ipc")
    for number, rows in enumerate(PARTS):
        table = _table(rows)
        with ipc.new_file(folder / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    return {"kind": "arrow", "files": [f"{folder}/*.arrow"], "inputs": "x", "targets": "y"}


def _arrow_stream(folder: Path) -> dict:
    ipc = pytest.importorskip("pyarrow.ipc")
    for number, rows in enumerate(PARTS):
        table = _table(rows)
        with ipc.new_stream(folder / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    return {"kind": "arrow", "files": [f"{folder}/*.arrow"], "inputs": "x", "targets": "y"}


def _jsonl(folder: Path) -> dict:
    for number, rows in enumerate(PARTS):
        lines = [json.dumps({"x": [i, i], "y": i % CLASSES, "pad": "p" * (4000 * (i % 5))}) for i in rows]
        ends = "\r\n" if number == 0 else "\n"
        text = ends + (ends * 2).join(lines) + ("" if number == 2 else ends)
        (folder / f"{number}.jsonl").write_bytes(text.encode())
    return {"kind": "jsonl", "files": [f"{folder}/*.jsonl"], "inputs": "x", "targets": "y"}


def _webdataset(folder: Path) -> dict:
    for number, rows in enumerate(PARTS):
        with tarfile.open(
            folder / f"{number}.tar", "w", format=(tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)[number % 2]
        ) as tar:
            for i in rows:
                name = f"{'long' * 40 if i % 9 == 0 else 'part'}/{i:06d}"
                buffer = io.BytesIO()
                np.save(buffer, np.full(2 + 0 * i, i, dtype=np.int64))
                for field, content in (
                    ("x.npy", buffer.getvalue()),
                    ("cls", b"%d" % (i % CLASSES)),
                    ("pad", b"p" * (9000 * (i % 4))),
                ):
                    member = tarfile.TarInfo(f"{name}.{field}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return {"kind": "webdataset", "files": [f"{folder}/*.tar"], "inputs": "x.npy", "targets": "cls"}


def _datasets(folder: Path) -> dict:
    datasets = pytest.importorskip("datasets")
    columns = {"x": [[i, i] for i in range(SAMPLES)], "y": [i % CLASSES for i in range(SAMPLES)]}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "saved")
    return {"kind": "datasets", "folder": str(folder / "saved"), "inputs": "x", "targets": "y"}


def _images(folder: Path) -> dict:
    """Its order is by class: class `a` has the images 0 .. 40, class `b` the others."""
    image = pytest.importorskip("PIL.Image")
    for i in range(SAMPLES):
        place = folder / "root" / ("a" if i < 41 else "b")
        place.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((4, 4, 3), i, dtype=np.uint8)).save(place / f"{i:03d}.png")
    return {"kind": "images", "folder": str(folder / "root")}


def _arrays(folder: Path) -> dict:
    np.save(folder / "x.npy", np.repeat(np.arange(SAMPLES), 2).reshape(-1, 2))
    np.save(folder / "y.npy", np.arange(SAMPLES) % CLASSES)
    return {"kind": "arrays", "inputs": str(folder / "x.npy"), "targets": str(folder / "y.npy")}
