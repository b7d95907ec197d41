"""MLflow: a run of the experiment "shoal" whose metrics are the measurements (package mlflow-skinny)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.errors import MissingExtra
from shoal.observe.background import Background
from shoal.observe.ending import Ending
from shoal.observe.facts import replace_file
from shoal.observe.host_figures import WithHostFigures
from shoal.observe.sink import RunStart, Sink

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
