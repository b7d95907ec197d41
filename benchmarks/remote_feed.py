"""`python -m benchmarks.remote_feed`: how long a step waits for data that lies in a remote store in trouble.

An S3 server in another process fails 5 % of the requests and answers 200 ms late. Two ranks train one epoch of parquet
files from there, with a cache on disk that is smaller than the data, and the defaults of `[data]` besides. The peer is
the plain way: a DataLoader with a worker in each rank, which goes through the rank's files in a drawn order, fetches
one with fsspec, asks again where that fails, and shuffles within it. The same files on this machine's disk are the
lower bound; the remote run is measured twice (A/A). Every way takes the same training steps.

Each sample carries its number, so that what was trained on is counted from what the model got.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import typer
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.command import run
from shoal.bench.groups import gathered, join_group, join_store
from shoal.bench.options import AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, result_folder, run_as_rank
from shoal.bench.report import Result, check, print_report
from shoal.bench.training_job import ENDLESS, start_training
from shoal.data.config import BatchConfig
from shoal.data.record_config import Parquet
from shoal.data.sample import Batch
from shoal.engine.tally import StepResult
from shoal.files import temporary_folder
from shoal.launcher.environment import Place
from shoal.models.config import MLPConfig
from shoal.runfile.run_file import RunConfig, RunFile

FAILING, SLOW_S = 0.05, 0.2
WAITING = 0.05
"""The promised share of the steps after the first."""
FEATURES, CLASSES = 1024, 8
FILE_SAMPLES = 256
STEP_SAMPLES = 128
BUCKET = "s3://copies/train"
NUMBERS = 2.0**20
"""A sample's number over this is its first feature: exact in float32."""
ATTEMPTS, FIRST_PAUSE_S = 8, 0.1
SETTINGS, LOCAL = "settings.json", "local"


class Settings(msgspec.Struct, frozen=True):
    """What all ranks are told: fsspec's keywords, the folder of the same files, and how many there are."""

    options: dict[str, Any]
    local: str
    files: int
    width: int

    @property
    def samples(self) -> int:
        """Of one epoch."""
        return self.files * FILE_SAMPLES


def remote_feed(
    files: Annotated[int, typer.Option(help="Files of 256 samples, 1 MiB each; a step takes 128.", min=24)] = 96,
    width: Annotated[int, typer.Option(help="Features of each hidden layer: the work of a step.", min=64)] = 1536,
    processes: Processes = 2,
    settings: Annotated[str, typer.Option(hidden=True)] = "",
    as_json: AsJson = False,
) -> None:
    """How long a step waits for data in an S3 store that fails 5 % of the requests and answers 200 ms late.

    Example: python -m benchmarks.remote_feed --files 48
    """
    if is_rank():
        told = msgspec.json.decode(Path(settings).read_bytes(), type=Settings)
        run_as_rank(lambda place: measure(told, place))
        return
    with temporary_folder() as folder, served() as (options, ask):
        write_files(folder / LOCAL, files)
        upload(folder / LOCAL, options)
        ask("trouble")
        told = Settings(options, str(folder / LOCAL), files, width)
        (folder / SETTINGS).write_bytes(msgspec.json.encode(told))
        result = on_ranks(
            ["benchmarks.remote_feed", "--settings", str(folder / SETTINGS)], processes=processes, part="remote feed"
        )
        result["rows"].append({"way": "the server", **ask("counts")})
    print_report("remote_feed", result, as_json=as_json)


