"""Files behind URLs: nothing is lost or repeated when requests fail, the cache stays bounded, changes are noticed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from shoal.data.remote import RemoteStore
from shoal.data.shard_files import locked
from shoal.errors import ConfigError, DataError, EnvironmentFault
from tests.data.sources import PARTS, SAMPLES, built, written
from tests.data.test_sources import interrupted
from tests.waiting import HANG_S

FAILING_EVERY = 20
"""One request in so many fails: 5 %."""


class UnreliableServer:
    """Serves a folder over HTTP with ranges; every 20th request fails: with status 500, with a reset connection, or
    with half of the bytes."""

    def __init__(self, folder: Path, *, failing_every: int = FAILING_EVERY, delay_s: float = 0.0) -> None:
        self.requests, self.failed = 0, 0
        lock, pause = threading.Lock(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                pause.wait(delay_s)
                with lock:
                    outer.requests += 1
                    fails = outer.requests % failing_every == 0
                    outer.failed += fails
                    how = outer.failed % 3 if fails else None
                path = folder / self.path.lstrip("/")
                if how == 0:
                    self.send_error(500)
                    return
                if how == 1:
                    self.connection.close()
                    return
                if not path.is_file():
                    self.send_error(404)
                    return
                content = path.read_bytes()
                start, stop = 0, len(content)
                wanted = self.headers.get("Range")
                if wanted is not None:
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, stop = int(first), min(stop, int(last) + 1 if last else stop)
                self.send_response(200 if wanted is None else 206)
                self.send_header("Content-Length", str(stop - start))
                self.send_header("Accept-Ranges", "bytes")
                if wanted is not None:
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
                self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
                self.end_headers()
                if body:
                    self.wfile.write(content[start : (start + stop) // 2 if how == 2 else stop])
                    self.close_connection = how == 2

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def memory() -> Iterator:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def put(files, folder: Path, table: dict) -> dict:
    """The table's files in the memory file system, and the table that reads them from there."""
    for path in folder.iterdir():
        files.pipe_file(f"/set/{path.name}", path.read_bytes())
    return table | {"files": ["memory://set/*"]}


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "webdataset"])
def test_a_cache_smaller_than_the_data_loses_nothing(kind: str, tmp_path: Path, memory):
    """Through a cache that holds one file of three, over ranks, readers and restarts: each sample once, in order; and
    the cache never holds more than it may."""
    table = put(memory, tmp_path / "data", written(kind, tmp_path / "data"))
    sizes = sorted(path.stat().st_size for path in (tmp_path / "data").iterdir())
    dataset = built(table | {"remote_cache_bytes": sizes[-1] + 10, "cache_bytes": 1}, tmp_path / "cache")
    used = interrupted(dataset, kind, window=48)
    assert used == dataset.order(11, shuffle=True, window=48).ids(np.arange(len(used))).tolist()
    assert sorted(used[:SAMPLES]) == list(range(SAMPLES))
    kept = [path for path in (tmp_path / "cache" / "remote").iterdir() if not path.name.startswith(".")]
    assert sum(path.stat().st_size for path in kept) <= sizes[-1] + 10
    assert not [
        path for path in (tmp_path / "cache" / "remote").iterdir() if path.suffix != ".lock" and path not in kept
    ]


