"""What a data set of 10^9 samples costs in memory: neither its order nor its index lists samples."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.data.blocks import JSONLines

SAMPLES = 10**9
LIMIT_BYTES = 100 * 10**6

MEASURED = """
import json, sys, tracemalloc
from pathlib import Path
import numpy as np, psutil, pyarrow.parquet, torch
from shoal.data.config import BatchConfig, DataConfig
from shoal.data.build import build
from shoal.data.feed import Feed, StepShare
import msgspec
table = json.loads(sys.argv[1])
def opened(samples):
    dataset = build(msgspec.convert(table, DataConfig), batch=BatchConfig(global_samples=64), vocabulary=None,
                    cache=Path(sys.argv[2]))
    assert len(dataset.train) == samples
    order = dataset.order(3, shuffle=True, window=1 << 16)
    seen = []
    for start in (0, samples // 3, samples - 64):
        with Feed(dataset.train, order, StepShare(64, 1, 2), start=start, readers=2) as feed:
            step = feed.next()
            seen += step.microbatches[0].positions.tolist()
    return dataset, seen
before = psutil.Process().memory_full_info().uss
dataset, seen = opened(int(sys.argv[3]))
print(psutil.Process().memory_full_info().uss - before, len(set(seen)))
"""


def cost_of(table: dict, cache: Path, samples: int) -> int:
    """Bytes of its own that a fresh process takes to open the data and to read steps at three places."""
    import json

    pytest.importorskip("psutil")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, json.dumps(table), str(cache), str(samples)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    cost, distinct = map(int, ran.stdout.split())
    assert distinct == 96
    return cost


@pytest.mark.slow
def test_parquet_of_a_billion_rows(tmp_path: Path):
    """10^9 rows in ten files (links to one) of 1,000 row groups: index, order and the blocks that were read stay below
    100 MB beside the libraries."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows, groups, files = 10**5, 1000, 10
    values = pyarrow.array(np.zeros(rows, dtype=np.int8))
    with parquet.ParquetWriter(tmp_path / "0.parquet", pyarrow.schema({"x": pyarrow.int8(), "y": pyarrow.int8()})) as w:
        table = pyarrow.table({"x": values, "y": values})
        for _ in range(groups):
            w.write_table(table, row_group_size=rows)
    for number in range(1, files):
        os.link(tmp_path / "0.parquet", tmp_path / f"{number}.parquet")
    config = {
        "kind": "parquet",
        "files": [f"{tmp_path}/*.parquet"],
        "inputs": "x",
        "targets": "y",
        "cache_bytes": 2**24,
    }
    cost = cost_of(config, tmp_path / "cache", SAMPLES)
    print(f"{cost / 1e6:.1f} MB")
    assert cost < LIMIT_BYTES


@pytest.mark.slow
def test_an_array_of_a_billion_samples(tmp_path: Path):
    """The same of mapped .npy files (sparse on disk)."""
    for name in ("x", "y"):
        np.lib.format.open_memmap(tmp_path / f"{name}.npy", mode="w+", dtype=np.uint8, shape=(SAMPLES,)).flush()
    config = {"kind": "arrays", "inputs": str(tmp_path / "x.npy"), "targets": str(tmp_path / "y.npy")}
    cost = cost_of(config, tmp_path / "cache", SAMPLES)
    print(f"{cost / 1e6:.1f} MB")
    assert cost < LIMIT_BYTES


def test_lines_cost_a_sixteenth_of_a_byte_or_less(tmp_path: Path):
    """The index of JSON lines is 16 bytes for 64 KiB: of 10^9 lines of 200 bytes, 49 MB."""
    line = b'{"x": [1], "y": 0, "pad": "' + b"p" * 170 + b'"}\n'
    assert len(line) == 200
    path = tmp_path / "lines.jsonl"
    path.write_bytes(line * 100_000)
    index = JSONLines().index(path)
    assert index[-1].tolist() == [100_000, path.stat().st_size - 1]
    assert index.nbytes / 100_000 * SAMPLES < LIMIT_BYTES / 2
