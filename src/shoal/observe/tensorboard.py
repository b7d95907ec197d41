"""TensorBoard: every measurement as a scalar, in `tensorboard/` of the run directory (package tensorboardX)."""

from __future__ import annotations

import re
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