def write_files(folder: Path, files: int) -> None:
    """The data: noise, the sample's number, and a class that follows from it."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    folder.mkdir()
    draws = np.random.default_rng(0)
    for file in range(files):
        numbers = np.arange(file * FILE_SAMPLES, (file + 1) * FILE_SAMPLES)
        features = draws.standard_normal((FILE_SAMPLES, FEATURES), dtype=np.float32)
        features[:, 0] = numbers / NUMBERS
        column = arrow.FixedSizeListArray.from_arrays(arrow.array(features.reshape(-1)), FEATURES)
        table = arrow.table({"features": column, "label": numbers % CLASSES})
        parquet.write_table(table, folder / f"{file:04d}.parquet", compression="none")


def upload(folder: Path, options: dict[str, Any]) -> None:
    """The files of `folder` into the bucket."""
    import fsspec

    store = fsspec.filesystem("s3", **options)
    for path in sorted(folder.iterdir()):
        store.pipe_file(f"{BUCKET}/{path.name}", path.read_bytes())


@contextmanager
def served() -> Iterator[tuple[dict[str, Any], Callable[[str], dict[str, Any]]]]:
    """An S3 server in another process: the keywords for fsspec, and what asks it for "trouble" or "counts"."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there,))
    server.start()
    there.close()

    def ask(word: str) -> dict[str, Any]:
        here.send(word)
        return here.recv()

    try:
        yield here.recv(), ask
    finally:
        here.close()
        server.join()


def _serve(pipe: Connection) -> None:
    """Until the pipe is closed."""
    from tests.checkpoint.s3_server import s3_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as server:
        options = server.options
        del options["skip_instance_cache"]  # clients may keep their connections
        pipe.send(options)
        try:
            while word := pipe.recv():
                if word == "trouble":
                    server.trouble.become(failing=FAILING, slow_s=SLOW_S)
                pipe.send({"failed_requests": server.trouble.failed})
        except EOFError:
            return


def run_file(told: Settings, *, remote: bool) -> RunFile:
    """The run: `remote`, from the bucket through a cache of half of the data."""
    data = Parquet(
        files=[f"{BUCKET}/*.parquet" if remote else f"{told.local}/*.parquet"],
        inputs="features",
        targets="label",
        shuffle_window=16 * FILE_SAMPLES,
        remote_cache_bytes=sum(path.stat().st_size for path in Path(told.local).iterdir()) // 2,
        remote_options=told.options,
    )
    return RunFile(
        run=RunConfig(name="bench", steps=ENDLESS),
        model=MLPConfig(inputs=FEATURES, hidden=(told.width,) * 3, outputs=CLASSES),
        data=data,
        batch=BatchConfig(global_samples=STEP_SAMPLES),
    )


def measure(told: Settings, place: Place) -> Result | None:
    """A row for each way, and the checks; None on all ranks but rank 0."""
    store = join_store(place)
    os.environ["SHOAL_CACHE"] = str(result_folder() / "cache")
    ways = {
        "Shoal, S3": lambda stack, own: _shoal(told, place, stack, own, remote=True),
        "DataLoader, S3": lambda stack, own: _peer(told, place, stack, own),
        "Shoal, local files": lambda stack, own: _shoal(told, place, stack, own, remote=False),
        "Shoal, S3, again": lambda stack, own: _shoal(told, place, stack, own, remote=True),
    }
    rows = []
    for number, (name, open_way) in enumerate(ways.items()):
        print(f"{name}, {told.samples // STEP_SAMPLES} steps", file=sys.stderr, flush=True)
        os.environ["SHOAL_CACHE"] = str(result_folder() / f"cache-{number}")
        with ExitStack() as stack:
            begin_s = time.perf_counter()
            batches, step = open_way(stack, PrefixStore(f"way-{number}", store))
            open_s = time.perf_counter() - begin_s
            mine = _trained(batches, step)
        clock = join_group(f"clock-{number}", place, store)
        rows.append({"way": name, **_row(mine, clock, told, open_s=open_s)})
    if place.rank != 0:
        return None
    checks = []
    for row in rows:
        if row["way"].startswith("Shoal, S3"):
            checks.append(check(f"waiting for data, {row['way']}", row["waiting"], WAITING, at_most=True))
            lost = row["lost"] + row["repeated"]
            checks.append(check(f"samples lost or repeated, {row['way']}", lost, 0, at_most=True))
    return {"rows": rows, "checks": checks}


Step = Callable[[list[Batch]], StepResult]
Batches = Iterator[list[Batch]]


