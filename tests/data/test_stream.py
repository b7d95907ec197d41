"""Streams are read as they grow; a run resumes from its cursor, and a socket's lines are kept and asked for again."""

import json
import socket
import threading
from pathlib import Path

import pytest

from shoal.data.cursor import Cursor
from shoal.data.dataset import Dataset
from shoal.data.feed import Feed, StepShare
from shoal.data.stream import GrowingFile
from shoal.errors import DataError
from tests.data.sources import built
from tests.waiting import HANG_S


def line(i: int, pad: int = 0) -> str:
    return json.dumps({"x": [i], "y": i % 3, "pad": "p" * pad}) + "\n"


def table(path: Path, **more) -> dict:
    return {"kind": "stream", "path": str(path), "inputs": "x", "targets": "y", "patience_s": HANG_S} | more


def fed(dataset: Dataset, cursor: Cursor, *, ranks: int, steps: int, readers: int = 2) -> tuple[Cursor, list[int]]:
    """`steps` committed steps of 4 samples, and one that is killed."""
    order, used = dataset.order(0, shuffle=True), []
    feeds = [
        Feed(
            dataset.train, order, StepShare(4, rank, ranks), start=cursor, readers=readers, prefetch_steps=1
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for _ in range(steps):
        batches = [batch for feed in feeds for batch in feed.next().microbatches]
        used += [int(i) for batch in batches for i in batch.inputs[:, 0]]  # type: ignore[index]
        cursor, _ = cursor.take(4)
    for feed in feeds:
        feed.close()
    return Cursor.from_state(cursor.to_state()), used


def test_a_growing_file_is_followed_in_its_order(tmp_path: Path):
    """Lines that come while ranks wait, one of them in two halves, are taken once, over restarts with other ranks."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(line(i, pad=3000 * (i % 4)) for i in range(30)))
    dataset = built(table(path), tmp_path / "cache")
    assert dataset.endless
    cursor, first = fed(dataset, Cursor(), ranks=2, steps=5)

    def append() -> None:
        with path.open("a") as file:
            for i in range(30, 300):
                half = len(line(i)) // 2
                for part in (line(i)[:half], line(i)[half:]):
                    file.write(part)
                    file.flush()

    writer = threading.Thread(target=append)
    writer.start()
    cursor, second = fed(built(table(path), tmp_path / "cache"), cursor, ranks=3, steps=40)
    writer.join()
    _, third = fed(built(table(path), tmp_path / "cache"), cursor, ranks=1, steps=10, readers=4)
    assert first + second + third == list(range(220))


def test_a_silent_or_shortened_stream_ends_the_run(tmp_path: Path):
    """No new line within `patience_s`, and a file that lost bytes, are said."""
    path = tmp_path / "log.jsonl"
    path.write_text(line(0) + line(1) + line(2)[:5])
    train = built(table(path, patience_s=0.1), tmp_path / "cache").train
    assert train[1]["inputs"].tolist() == [1]
    with pytest.raises(DataError, match=r"log\.jsonl has 2 lines, and none came for 0\.1 s"):
        train[2]
    path.write_text(line(0))
    with pytest.raises(DataError, match="a stream's file only grows"):
        train[2]


def test_a_bad_line_of_a_stream(tmp_path: Path):
    """It is named with its number, or left out where the run file says so."""
    path = tmp_path / "log.jsonl"
    path.write_text(line(0) + "nonsense\n" + line(2))
    with pytest.raises(DataError, match=r"log\.jsonl, line 1: .*'nonsense' is no JSON"):
        built(table(path), tmp_path / "cache").train[1]
    skipping = built(table(path, bad_records="skip"), tmp_path / "cache")
    with Feed(skipping.train, skipping.order(0, shuffle=True), StepShare(3)) as feed:
        assert feed.next().microbatches[0].weights.tolist() == [1, 0, 1]


class Sender:
    """Sends lines from where it is asked to; breaks the connection after each 25, in the middle of a line."""

    def __init__(self, lines: int) -> None:
        self.asked: list[int] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve, args=(lines,), daemon=True)
        self.thread.start()

    def _serve(self, lines: int) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            with connection:
                start = json.loads(connection.makefile().readline())["from"]
                self.asked.append(start)
                text = "".join(line(i) for i in range(start, min(start + 25, lines)))
                connection.sendall((text + line(start + 25)[:7]).encode())


def test_a_socket_is_asked_for_what_is_missing(tmp_path: Path):
    """Over broken connections each line arrives once and in order, whichever rank receives them; a run that starts
    again reads what was kept, and asks for the rest."""
    sender = Sender(200)
    path = tmp_path / "kept.jsonl"
    config = table(path, socket=sender.address)
    cursor, first = fed(built(config, tmp_path / "cache"), Cursor(), ranks=2, steps=10)
    with path.open("a") as file:
        file.write('{"x": [')  # what a crash leaves
    _, second = fed(built(config, tmp_path / "cache"), cursor, ranks=1, steps=8)
    assert first + second == list(range(72))
    assert sender.asked[0] == 0
    assert all(start % 25 == 0 for start in sender.asked)
    sender.server.close()


def test_a_torn_line_may_be_cut_off_and_replaced(tmp_path: Path):
    """A reader has seen half a line; the receiver that starts again cuts it off and writes others: none is lost."""
    path = tmp_path / "kept.jsonl"
    path.write_text(line(0) + '{"x": [')
    lines = GrowingFile(path, patience_s=0.05)
    assert lines.line(0).decode() + "\n" == line(0)
    with pytest.raises(DataError, match="none came"):
        lines.line(1)
    path.write_text(line(0) + "\n" + line(2))  # an empty line stands where the torn one began
    assert lines.line(1) == b""
    assert lines.line(2).decode() + "\n" == line(2)
    path.write_text("")
    with pytest.raises(DataError, match="only grows"):
        lines.line(3)
