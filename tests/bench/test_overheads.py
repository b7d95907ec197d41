"""The small GPT whose step shows contention between ranks, and how far sums of operators are off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal.bench.operator_times import crowd_run, crowded_step_s
from shoal.bench.products import keep, step_factor
from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.planning.answer import cluster_of, predictor_on
from shoal.planning.calibration import measured_here, read_calibration
from shoal.planning.plan_file import written_plan
from shoal.topology.calibration import Crowd
from shoal.topology.layout import Layout
from tests.planner.calibrations import calibration
from tests.ranks import TestPlace

NOTHING = {"products": [], "operators": [], "waits": [], "collectives": [], "copy_bytes_s": 1e9}


def _measured(place: TestPlace) -> float:
    layout, threads = Layout(replicate=place.size), torch.get_num_threads()
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    try:
        return crowded_step_s(mesh.world)
    finally:
        torch.set_num_threads(threads)  # a rank without peers takes all cores


@pytest.mark.slow
def test_all_ranks_know_what_the_slowest_took(ranks: Callable[..., list[Any]]) -> None:
    """One number for all of them, of a step that is no empty call."""
    first, second = ranks(2, _measured)
    assert first == second > 1e-3


def test_a_new_sweep_of_crowds_replaces_the_old_one(tmp_path: Path) -> None:
    """Ratios of steps that were measured at different times would say nothing."""
    path = tmp_path / "calibration.toml"
    for steps in ({1: 1.0, 2: 1.1, 4: 2.5}, {1: 1.0, 2: 1.2}):
        keep([{**NOTHING, "crowd": {"ranks": count, "step_s": step_s}} for count, step_s in steps.items()], path)
    known = read_calibration(path)
    assert known is not None
    assert known.crowds == (Crowd(ranks=1, step_s=1.0), Crowd(ranks=2, step_s=1.2))


def test_the_step_of_a_rank_alone_gives_the_factor() -> None:
    """A step that takes twice as long gives twice the factor, which brings the prediction to the measurement."""
    known = calibration()
    once, twice = (step_factor(msgspec.structs.replace(known, crowds=(Crowd(ranks=1, step_s=s),))) for s in (0.1, 0.2))
    assert once is not None
    assert twice == pytest.approx(2 * once)
    run_file = crowd_run(Path(), Path("tokens.bin"))
    measured = measured_here(run_file, msgspec.structs.replace(known, step_factor=once))
    predictor = predictor_on(run_file, cluster_of(run_file, None), measured=measured)
    assert predictor.bill(written_plan(run_file, predictor.cluster)).total == pytest.approx(0.1)


def test_without_the_step_or_what_predicts_it_there_is_no_factor() -> None:
    """A sweep of one rank alone measures no collectives, and an older one no step."""
    crowds = (Crowd(ranks=1, step_s=0.1),)
    assert step_factor(calibration()) is None
    assert step_factor(msgspec.structs.replace(calibration(), crowds=crowds, collectives=())) is None
    assert step_factor(msgspec.structs.replace(calibration(), crowds=crowds, operators=())) is None
