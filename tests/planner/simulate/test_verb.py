"""`shoal simulate` from the command line: what it prints, writes and refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.simulate import simulate
from shoal.errors import LayoutError, ShoalError

ROOT = Path(__file__).parent.parent.parent.parent
SPLIT = str(ROOT / "recipes" / "stdlib-gpt-3d.toml")

CLUSTER = """
[cluster]
nodes = 2
machine = "dgx-h100"

[price]
device_hour = 2.0
device_watts = 1000.0
"""
PIPELINE = ("run.processes=16", "run.device='cuda'", "layout.pipeline=2", "layout.shard=4", "layout.tensor=2")


@pytest.fixture
def app() -> typer.Typer:
    """The verb alone."""
    made = typer.Typer()
    made.command()(simulate)
    return made


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """Two nodes with a price."""
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER, encoding="utf-8")
    return str(path)


def test_the_text_has_every_part(app: typer.Typer, cluster: str) -> None:
    """The step, the ranks, the weeks and what they cost."""
    result = CliRunner().invoke(app, [SPLIT, *PIPELINE, "--cluster", cluster, "--weeks", "2"])
    assert result.exit_code == 0, result.output
    for part in (
        "by closed forms",
        "pipeline rank",
        "peak of 80 GiB",
        "communication outside stages",
        "2 weeks:",
        "energy",
    ):
        assert part in result.stdout


def test_json_is_one_object_and_its_parts_agree(app: typer.Typer, cluster: str) -> None:
    """The step is close to the prediction whose constants it shares; money is hours x devices x price."""
    found = json.loads(
        CliRunner().invoke(app, [SPLIT, *PIPELINE, "--cluster", cluster, "--weeks", "1", "--json"]).stdout
    )
    assert found["step_s"] == pytest.approx(found["predicted_s"], rel=0.15)
    assert len(found["ranks"]) == len(found["memory_bytes"]) == 2
    assert found["weeks"]["money"] == pytest.approx(7 * 24 * 16 * 2.0)
    assert found["weeks"]["energy_kwh"] == pytest.approx(7 * 24 * 16)
    assert 0.9 < found["weeks"]["effective_share"] < 1


def test_the_trace_is_a_timeline(app: typer.Typer, tmp_path: Path) -> None:
    """Complete events in microseconds; what a rank computes never overlaps; the last one ends with the step."""
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(app, [SPLIT, "--trace", str(out), "--json"])
    step_s = json.loads(result.stdout)["step_s"]
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(step_s * 1e6, abs=0.01)
    for rank in {event["pid"] for event in events}:
        row = sorted((e["ts"], e["dur"]) for e in events if e["pid"] == rank and e["cat"] in ("compute", "optimizer"))
        assert all(a + d <= b + 0.01 for (a, d), (b, _) in pairwise(row))


def test_stragglers_only_slow_a_run_down(app: typer.Typer, cluster: str) -> None:
    """Slow devices and noise: later than without, and the same again with the same seed."""

    def step_s(*more: str) -> float:
        return json.loads(CliRunner().invoke(app, [SPLIT, *PIPELINE, "--cluster", cluster, "--json", *more]).stdout)[
            "step_s"
        ]

    slow = ("--slow-share", "0.3", "--slow-factor", "1.5", "--noise", "0.05", "--seed", "4")
    assert step_s(*slow) > step_s()
    assert step_s(*slow) == step_s(*slow)


def test_the_run_files_cluster_is_simulated_and_the_command_lines_wins(
    app: typer.Typer, cluster: str, tmp_path: Path
) -> None:
    """`layout.cluster` counts as `--cluster` does, for the step and for the schedule, unless that is given."""

    def shown(*more: str) -> dict[str, Any]:
        return json.loads(CliRunner().invoke(app, [SPLIT, *PIPELINE, "--json", *more]).stdout)

    named, other = f'layout.cluster="{cluster}"', tmp_path / "slow.toml"
    other.write_text(CLUSTER.replace("dgx-h100", "dgx-a100-80gb"), encoding="utf-8")
    given, slower = shown("--cluster", cluster), shown("--cluster", str(other))
    assert shown(named) == given
    assert shown(named, "--cluster", str(other)) == slower
    assert slower["step_s"] > given["step_s"]
    assert shown(named, "--schedule") == shown("--schedule", "--cluster", cluster)


def test_a_layout_that_is_not_the_clusters_is_refused(app: typer.Typer, cluster: str) -> None:
    """Three tensor ranks on sixteen devices: one sentence of the layout's own."""
    result = CliRunner().invoke(app, [SPLIT, "--cluster", cluster, "layout.tensor=3"])
    assert isinstance(result.exception, ShoalError)


HUGE = ("model.layers=96", "model.width=8192", "model.heads=64", "memory.zero=1")


def test_what_does_not_fit_is_refused_and_played_on_request(app: typer.Typer, cluster: str) -> None:
    """A GPT of 77 billion on sixteen devices: the sentence says how much is needed and how to go on; then it warns."""
    refused = CliRunner().invoke(app, [SPLIT, *PIPELINE, *HUGE, "--cluster", cluster])
    assert isinstance(refused.exception, LayoutError)
    assert "GiB, and h100-sxm has 80 GiB" in str(refused.exception)
    assert "--beyond-memory" in str(refused.exception)
    played = CliRunner().invoke(app, [SPLIT, *PIPELINE, *HUGE, "--cluster", cluster, "--beyond-memory"])
    assert played.exit_code == 0, played.output
    assert "WARNING: this run does not fit" in played.stdout
    shown = CliRunner().invoke(app, [SPLIT, *PIPELINE, *HUGE, "--cluster", cluster, "--beyond-memory", "--json"])
    assert json.loads(shown.stdout)["fits"] is False


def test_saves_and_failures_follow_from_the_cluster(app: typer.Typer, cluster: str, tmp_path: Path) -> None:
    """Two H100 nodes fail every 119 days; slower staging holds the job up longer, and what is given counts."""

    def weeks(path: str, *more: str) -> dict[str, Any]:
        arguments = [SPLIT, *PIPELINE, "--cluster", path, "--weeks", "8", "--json", *more]
        return json.loads(CliRunner().invoke(app, arguments).stdout)["weeks"]

    slow = tmp_path / "slow.toml"
    slow.write_text(CLUSTER + "\n[reliability]\nstaging_gb_s = 0.001\nfailures_per_1000_node_days = 500\n")
    fast, held = weeks(cluster), weeks(str(slow))
    assert fast["between_failures_s"] == pytest.approx(86400 * 1000 / (2 * 4.2137), rel=1e-3)
    assert held["between_failures_s"] == pytest.approx(86400)
    assert held["save_stall_s"] == pytest.approx(1e4 * fast["save_stall_s"])
    assert held["goodput"]["failures"] > fast["goodput"]["failures"]
    assert weeks(cluster, "--save-stall", "3")["save_stall_s"] == 3
