"""Sinks of other tools (TensorBoard, MLflow, W&B), each fed by a thread of its own."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Literal

from shoal.errors import MissingExtra
from shoal.observe.facts import replace_file
from shoal.observe.host_usage import WithHostFigures
from shoal.observe.sink import Ending, RunStart, Sink

# A sink that works in a thread of its own, so that a slow disk or a dead server costs the training loop nothing.
#
# The training loop puts calls into a queue, which takes microseconds. When the sink raises, one warning says so, and
# it hears nothing more. When it is slower than the run, steps that find the queue full are left out, and one warning
# says so.


QUEUED = 10_000
FINISH_S = 20.0
"""The longest that the end of a run waits for what is still queued."""


class Background(Sink):
    """Passes the calls on to the sink that `open_sink` makes in the thread.

    `name` is what it is called in warnings. The thread starts with the run, and does not keep the process alive.
    """

    def __init__(
        self,
        open_sink: Callable[[], Sink],
        *,
        name: str,
        warn: Callable[[str], None],
        queued: int = QUEUED,
        finish_s: float = FINISH_S,
    ) -> None:
        self._open, self._name, self._warn, self._finish_s = open_sink, name, warn, finish_s
        self._calls: Queue[Callable[[Sink], None] | None] = Queue(queued)
        self._failure: Exception | None = None
        self._told = self._overflowed = False
        self._thread = threading.Thread(target=self._work, name=f"shoal-{name}", daemon=True)

    def start(self, run: RunStart) -> None:
        self._thread.start()
        self._put(lambda sink: sink.start(run))

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        self._put(lambda sink: sink.record(step, values, time_s=time_s))

    def warn(self, text: str) -> None:
        """Not passed on: the sink's own failures are said here, and would come back."""

    def finish(self, ending: Ending) -> None:
        """Waits until the sink has heard all, at most `finish_s`."""
        if not self._thread.is_alive() and not self._thread.ident:
            return
        self._put(lambda sink: sink.finish(ending), must=True)
        self._put(None, must=True)
        self._thread.join(self._finish_s)
        if self._thread.is_alive():
            self._say(
                f"{self._name} has not taken in the last steps after {self._finish_s:g} s: they are missing there"
            )
        self._tell()

    def _put(self, call: Callable[[Sink], None] | None, *, must: bool = False) -> None:
        self._tell()
        if self._failure is not None:
            return
        try:
            if must:
                self._calls.put(call, timeout=self._finish_s)
            else:
                self._calls.put_nowait(call)
        except Full:
            if not self._overflowed:
                self._overflowed = True
                self._say(f"{self._name} takes in steps more slowly than the run makes them: some are missing there")

    def _tell(self) -> None:
        """Says on the training thread what failed in the other one."""
        if self._failure is not None and not self._told:
            self._told = True
            self._say(f"{self._name} failed ({type(self._failure).__name__}: {self._failure}): "
                      "training goes on without it; the events have every step")  # fmt: skip

    def _say(self, text: str) -> None:
        self._warn(" ".join(text.split())[:600])

    def _work(self) -> None:
        try:
            sink = self._open()
            while (call := self._calls.get()) is not None:
                call(sink)
        except Exception as fault:
            self._failure = fault
            while True:
                try:
                    self._calls.get_nowait()
                except Empty:
                    return


# TensorBoard: every measurement as a scalar, in `tensorboard/` of the run directory (package tensorboardX).


FOLDER = "tensorboard"


def tensorboard_sink(run_directory: Path, *, warn: Callable[[str], None]) -> Sink:
    """The sink, in a thread of its own. Raises `MissingExtra` without tensorboardX."""
    if find_spec("tensorboardX") is None:
        raise MissingExtra("tensorboardX", extra="tensorboard", purpose="observe.tensorboard = true")
    return Background(
        lambda: WithHostFigures(TensorBoardSink(run_directory / FOLDER), run_directory), name="TensorBoard", warn=warn
    )


