"""Every figure on the screen has a meaning in a line."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.observe.figures import MEANINGS
from shoal.observe.sink import Ending, RunStart
from shoal.observe.status import Status
from shoal.observe.tables import meanings_section
from tests.observe.streams import VALUES

WORDS = {word for name in MEANINGS for word in name.split(", ")}


def test_each_figure_of_the_live_line_is_explained() -> None:
    """In `shoal train --help`, within 80 columns, and in the report: all that line and closing sentence show."""
    status = Status(RunStart(name="run", total_steps=3, epoch_samples=100))
    for step in (1, 2):
        status.update(step, VALUES | {"loss/eval": 1.0, "accuracy/eval": 0.5, "time/data": 0.1}, time_s=float(step))
    named = re.sub(r"\d[\d.:%e+-]*( %| [GM]iB)?k?|/\d+", "", f"{status.line()}  {status.summary(Ending('finished'))}")
    for word in WORDS - {"samples/s"}:
        assert word in named
    rest = re.sub("|".join(sorted(map(re.escape, WORDS), key=len, reverse=True)), "", named)
    assert set(re.findall(r"[a-z/]+", rest)) <= {"step", "finished", "steps", "in", "s", "ms", "a", "k"}
    told = CliRunner().invoke(app, ["train", "--help"]).stdout
    assert max(map(len, told.splitlines())) <= 80
    words = " ".join(told.split())
    for name, meaning in MEANINGS.items():
        assert f"{name} {meaning}" in words
        assert meaning in meanings_section()


def test_the_pace_is_that_of_the_last_steps_together() -> None:
    """A step that took twice as long beside nineteen others moves the figure by a twentieth, not by half."""
    status = Status(RunStart(name="run", total_steps=100))
    for step in range(1, 20):
        status.update(step, VALUES, time_s=0.2 * step)
    slow = {"time/step": 0.4, "throughput/tokens_per_second": 7_100.0}
    status.update(20, VALUES | slow, time_s=4.2)
    assert "13.5k tokens/s" in status.line()
