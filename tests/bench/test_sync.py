"""`shoal bench sync`: what it says of curves, and that its strategies are the run file's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

import shoal.bench.sync as bench_sync
from shoal.bench.pictures import write_sync_picture
from shoal.bench.report import Result
from shoal.bench.sync import ALL, PROMISED, result_of, row_of, run_file_of, sync
from shoal.bench.training_job import PacedForwardBackward
from shoal.launcher.lab.lab_file import Lab
from shoal.runfile.rules import check_across

DEFAULTS = {"link_mbit": 2.0, "slow": 4.0, "sample_ms": 1.0, "loss": 0.3, "steps": 100, "picture": None}
CURVE = [[1.0, 640.0, 2.0], [2.0, 1280.0, 1.0], [3.0, 1920.0, 0.5]]


def test_a_crossing_is_interpolated() -> None:
    """Half of the way in the loss is half of the way in time and samples; a loss that is not reached has neither."""
    assert row_of(CURVE, 0.75) == {"seconds": 2.5, "samples": 1600, "loss": 0.75}
    assert row_of(CURVE, 0.4) == {"seconds": None, "samples": None, "loss": 0.5}


@pytest.mark.parametrize("name", ALL)
def test_every_strategy_is_a_run_that_may_start(name: str, tmp_path: Path) -> None:
    """On four workers."""
    run_file = run_file_of(name, tmp_path, processes=4, steps=100)
    check_across(run_file, file=name)
    assert run_file.batch.division == ("by_speed" if name.endswith("+by_speed") else "even")


def test_strategies_stand_beside_all_reduce_on_the_same_machine() -> None:
    """A promised one that is too slow is reported as such; one that did not get there has no ratio."""
    times = {"allreduce": 6.0, PROMISED[0]: 3.0, PROMISED[1]: 5.0, "easgd": None}
    rows = [{"machine": "one-slow", "strategy": name, "seconds": seconds} for name, seconds in times.items()]
    rows.append({"machine": "even", "strategy": PROMISED[0], "seconds": 1.0})
    result = result_of(rows)
    assert [row["times_as_soon"] for row in result["rows"]] == [1.0, 2.0, 1.2, None, None]
    assert [one["holds"] for one in result["checks"]] == [True, False]


def test_the_picture_has_a_panel_for_each_machine(tmp_path: Path) -> None:
    """It is a file of the suffix."""
    rows = [{"machine": machine, "strategy": "local", "curve": CURVE} for machine in ("even", "one-slow")]
    write_sync_picture(rows, tmp_path / "sync.svg", loss=0.75)
    drawn = (tmp_path / "sync.svg").read_text()
    assert drawn.startswith("<?xml")
    assert drawn.count('id="axes_') == 2


@pytest.mark.parametrize(("reason", "network"), [(None, "kernel"), ("a lab needs root", "throttle")])
def test_a_slow_link_is_one_between_two_hosts(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, network: str
) -> None:
    """An odd number of workers is divided too; without privileges ranks wait in the place of a shaped link."""
    monkeypatch.setattr(bench_sync, "why_not", lambda: reason)
    lab = bench_sync.two_hosts(5, 2.0)
    assert (lab.host_of, lab.rate_mbit(0, 1), lab.network) == ((0, 0, 0, 1, 1), 2.0, network)


def test_each_machine_has_its_own_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """This machine for even and slow workers, a lab for the slow link, without what shares memory; one report."""
    asked: list[tuple[list[str], int | None]] = []

    def on_ranks(command: list[str], *, processes: int, lab: Lab | None, part: str) -> Result:
        asked.append((command[3:7], None if lab is None else lab.ranks))
        machine = command[command.index("--machines") + 1]
        return {"rows": [{"machine": machine, "strategy": "local", "seconds": 1.0, "curve": CURVE}], "checks": []}

    monkeypatch.setattr(bench_sync, "on_ranks", on_ranks)
    sync(strategies="allreduce,hogwild", machines="even,slow-link", processes=4, as_json=True, **DEFAULTS)
    assert asked == [
        (["--strategies", "allreduce,hogwild", "--machines", "even"], None),
        (["--strategies", "allreduce", "--machines", "slow-link"], 4),
    ]
    assert [row["machine"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["even", "slow-link"]
    with pytest.raises(typer.BadParameter, match="share the memory of one host"):
        sync(strategies="hogwild", machines="slow-link", processes=4, **DEFAULTS)


def test_unknown_strategies_are_refused() -> None:
    """Before any rank starts."""
    with pytest.raises(typer.BadParameter, match="'gossips'"):
        sync(strategies="gossips", machines="even")


class Computes:
    """A forward and backward that counts."""

    compute = None

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batches, **how) -> None:
        self.calls += 1


def test_a_paced_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as its samples take, before it computes; the rest afterwards."""
    slept: list[float] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("shoal.bench.training_job.time.sleep", sleep)
    monkeypatch.setattr("shoal.bench.training_job.time.perf_counter", lambda: clock[0])
    inner = Computes()
    paced = PacedForwardBackward(inner, 0.5)  # pyright: ignore[reportArgumentType]
    paced([[1, 2, 3], [4]], gradients=None, factor=None, on_loss=None)  # pyright: ignore[reportArgumentType]
    assert inner.calls == 1
    assert slept[0] == 2.0
    assert clock[0] == 2.0
