"""TensorBoard, MLflow and Weights & Biases get what the events get; one that fails costs a warning, and no step."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.sink import Ending, RunStart, Sink
from shoal.observe.trackers import EXPERIMENT, FOLDER, Background, mlflow_sink, tensorboard_sink, wandb_sink
from tests.waiting import HANG_S, wait_until

RUN = RunStart(name="own", total_steps=3)
STEPS = {
    1: {"loss/train": 3.0, "lr": 0.5},
    2: {"loss/train": math.nan, "lr": 0.25},
    3: {"loss/train": 1.0, "lr": 0.125},
}


def train(sink: Sink, run: RunStart = RUN) -> None:
    """Three steps, the second not finite."""
    sink.start(run)
    for step, values in STEPS.items():
        sink.record(step, values, time_s=1e9 + step)
    sink.finish(Ending("finished"))


class Broken(Sink):
    """Raises on the step `at`; hears, and waits for `gate` first."""

    def __init__(self, at: int = 0, gate: threading.Event | None = None) -> None:
        self.at, self.gate = at, gate
        self.heard: list[int] = []

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        if self.gate is not None:
            self.gate.wait(HANG_S)
        self.heard.append(step)
        if step == self.at:
            raise ConnectionError("the server\nis down")


def test_a_failure_is_one_warning_and_the_run_goes_on() -> None:
    """Whether the sink cannot be opened or breaks in a step: one sentence, on the thread that trains."""

    def refuse() -> Sink:
        raise OSError("no such server")

    for opened, cause in (
        (refuse, "OSError: no such server"),
        (lambda: Broken(2), "ConnectionError: the server is down"),
    ):
        told: list[tuple[str, int]] = []
        sink = Background(
            opened, name="MLflow", warn=lambda text, told=told: told.append((text, threading.get_ident()))
        )
        train(sink)
        ((text, thread),) = told
        assert text == f"MLflow failed ({cause}): training goes on without it; the events have every step"
        assert thread == threading.get_ident()


def test_a_slow_sink_holds_nobody_up() -> None:
    """A sink that stands still: steps beyond the queue are left out with one warning, the end waits as long as said."""
    told: list[str] = []
    gate = threading.Event()
    slow = Broken(gate=gate)
    sink = Background(lambda: slow, name="W", warn=told.append, queued=4, finish_s=0.05)
    sink.start(RUN)
    for step in range(100):
        sink.record(step, {}, time_s=0.0)
    assert told == ["W takes in steps more slowly than the run makes them: some are missing there"]
    assert slow.heard == []
    sink.finish(Ending("finished"))
    assert told[1:] == ["W has not taken in the last steps after 0.05 s: they are missing there"]
    gate.set()


def test_tensorboard_has_every_scalar(tmp_path: Path) -> None:
    """The event file holds each measurement under its own name, with its step and time, and what the host uses."""
    pytest.importorskip("tensorboardX", reason="pip install 'shoal[tensorboard]'")
    train(tensorboard_sink(tmp_path, warn=pytest.fail))
    every = scalars(tmp_path / FOLDER)
    assert {"host/memory_bytes", "host/memory_available_bytes"} <= {name for name, *_ in every}
    found = [one for one in every if not one[0].startswith("host/")]
    assert {(name, step): value for name, step, value, _ in found if not math.isnan(value)} == {
        (name, step): value for step, values in STEPS.items() for name, value in values.items() if value == value
    }
    assert [time_s for name, _, _, time_s in found if name == "lr"] == [1e9 + 1, 1e9 + 2, 1e9 + 3]


def test_a_step_of_tensorboard_is_one_event(tmp_path: Path) -> None:
    """All values of a step go into one event: an event for each took seven times as long."""
    pytest.importorskip("tensorboardX", reason="pip install 'shoal[tensorboard]'")
    train(tensorboard_sink(tmp_path, warn=pytest.fail))
    assert [event.step for event in events(tmp_path / FOLDER) if event.summary.value] == [1, 2, 3]


def test_tensorboard_drops_the_steps_that_a_resumed_run_computes_again(tmp_path: Path) -> None:
    """The second start's file says that what the first wrote from its first step on does not count."""
    pytest.importorskip("tensorboardX", reason="pip install 'shoal[tensorboard]'")
    from tensorboardX.proto.event_pb2 import SessionLog

    train(tensorboard_sink(tmp_path, warn=pytest.fail), replace(RUN, first_step=3))
    begun = [event.step for event in events(tmp_path / FOLDER) if event.session_log.status == SessionLog.START]
    assert begun == [3]


def scalars(folder: Path) -> list[tuple[str, int, float, float]]:
    """(name, step, value, time) of every scalar in TensorBoard's files."""
    return [
        (value.tag, event.step, value.simple_value, event.wall_time)
        for event in events(folder)
        for value in event.summary.value
    ]


def events(folder: Path) -> list[Any]:
    """Every event of TensorBoard's files, each of which is a length, a checksum, the event, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in folder.glob("events.out.*"):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += length + 16
    return found


@pytest.mark.slow
def test_mlflow_has_every_finite_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is finished and has each metric's history; what is not finite is left out."""
    pytest.importorskip("mlflow", reason="pip install 'shoal[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    address = (tmp_path / "mlruns").as_uri()
    train(mlflow_sink(address, tmp_path, warn=pytest.fail))
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("own", "FINISHED")
    losses = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 3.0), (3, 1.0)]


def test_a_run_of_mlflow_that_goes_on_is_a_child_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both later starts name the first as their parent; at another server, which has no first, a run starts anew."""
    pytest.importorskip("mlflow", reason="pip install 'shoal[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    def starts(server: str) -> list[tuple[str, str | None]]:
        client = MlflowClient(tracking_uri=(tmp_path / server).as_uri())
        experiment = client.get_experiment_by_name(EXPERIMENT)
        assert experiment is not None
        found = client.search_runs([experiment.experiment_id])
        return [(run.info.run_id, run.data.tags.get("mlflow.parentRunId")) for run in found]

    for generation in range(3):
        run = RunStart(name="own", total_steps=3, generation=generation)
        train(mlflow_sink((tmp_path / "one").as_uri(), tmp_path, warn=pytest.fail), run)
    (first,) = [identity for identity, parent in starts("one") if parent is None]
    assert sorted(parent or "" for _, parent in starts("one")) == sorted(["", first, first])
    train(mlflow_sink((tmp_path / "two").as_uri(), tmp_path, warn=pytest.fail), run)
    assert [parent for _, parent in starts("two")] == [None]


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, every record is in the run's file, and nothing is asked of a network."""
    pytest.importorskip("wandb", reason="pip install 'shoal[wandb]'")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    train(wandb_sink(tmp_path, mode="offline", warn=pytest.fail))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    wait_until(lambda: len(wandb_history(file)) >= 3)  # a process of wandb's own writes the file
    assert wandb_history(file) == [(1, "0.5"), (2, "0.25"), (3, "0.125")]


def wandb_history(file: Path) -> list[tuple[int, str]]:
    """(step, learning rate as JSON) of each record in a file of Weights & Biases, which is a LevelDB log of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, pieces = file.read_bytes(), 7, b""
    found = []
    while at + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, at)
        pieces += content[at + 7 : at + 7 + length]
        at += 7 + length
        if 2**15 - at % 2**15 < 7:  # a header never lies across two blocks
            at += 2**15 - at % 2**15
        if kind in (1, 4):  # the record is whole
            record: Any = Record.FromString(pieces)
            pieces = b""
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "lr" in items:
                found.append((int(float(items["step"])), items["lr"]))
    return found
