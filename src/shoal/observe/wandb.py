"""Weights & Biases: a run of the project "shoal" (package wandb). Offline, it is files for `wandb sync`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from shoal.errors import MissingExtra
from shoal.observe.background import Background
from shoal.observe.ending import Ending
from shoal.observe.host_figures import WithHostFigures
from shoal.observe.sink import RunStart, Sink

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