def test_what_is_in_the_cache_is_not_fetched_again(tmp_path: Path, memory):
    """A second opening reads indexes and files from the cache; an edited file is another file."""
    table = put(memory, tmp_path / "data", written("jsonl", tmp_path / "data"))
    first = built(table, tmp_path / "cache").train
    wanted = [first[i]["targets"] for i in range(SAMPLES)]
    fetched = {path.name: path.stat().st_ino for path in (tmp_path / "cache" / "remote").glob("[!.]*")}
    assert len(fetched) == len(PARTS)
    again = built(table, tmp_path / "cache").train
    assert [again[i]["targets"] for i in range(SAMPLES)] == wanted
    assert {path.name: path.stat().st_ino for path in (tmp_path / "cache" / "remote").glob("[!.]*")} == fetched
    memory.pipe_file("/set/1.jsonl", b'{"x": [99, 99], "y": 3}\n')
    edited = built(table | {"cache_bytes": 1}, tmp_path / "cache").train
    assert edited[17]["inputs"].tolist() == [99, 99]
    memory.pipe_file("/set/1.jsonl", b'{"x": [98, 98], "y": 3}\n' * 2)
    for path in (tmp_path / "cache" / "remote").glob("[!.]*"):
        path.unlink()
    assert edited[0]["inputs"].tolist() == [0, 0]  # drops the other block from memory
    with pytest.raises(EnvironmentFault, match="has changed since the run listed it"):
        edited[17]


def test_what_cannot_be_is_refused(tmp_path: Path, memory):
    """Nothing there, an unknown protocol, a file larger than the cache: a sentence each."""

    def store(limit_bytes: int = 2**20, **options) -> RemoteStore:
        return RemoteStore(tmp_path / "cache", limit_bytes=limit_bytes, sleep=lambda _: None, **options)

    memory.pipe_file("/set/a", b"x" * 100)
    with pytest.raises(DataError, match="nothing matches it"):
        store().listed(["memory://set/*.tar"], key="data.files")
    with pytest.raises(DataError, match="is not there"):
        store().listed(["memory://set/b"], key="data.files")
    with pytest.raises(ConfigError, match="Correct the protocol"):
        store().listed(["nowhere://x"], key="data.files")
    with pytest.raises(DataError, match=r"has 100 bytes and data\.remote_cache_bytes is 50"):
        store(50).listed(["memory://set/a"], key="data.files")


def test_pauses_grow_and_end(tmp_path: Path, memory, monkeypatch: pytest.MonkeyPatch):
    """A store that fails is asked again after pauses that double up to a bound; then the run stops with the cause."""
    memory.pipe_file("/set/a", b"x" * 100)
    pauses: list[float] = []
    store = RemoteStore(tmp_path / "cache", limit_bytes=2**20, attempts=10, sleep=pauses.append)
    (file,) = store.listed(["memory://set/a"], key="data.files")

    def fails(*_: object, **__: object) -> bytes:
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(memory), "cat_file", fails)
    with pytest.raises(EnvironmentFault, match=r"memory://.*set/a: 10 attempts failed, the last with TimeoutError"):
        store.path(file)
    assert len(pauses) == 9
    for number, pause_s in enumerate(pauses):
        assert 0.5 <= pause_s / min(10.0, 0.1 * 2**number) <= 1.0
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


@pytest.mark.slow
def test_a_server_that_fails_loses_nothing(tmp_path: Path):
    """Over HTTP, with 5 % of the requests failing (refused, reset, cut short) and a cache of four files of twenty-one:
    each sample once, in order."""
    pytest.importorskip("aiohttp")
    (tmp_path / "data").mkdir()
    for first in range(0, SAMPLES, 3):
        lines = [json.dumps({"x": [i, i], "y": 0}) for i in range(first, min(first + 3, SAMPLES))]
        (tmp_path / "data" / f"{first:02d}.jsonl").write_text("\n".join(lines))
    server = UnreliableServer(tmp_path / "data")
    try:
        files = sorted(f"{server.url}/{path.name}" for path in (tmp_path / "data").iterdir())
        table = {"kind": "jsonl", "files": files, "inputs": "x", "targets": "y"}
        dataset = built(table | {"remote_cache_bytes": 300, "cache_bytes": 1}, tmp_path / "cache")
        used = interrupted(dataset, "jsonl")
        assert used == dataset.order(11, shuffle=True).ids(np.arange(len(used))).tolist()
        assert sorted(used[:SAMPLES]) == list(range(SAMPLES))
        assert server.failed >= 10
    finally:
        server.close()


