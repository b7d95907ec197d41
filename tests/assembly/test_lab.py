"""A run in a lab is the same run: real links, or ranks that throttle themselves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from shoal.assembly.lab import conditions_from, processes_in
from shoal.comm.conditions import Conditions, HostRates
from shoal.errors import ConfigError, UsageError
from shoal.launcher.environment import Place
from shoal.launcher.lab.network import RATES, throttled_entry
from shoal.runfile.load import load_run
from tests.cli.project import Project, project
from tests.comm.groups import replicas
from tests.comm.hosts import on_host
from tests.launcher.labs import can_lab, lab_of
from tests.ranks import TestPlace

__all__ = ["can_lab"]
SAME = 1e-6
"""Two ranks: one order of summation, whatever carries it; shared memory and Gloo round alike."""
LAB = "[lab]\nhosts = 2\nrate_mbit = 200\n"


@pytest.fixture
def user(tmp_path: Path) -> Project:
    """A folder with a model, data and a run file."""
    return project(tmp_path)


@pytest.mark.stress
@pytest.mark.usefixtures("can_lab")
def test_losses_in_a_lab_are_those_without(user: Project) -> None:
    """Three steps on two hosts; and what went between hosts is in the events."""
    (user.folder / "lab.toml").write_text(LAB)
    apart = user.shoal("train", "run.toml", "run.steps=3", "run.name=apart", "--lab", "lab.toml")
    assert apart.returncode == 0, apart.stderr
    together = user.shoal("train", "run.toml", "run.steps=3", "run.name=together", "run.processes=2")
    assert together.returncode == 0, together.stderr
    losses = user.losses("runs/apart")
    assert list(losses) == [1, 2, 3]
    assert losses == pytest.approx(user.losses("runs/together"), rel=SAME)
    assert "gloo: one rank on each of 2 hosts" in apart.stdout
    assert "shared memory: 2 ranks on one host" in together.stdout
    for run, between in (("apart", "wire/between_bytes"), ("together", "wire/inside_bytes")):
        last = next(event for event in user.events(f"runs/{run}") if event.step == 3)
        assert last.get(between) == last.get("wire/bytes_sent")
        assert last.get("wire/bytes_sent")


def test_a_run_has_the_lab_s_ranks_or_is_refused(user: Project) -> None:
    """Another number in the run file, and another launcher."""
    run_file, lab = load_run(user.folder / "run.toml"), lab_of(hosts=2, ranks_per_host=2)
    assert processes_in(lab, run_file.run, None) == 4
    with pytest.raises(ConfigError, match=r"run.processes = 3, and the lab has 4 ranks on 2 hosts"):
        processes_in(lab, load_run(user.folder / "run.toml", ["run.processes=3"]).run, None)
    with pytest.raises(UsageError, match="a lab starts its own ranks, and this process is a rank of torchrun"):
        processes_in(lab, run_file.run, Place(0, 2, 0, 2, 0, "torchrun"))


def between_hosts(place: TestPlace, rate: float) -> float:
    """Seconds of an all-reduce of 10 kB over two hosts; 0.0 on a rank that has no part in it. Inside a host, the ranks
    sum a thousand times as much."""
    conditions = Conditions(rates=HostRates((0, 0, 1), ((0, rate, 0), (rate, 0, 0), (0, 0, 0))))
    with on_host(f"host-{conditions.rates.hosts[place.rank] if conditions.rates else 0}"):
        mesh = replicas(place, conditions=conditions)
        spent_s = 0.0
        if place.rank in (0, 2):
            group, tensor = mesh.ranks((0, 2)), torch.ones(2_500)
            begin_s = time.perf_counter()
            group.all_reduce(tensor).wait()
            spent_s = time.perf_counter() - begin_s
        if place.rank in (0, 1):
            mesh.ranks((0, 1)).all_reduce(torch.ones(2_500_000)).wait()
    return spent_s


def test_throttled_ranks_keep_to_the_rate_between_hosts(ranks) -> None:
    """10,000 bytes sent to the other host at 40 kB/s take a quarter of a second; inside a host nothing is slowed: at
    that rate, 10 MB would take longer than any test may."""
    first, _, third = ranks(3, between_hosts, 40_000.0)
    assert min(first, third) >= 0.25


def test_a_throttled_rank_finds_the_rates_it_was_told() -> None:
    """From the launcher's variable to the conditions of a group; nothing without it."""
    told = throttled_entry(lab_of([{"host": 2, "rate_mbit": 4}], hosts=3, rate_mbit=8), 1).variables
    assert conditions_from({}) is None
    conditions = conditions_from({RATES: told[RATES]})
    assert conditions is not None
    assert conditions.among((0, 1), 1).between_bytes_per_second == 1e6
    assert conditions.among((0, 1, 2), 1).between_bytes_per_second == 5e5
    assert conditions.among((1,), 1).between_bytes_per_second is None