def _shoal(told: Settings, place: Place, stack: ExitStack, store: Any, *, remote: bool) -> tuple[Batches, Step]:
    training = start_training(run_file(told, remote=remote), place, stack, store=store)

    def batches() -> Batches:
        for _ in range(told.samples // STEP_SAMPLES):
            yield training.feed.next().microbatches

    return batches(), lambda batch: training.run.step(next(training.numbers), batch, lr=1e-4)


def _peer(told: Settings, place: Place, stack: ExitStack, store: Any) -> tuple[Batches, Step]:
    training = start_training(run_file(told, remote=False), place, stack, store=store)
    training.feed.close()
    data = PlainFiles(told.options, told.files, place.rank, place.world_size)
    loader = DataLoader(
        data, batch_size=STEP_SAMPLES // place.world_size, num_workers=1, multiprocessing_context="spawn"
    )

    def batches() -> Batches:
        for features, labels in loader:
            yield [Batch(features, labels, torch.ones(len(labels)), torch.arange(len(labels)))]

    return batches(), lambda batch: training.run.step(next(training.numbers), batch, lr=1e-4)


class PlainFiles(IterableDataset[tuple[Tensor, int]]):
    """The samples of every `ranks`-th file of the bucket, file by file in a drawn order, shuffled within each."""

    def __init__(self, options: dict[str, Any], files: int, rank: int, ranks: int) -> None:
        self.options, self.files, self.rank, self.ranks = options, files, rank, ranks

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        import pyarrow.parquet as parquet
        from pyarrow import BufferReader

        draws = np.random.default_rng(0)
        for file in draws.permutation(self.files)[self.rank :: self.ranks]:
            table = parquet.read_table(BufferReader(self._fetched(f"{BUCKET}/{file:04d}.parquet")))
            flat = table["features"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            features, labels = torch.from_numpy(flat.reshape(-1, FEATURES).copy()), table["label"].to_pylist()
            for row in draws.permutation(len(labels)):
                yield features[row], labels[row]

    def _fetched(self, name: str) -> bytes:
        import fsspec

        store = fsspec.filesystem("s3", **self.options)
        for attempt in range(ATTEMPTS):
            try:
                return store.cat_file(name)
            except OSError:
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        raise OSError(f"{name}: {ATTEMPTS} attempts failed")


def _trained(batches: Batches, step: Step) -> dict[str, list[float]]:
    """Seconds that each step waited and took, and the numbers of the samples that were trained on."""
    found: dict[str, list[float]] = {"wait_s": [], "step_s": [], "numbers": []}
    begin_s = time.perf_counter()
    for batch in batches:
        got_s = time.perf_counter()
        for part in batch:
            assert isinstance(part.inputs, Tensor)
            found["numbers"] += (part.inputs[:, 0].double() * NUMBERS).round().tolist()
        step(batch)
        end_s = time.perf_counter()
        found["wait_s"].append(got_s - begin_s)
        found["step_s"].append(end_s - begin_s)
        begin_s = end_s
    return found


def _row(mine: dict[str, list[float]], clock: Any, told: Settings, *, open_s: float) -> dict[str, Any]:
    """Over all ranks; the share is of the steps after the first, of the rank that waits most."""
    waited, took = sum(mine["wait_s"][1:]), sum(mine["step_s"][1:])
    median_s = statistics.median(mine["step_s"][1:])
    figures = gathered(clock, [waited / took, open_s, mine["wait_s"][0], median_s])
    numbers = [int(number) for part in gathered(clock, mine["numbers"]) for number in part]
    counts = np.bincount(numbers, minlength=told.samples)
    return {
        "steps": len(mine["step_s"]),
        "open_s": round(max(row[1] for row in figures), 2),
        "first_wait_s": round(max(row[2] for row in figures), 3),
        "step_ms": round(1e3 * max(row[3] for row in figures), 1),
        "waiting": round(max(row[0] for row in figures), 4),
        "longest_wait_ms": round(1e3 * max(max(part) for part in gathered(clock, [max(mine["wait_s"][1:])])), 1),
        "lost": int((counts == 0).sum()),
        "repeated": int(np.maximum(counts - 1, 0).sum()),
    }


if __name__ == "__main__":
    run(remote_feed)