@pytest.mark.slow
def test_s3_through_a_real_server(tmp_path: Path):
    """The same from a bucket of an S3 server on this machine, by a glob."""
    pytest.importorskip("s3fs")
    servers = pytest.importorskip("moto.server")
    import fsspec

    server = servers.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"endpoint_url": f"http://{host}:{port}", "key": "test", "secret": "test"}
        bucket = fsspec.filesystem("s3", **options)
        bucket.mkdir("set")
        table = written("parquet", tmp_path / "data")
        for path in (tmp_path / "data").iterdir():
            bucket.pipe_file(f"set/{path.name}", path.read_bytes())
        table |= {"files": ["s3://set/*.parquet"], "remote_options": options}
        dataset = built(table, tmp_path / "cache")
        used = interrupted(dataset, "parquet")
        assert used == dataset.order(11, shuffle=True).ids(np.arange(len(used))).tolist()
    finally:
        server.stop()


@pytest.mark.slow
def test_an_s3_object_that_changes_is_noticed(tmp_path: Path):
    """Also where a listing showed it as it was, and where it has as many bytes as before."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    import fsspec

    from tests.checkpoint.s3_server import s3_server

    with s3_server() as server:
        options = server.options | {"skip_instance_cache": False}
        bucket = fsspec.filesystem("s3", **options, use_listings_cache=False)
        bucket.pipe_file("copies/set/a", b"x" * 100)
        store = RemoteStore(tmp_path / "cache", limit_bytes=2**20, attempts=2, options=options)
        (file,) = store.listed(["s3://copies/set/*"], key="data.files")
        bucket.pipe_file("copies/set/a", b"y" * 100)
        with pytest.raises(EnvironmentFault, match="has changed since the run listed it"):
            store.path(file)


def test_parts_come_together_whatever_their_order(tmp_path: Path, memory, monkeypatch: pytest.MonkeyPatch):
    """A file of several parts, the first of which is the last to come: every byte in its place."""
    monkeypatch.setattr("shoal.data.remote.PART_BYTES", 10)
    content = bytes(range(95))
    memory.pipe_file("/set/a", content)
    store = RemoteStore(tmp_path / "cache", limit_bytes=2**20)
    (file,) = store.listed(["memory://set/a"], key="data.files")
    others, cat_file = threading.Event(), type(memory).cat_file

    def late(files, path, start=None, end=None, **more):
        if start == 0:
            assert others.wait(HANG_S)
        others.set() if start == 90 else None
        return cat_file(files, path, start=start, end=end, **more)

    monkeypatch.setattr(type(memory), "cat_file", late)
    assert store.path(file).read_bytes() == content


def test_what_a_killed_process_left_half_fetched_goes(tmp_path: Path, memory):
    """The next one to fetch the file deletes it: nothing else would, and the cache counts it not."""
    memory.pipe_file("/set/a", b"x" * 100)
    store = RemoteStore(tmp_path / "cache", limit_bytes=2**20)
    (file,) = store.listed(["memory://set/a"], key="data.files")
    left = tmp_path / "cache" / f".{file.fingerprint}-k1ll3d"
    left.parent.mkdir()
    left.write_bytes(b"x" * 50)
    kept = store.path(file)
    assert sorted(path.name for path in left.parent.glob("[!.]*")) == [kept.name]
    assert not left.exists()


def test_fetching_ahead_does_not_wait_for_another_process(tmp_path: Path, memory):
    """A file that somebody else fetches is left to him; one that nobody does is there afterwards."""
    memory.pipe_file("/set/a", b"x" * 100)
    store = RemoteStore(tmp_path / "cache", limit_bytes=2**20)
    (file,) = store.listed(["memory://set/a"], key="data.files")
    (tmp_path / "cache").mkdir()
    with locked(tmp_path / "cache" / f".{file.fingerprint}.lock"):
        store.fetch_ahead(file)
        assert not list((tmp_path / "cache").glob("[!.]*"))
    store.fetch_ahead(file)
    assert len(list((tmp_path / "cache").glob("[!.]*"))) == 1
