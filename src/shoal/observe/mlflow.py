"""MLflow: a run of the experiment "shoal" whose metrics are the measurements (package mlflow-skinny)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from shoal.errors import MissingExtra
from shoal.observe.background import Background
from shoal.observe.ending import Ending
from shoal.observe.sink import RunStart, Sink

EXPERIMENT = "shoal"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


def mlflow_sink(tracking_uri: str, *, warn: Callable[[str], None]) -> Sink:
    """The sink, in a thread of its own. Raises `MissingExtra` without MLflow."""
    if find_spec("mlflow") is None:
        raise MissingExtra("mlflow-skinny", extra="mlflow", purpose="observe.mlflow")
    return Background(lambda: MlflowSink(tracking_uri), name="MLflow", warn=warn)


class MlflowSink(Sink):
    """Logs to a tracking server. MLflow has no NaN: values that are not finite are left out."""

    def __init__(self, tracking_uri: str) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=tracking_uri)
        self._run_id = ""

    def start(self, run: RunStart) -> None:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = self._client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        tags = {"shoal.generation": str(run.generation), "shoal.total_steps": str(run.total_steps)}
        self._run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        from mlflow.entities import Metric

        at_ms = int(time_s * 1000)
        metrics = [Metric(name, value, at_ms, step) for name, value in values.items() if math.isfinite(value)]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        if ending.cause:
            self._client.set_tag(self._run_id, "shoal.cause", ending.cause[:500])
        self._client.set_terminated(self._run_id, status=_STATUS.get(ending.state, "FAILED"))