class TensorBoardSink(Sink):
    """Writes event files, one event a step with all of its values: a tenth of the time of an event for each value.

    A run that resumes tells TensorBoard to drop the steps that it computes again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._tags: dict[str, str] = {}

    def start(self, run: RunStart) -> None:
        from tensorboardX import SummaryWriter

        purge_step = None if run.resumed_from is None else run.first_step
        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        scalars = [Summary.Value(tag=self._tag(name), simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=scalars), step, time_s)

    def finish(self, ending: Ending) -> None:
        self._writer.close()

    def _tag(self, name: str) -> str:
        """The name in the letters that TensorBoard takes."""
        if name not in self._tags:
            self._tags[name] = re.sub(r"[^-/\w.]", "_", name).lstrip("/")
        return self._tags[name]


# MLflow: a run of the experiment "shoal" whose metrics are the measurements (package mlflow-skinny).


EXPERIMENT = "shoal"
FIRST_RUN = "mlflow-run"
_PARENT = "mlflow.parentRunId"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


def mlflow_sink(tracking_uri: str, run_directory: Path, *, warn: Callable[[str], None]) -> Sink:
    """The sink, in a thread of its own; the run directory keeps the id of the first start. Raises `MissingExtra`."""
    if find_spec("mlflow") is None:
        raise MissingExtra("mlflow-skinny", extra="mlflow", purpose="observe.mlflow")
    return Background(
        lambda: WithHostFigures(MlflowSink(tracking_uri, run_directory), run_directory), name="MLflow", warn=warn
    )


class MlflowSink(Sink):
    """Logs to a tracking server. MLflow has no NaN: values that are not finite are left out."""

    def __init__(self, tracking_uri: str, run_directory: Path) -> None:
        from mlflow.tracking import MlflowClient

        self._first = run_directory / FIRST_RUN
        self._client: Any = MlflowClient(tracking_uri=tracking_uri)
        self._run_id = ""

    def start(self, run: RunStart) -> None:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = self._client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        tags = {"shoal.generation": str(run.generation), "shoal.total_steps": str(run.total_steps)}
        # A run that goes on is a child of its first start, as MLflow's pages group runs.
        first = self._read_first() if run.generation else None
        if first is not None:
            tags[_PARENT] = first
        self._run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        if first is None:
            replace_file(self._first, self._run_id.encode())

    def _read_first(self) -> str | None:
        """The id of the run's first start, where this server still has it."""
        from mlflow.exceptions import MlflowException

        try:
            identity = self._first.read_text(encoding="utf-8").strip()
            return self._client.get_run(identity).info.run_id
        except (OSError, UnicodeDecodeError, MlflowException):
            return None

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        from mlflow.entities import Metric

        at_ms = int(time_s * 1000)
        metrics = [Metric(name, value, at_ms, step) for name, value in values.items() if math.isfinite(value)]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        if ending.cause:
            self._client.set_tag(self._run_id, "shoal.cause", ending.cause[:500])
        self._client.set_terminated(self._run_id, status=_STATUS.get(ending.state, "FAILED"))


# Weights & Biases: a run of the project "shoal" (package wandb). Offline, it is files for `wandb sync`.


PROJECT = "shoal"


def wandb_sink(run_directory: Path, *, mode: Literal["offline", "online"], warn: Callable[[str], None]) -> Sink:
    """The sink, in a thread of its own. Raises `MissingExtra` without wandb."""
    if find_spec("wandb") is None:
        raise MissingExtra("wandb", extra="wandb", purpose=f'observe.wandb = "{mode}"')
    return Background(
        lambda: WithHostFigures(WandbSink(run_directory, mode=mode), run_directory), name="Weights & Biases", warn=warn
    )


class WandbSink(Sink):
    """Logs every record under its step; a run that resumes is a run of its own in the same group."""

    def __init__(self, run_directory: Path, *, mode: Literal["offline", "online"]) -> None:
        self._directory = run_directory
        self._mode: Literal["offline", "online"] = mode
        self._run: Any = None

    def start(self, run: RunStart) -> None:
        import wandb

        # The run's output is in its logs; nothing about this machine is sent beside the measurements.
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True
        )
        self._run = wandb.init(
            project=PROJECT,
            name=run.name,
            group=run.name,
            dir=str(self._directory),
            mode=self._mode,
            config={"total_steps": run.total_steps, "first_step": run.first_step, "generation": run.generation},
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        self._run.log({**values, "step": step, "time": time_s})

    def finish(self, ending: Ending) -> None:
        self._run.finish(exit_code=ending.exit_code)
