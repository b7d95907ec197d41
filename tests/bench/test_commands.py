"""What the commands refuse before they start ranks, and where they start them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.bench import comm as comm_module
from shoal.bench import link as link_module
from shoal.bench.comm import comm
from shoal.bench.link import KERNEL_ONLY, PARTS, labs, link
from shoal.errors import EnvironmentFault, UsageError

LAB = "[lab]\nhosts = 2\nranks_per_host = 2\nrate_mbit = 100\n"
FIT = {
    "backend": "gloo", "operation": "all_reduce", "ranks": 4, "hosts": 2, "dtype": "float32", "alpha_s": 1e-3,
    "beta_s": 1e-8,
}  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The calls that would start ranks. None are started; calibrations go to a folder of the test."""
    calls: list[dict[str, Any]] = []

    def on_ranks(arguments: list[str], **how: Any) -> dict[str, Any]:
        calls.append({"arguments": arguments, **how})
        return {"rows": [], "checks": [], "fits": [FIT]}

    for module in (comm_module, link_module):
        monkeypatch.setattr(module, "on_ranks", on_ranks)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return calls


def play(**options: Any) -> None:
    link(**{"parts": "", "mbit": "100,400", "lab": "", "network": "kernel", "as_json": True} | options)


def sweep(**options: Any) -> None:
    defaults: dict[str, Any] = {
        "operations": "all_reduce", "backends": "", "first": 1024, "last": 4096, "factor": 4, "turns": 3,
        "dtype": "float32", "processes": "", "lab": None, "plot": None, "keep": True, "as_json": True,
    }  # fmt: skip
    comm(**defaults | options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lab": "nowhere"}, "'nowhere'.*100-mbit.*gigabit-throttled"),
        ({"parts": "levels", "lab": "100-mbit"}, "'100-mbit'.*levels are two-by-two"),
        ({"network": "wifi"}, "'wifi'.*kernel or throttle"),
        *(({"network": "throttle", "parts": part}, f"'{part}'.*--network kernel") for part in KERNEL_ONLY),
    ],
)
def test_a_link_that_is_not_there_is_refused_by_name(started: list, options: dict[str, Any], said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        play(**options)
    assert not started


def test_without_root_real_links_are_refused_and_throttled_ones_played(
    started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal names the option that helps. A lab that is always throttled needs no root either."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentFault, match=r"root.*--network throttle"):
        play(parts="rate")
    assert not started
    play(network="throttle")
    play(parts="priority", lab="gigabit-throttled")
    assert {call["lab"].network for call in started} == {"throttle"}
    assert {call["arguments"][4] for call in started} == set(PARTS) - set(KERNEL_ONLY)
    assert started[0]["part"] == "1 of 3: rate, lab 100-mbit"


def test_every_lab_can_be_throttled_and_none_is_played_twice() -> None:
    for part in PARTS:
        made = list(labs(part, [100, 400], "throttle").values())
        assert {lab.network for lab in made} == {"throttle"}
        assert all(lab not in made[:number] for number, lab in enumerate(made))


def test_collectives_are_measured_in_a_lab_and_its_fits_are_not_kept(started: list, tmp_path: Path) -> None:
    """All ranks of the lab measure, over two levels; another number of ranks is refused. Other fits are kept."""
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    sweep(lab=path)
    (call,) = started
    assert (call["processes"], call["lab"].ranks, call["mpi"]) == (4, 4, False)
    assert "hierarchical" in call["arguments"]
    assert not (tmp_path / "cache").exists()
    with pytest.raises(typer.BadParameter, match=r"'2'.*4 ranks"):
        sweep(lab=path, processes="2")
    sweep(processes="2")
    assert (tmp_path / "cache" / "calibration.toml").exists()


def test_two_levels_on_one_host_are_refused_and_mpi_is_started_by_mpiexec(started: list) -> None:
    with pytest.raises(UsageError, match=r"--backends hierarchical.*--lab"):
        sweep(backends="hierarchical")
    assert not started
    sweep(backends="shm,mpi", processes="2")
    assert started[0]["mpi"]
