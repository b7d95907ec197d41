"""TensorBoard: every measurement as a scalar, in `tensorboard/` of the run directory (package tensorboardX)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.errors import MissingExtra
from shoal.observe.background import Background
from shoal.observe.ending import Ending
from shoal.observe.host_figures import WithHostFigures
from shoal.observe.sink import RunStart, Sink

FOLDER = "tensorboard"


def tensorboard_sink(run_directory: Path, *, warn: Callable[[str], None]) -> Sink:
    """The sink, in a thread of its own. Raises `MissingExtra` without tensorboardX."""
    if find_spec("tensorboardX") is None:
        raise MissingExtra("tensorboardX", extra="tensorboard", purpose="observe.tensorboard = true")
    return Background(
        lambda: WithHostFigures(TensorBoardSink(run_directory / FOLDER), run_directory), name="TensorBoard", warn=warn
    )


class TensorBoardSink(Sink):
    """Writes event files. A run that resumes tells TensorBoard to drop the steps that it computes again.

    A step is one event with all its values: `add_scalar` makes an event of each value, which passes through a queue
    between processes (1.5 ms a step with 45 values; so 0.2 ms).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        from tensorboardX import SummaryWriter

        purge_step = None if run.resumed_from is None else run.first_step
        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=scalars), step, walltime=time_s)

    def finish(self, ending: Ending) -> None:
        self._writer.close()
