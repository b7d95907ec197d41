"""What the run file asks to measure stands in the events of a run: speed-up against one rank, norms by layer."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from shoal.observe.goodput import EFFICIENCY, RATE, SPEED_UP
from tests.cli.project import Project, project

LAYERS = {"grad/norm/layers.0", "grad/norm/layers.2"}


@pytest.fixture
def own(tmp_path: Path) -> Project:
    return project(tmp_path)


@pytest.mark.slow
def test_a_run_measures_its_speed_up_and_its_layers(own: Project) -> None:
    """Two ranks beside a run of one: in every step the ratio of the rates, in every third and only there the norms of
    both layers. The run of two ranks is none to be measured against."""
    alone = own.shoal("train", "run.toml", "run.processes=1", "run.steps=4", 'run.directory="runs/alone"')
    assert alone.returncode == 0, alone.stderr
    asked = ('observe.one_rank="runs/alone"', "observe.layer_norms_every_steps=3")
    done = own.shoal("train", "run.toml", "run.processes=2", *asked)
    assert done.returncode == 0, done.stderr
    rates = [rate for event in own.events("runs/alone") if (rate := event.get(RATE)) is not None]
    steps = [event for event in own.events() if event.get(RATE) is not None]
    assert len(steps) == 9
    for event in steps:
        rate, speed_up = event.get(RATE), event.get(SPEED_UP)
        assert rate is not None
        assert speed_up is not None
        assert rate / speed_up == pytest.approx(statistics.median(rates[2:]))
        assert event.get(EFFICIENCY) == pytest.approx(speed_up / 2)
        found = {name for name in event.values if name.startswith("grad/norm/")}
        assert found == (LAYERS if event.step % 3 == 0 else set())
    assert not any(SPEED_UP in event.values for event in own.events(rank=1))
    refused = own.shoal("train", "run.toml", 'observe.one_rank="runs/own"', 'run.directory="runs/third"')
    assert refused.returncode == 2
    assert "shoal: observe.one_rank = 'runs/own' had 2 ranks: speed-up is told against one rank" in refused.stderr
    assert not (own.folder / "runs/third").exists()
