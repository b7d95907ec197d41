"""A topic's messages become lines once each, whatever is killed between; brokers are librdkafka's own, over TCP."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path

import msgspec
import pytest

from shoal.data.cursor import Cursor
from shoal.data.receiver import KafkaTopic
from shoal.errors import ConfigError, DataError
from tests.data.sources import built
from tests.data.test_stream import fed

kafka = pytest.importorskip("confluent_kafka")

PARTITIONS = 4
"""Of every topic of the brokers."""
MOST_LOOKS = 60
"""Of half a second each, for messages that are all there."""


class Ended(Exception):
    """Ends a receiver that would go on for ever."""


class Cluster:
    """Two brokers. `send` appends messages to a topic."""

    def __init__(self) -> None:
        self._producer = kafka.Producer({"test.mock.num.brokers": 2, "bootstrap.servers": "none", "log_level": 0})
        brokers = self._producer.list_topics(timeout=30).brokers.values()
        self.servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)

    def send(self, topic: str, numbers: range) -> None:
        for i in numbers:
            value = json.dumps({"x": [i], "y": i % 3}, indent=1 if i % 2 else None)
            self._producer.produce(topic, value, partition=i % PARTITIONS)
        assert self._producer.flush(30) == 0


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return request.node.name


def received(cluster: Cluster, topic: str, path: Path, lines: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the file holds when a receiver has brought it to `lines`, and was ended there."""

    looks = itertools.count()

    def stop_there(consumer_messages):
        def consumed(self, module, consumer, wait_s):
            if path.read_bytes().count(b"\n") >= lines:
                raise Ended
            assert next(looks) < MOST_LOOKS, f"fewer than {lines} lines came"
            return consumer_messages(self, module, consumer, wait_s)

        return consumed

    with monkeypatch.context() as patched:
        patched.setattr(KafkaTopic, "_consumed", stop_there(KafkaTopic._consumed))
        with pytest.raises(Ended):
            KafkaTopic(cluster.servers, topic).receive(path)
    return [json.loads(line)["x"][0] for line in path.read_text().splitlines()]


def test_messages_of_all_partitions_arrive_once_over_restarts(
    cluster: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition in its order; a second receiver goes on where the first was ended."""
    path = tmp_path / "lines.jsonl"
    cluster.send(topic, range(100))
    first = received(cluster, topic, path, 100, monkeypatch)
    cluster.send(topic, range(100, 250))
    second = received(cluster, topic, path, 250, monkeypatch)
    assert second[:100] == first
    assert sorted(second) == list(range(250))
    for partition in range(PARTITIONS):
        assert [i for i in second if i % PARTITIONS == partition] == list(range(partition, 250, PARTITIONS))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.0, 0.4, 1.0])
def test_a_line_stays_the_line_that_it_was(
    cluster: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    """A crash between the journal and the end of what it announces: the same bytes are fetched again."""
    path, journal = tmp_path / "lines.jsonl", tmp_path / "lines.jsonl.offsets"
    name = topic.partition("[")[0] + str(int(kept * 10))
    cluster.send(name, range(120))
    received(cluster, name, path, 120, monkeypatch)
    whole = path.read_bytes()
    last = json.loads(journal.read_text().splitlines()[-1])
    with path.open("r+b") as file:
        file.truncate(last["start"] + int(kept * (last["stop"] - last["start"])))
    with journal.open("a") as file:
        file.write('{"start": 99')  # half an entry, whose bytes were never written
    cluster.send(name, range(120, 130))
    received(cluster, name, path, 130, monkeypatch)
    assert path.read_bytes().startswith(whole)
    assert path.read_bytes().count(b"\n") == 130
    assert json.loads(journal.read_text().splitlines()[-1])["stop"] == path.stat().st_size


@pytest.mark.slow
def test_a_run_trains_on_a_topic_and_resumes(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    """Samples come while ranks wait for them, are used once, and a run with other ranks goes on."""
    table = {
        "kind": "stream", "path": str(tmp_path / "lines.jsonl"), "kafka": cluster.servers, "topic": topic,
        "inputs": "x", "targets": "y", "patience_s": 60.0,
    }  # fmt: skip
    cluster.send(topic, range(40))
    cursor, first = fed(built(table, tmp_path / "cache"), Cursor(), ranks=2, steps=8)

    def more() -> None:
        for start in range(40, 100, 10):
            cluster.send(topic, range(start, start + 10))
            time.sleep(0.05)

    sender = threading.Thread(target=more)
    sender.start()
    _, second = fed(built(table, tmp_path / "cache"), cursor, ranks=3, steps=10)
    sender.join()
    lines = [json.loads(line)["x"][0] for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert first + second == lines[:72]
    assert len(set(lines)) == len(lines)


def test_what_cannot_be_read_is_said(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    """A topic that is not there, a property that is none, messages that are gone, a file of something else."""
    path = tmp_path / "lines.jsonl"
    with pytest.raises(ConfigError, match=r"data\.kafka_options: .*no\.such"):
        KafkaTopic(cluster.servers, topic, options={"no.such": "1"}).receive(path)
    with pytest.raises(ConfigError, match=r"data\.topic = 'absent': .*Unknown topic"):
        KafkaTopic(cluster.servers, "absent", options={"allow.auto.create.topics": "false"}).receive(path)
    cluster.send(topic, range(4))
    path.write_text("something else\n")
    with pytest.raises(DataError, match=r"lines and no lines\.jsonl\.offsets"):
        KafkaTopic(cluster.servers, topic).receive(path)
    path.write_bytes(b"")
    (tmp_path / "lines.jsonl.offsets").write_text('{"start": 0, "stop": 30, "ranges": [[0, 0, 900]]}\n')
    with pytest.raises(DataError, match="no longer holds the messages"):
        KafkaTopic(cluster.servers, topic).receive(path)
    (tmp_path / "lines.jsonl.offsets").write_text("[]\n")
    with pytest.raises(DataError, match="is damaged"):
        KafkaTopic(cluster.servers, topic).receive(path)


def test_a_fault_of_the_receiver_ends_the_run_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Not after the patience for lines that never come."""
    table = {
        "kind": "stream", "path": str(tmp_path / "lines.jsonl"), "kafka": cluster.servers, "topic": "gone",
        "kafka_options": {"no.such": "1"}, "inputs": "x", "targets": "y", "patience_s": 3600.0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"data\.kafka_options"):
        built(table, tmp_path / "cache").train[0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kafka": "host:9092"}, "give both, or none"),
        ({"kafka": "host:9092", "topic": "t", "socket": "host:1"}, "comes from one of them"),
        ({"kafka_options": {"a": "b"}}, "kafka_options without kafka"),
        ({"kafka": "host", "topic": "t"}, "kafka"),
    ],
)
def test_half_an_address_is_refused(tmp_path: Path, more: dict, words: str) -> None:
    """Before any broker is asked."""
    with pytest.raises(msgspec.ValidationError, match=words):
        built({"kind": "stream", "path": str(tmp_path / "a"), "inputs": "x", "targets": "y"} | more, tmp_path)
