"""`shoal plan` from the command line: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.plan import plan
from shoal.errors import ShoalError
from shoal.planning.answer import cluster_of, planned, workload_of
from shoal.planning.plan_file import written_plan
from shoal.planning.stack import stack_of
from shoal.runfile.load import load_run

ROOT = Path(__file__).parent.parent.parent
STDLIB = ROOT / "recipes" / "stdlib-gpt.toml"
DIGITS = ROOT / "recipes" / "digits.toml"


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step takes here is no matter of these tests."""
    monkeypatch.setattr("shoal.planning.tried_step.tried_step", lambda run_file: None)


@pytest.fixture
def app() -> typer.Typer:
    """The verb alone."""
    made = typer.Typer()
    made.command()(plan)
    return made


def test_the_text_has_every_part(app: typer.Typer) -> None:
    """The plans, the bill with its sum, memory, what would help, the other plan."""
    result = CliRunner().invoke(app, [str(STDLIB), "--why-not", "tensor=2", "--all"])
    assert result.exit_code == 0
    for part in ("Best plan:", "the sum of the above", "the device has", "what would change it", "tensor=2: the best"):
        assert part in result.stdout


@pytest.mark.parametrize("top", [[], ["--top", "3"]])
def test_the_answer_fits_on_a_screen(app: typer.Typer, top: list[str]) -> None:
    """24 lines: the plans, how sure they are, what would help, and how to see the rest. No change of -0.0 %, and
    nothing of GPUs on cores."""
    result = CliRunner().invoke(app, [str(STDLIB), *top])
    assert result.exit_code == 0
    assert result.stdout.count("\n") <= 24
    assert "The run file as it stands, then the fastest plans" in result.stdout
    assert "--all shows the rest" in result.stdout
    whole = CliRunner().invoke(app, [str(STDLIB), *top, "--all"]).stdout
    for text in (result.stdout, whole):
        assert not re.search(r"[-+]0\.0\b", text)
        assert "A100" not in text


@pytest.mark.slow
def test_units_are_chosen_by_size(app: typer.Typer) -> None:
    """A model of digits has samples and no tokens, and its memory is MiB, never 0.00 GiB."""
    result = CliRunner().invoke(app, [str(DIGITS), "--all"])
    assert result.exit_code == 0
    assert "samples/s" in result.stdout
    assert "tokens/s" not in result.stdout
    assert "MiB" in result.stdout
    assert " 0.00" not in result.stdout.split("memory of the fullest rank")[1].split("The step is a guess")[0]


def test_the_answer_states_its_odds_and_what_would_help(app: typer.Typer, tmp_path: Path) -> None:
    """No interval around a guess, the probability of running out of memory, with sources; the scaling curve, the front
    of devices; pictures that are none are not written."""
    folder = tmp_path / "pictures"
    arguments = [str(STDLIB), "--json", "--pictures", str(folder), "layout.pipeline=2", "run.processes=4"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["confidence"]["step_s"] is None, "rates of cores are assumed: nothing published is like them"
    assert 0 <= found["confidence"]["out_of_memory"] < 0.01
    assert "published" in found["confidence"]["memory_source"]
    assert {1, 2, 4, 8} <= {one["devices"] for one in found["scaling"]}
    assert found["front_of_devices"]
    assert any(change["sentence"] for change in found["changes"])
    pictures = {path.name for path in folder.iterdir()}
    assert {"memory.png", "scaling.png"} <= pictures
    assert ("pipeline.png" in pictures) == (found["plans"][0]["layout"]["pipeline"] > 1)


def test_overrides_are_in_the_emitted_run_file(app: typer.Typer, tmp_path: Path) -> None:
    """What was planned is what is written: keys of the command line and keys that no plan decides."""
    out = tmp_path / "planned.toml"
    overrides = ["run.processes=2", "batch.global_samples=64", "memory.recompute_layers=[0]", "layout.auto=true"]
    assert CliRunner().invoke(app, [str(STDLIB), *overrides, "--emit", str(out)]).exit_code == 0
    emitted = load_run(out)
    assert emitted.batch.global_samples == 64
    assert emitted.memory.recompute_layers == [0]
    assert not emitted.layout.auto


def test_json_is_one_object_with_items_and_constants(app: typer.Typer) -> None:
    """Seconds add up to the step, bytes to the peak; each constant has an origin."""
    result = CliRunner().invoke(app, [str(STDLIB), "--json", "--top", "3"])
    found = json.loads(result.stdout)
    best = found["plans"][0]
    assert len(found["plans"]) == 3
    assert sum(best["bill_s"].values()) == pytest.approx(best["step_s"])
    assert sum(best["memory"].values()) == pytest.approx(best["memory_bytes"])
    assert all(constant["origin"] for constant in found["constants"])


def test_the_run_file_of_a_plan_is_that_plan(app: typer.Typer, tmp_path: Path) -> None:
    """What `--emit` writes loads, and asks for the plan that was ranked first."""
    out = tmp_path / "planned.toml"
    assert CliRunner().invoke(app, [str(STDLIB), "run.processes=4", "--emit", str(out)]).exit_code == 0
    best = planned(load_run(STDLIB, ["run.processes=4"]), None, keep=1).found.best[0].plan
    emitted = load_run(out)
    assert written_plan(emitted, cluster_of(emitted, None)) == best


@pytest.mark.slow
def test_a_model_without_sizes_is_traced(app: typer.Typer) -> None:
    """A convolutional net has no closed form: its own operators are priced, and no layout but copies and shares."""
    result = CliRunner().invoke(app, [str(DIGITS), "--json", "run.processes=4", "--top", "100"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    axes = {axis for one in found["plans"] for axis, size in one["layout"].items() if size > 1}
    assert axes == {"replicate", "shard"}
    assert found["plans"][0]["bill_s"]["matrix products"] > 0


def test_a_dtype_that_the_device_lacks_is_refused(tmp_path: Path) -> None:
    """A V100 has no bfloat16."""
    path = tmp_path / "c.toml"
    path.write_text('[cluster]\nnodes = 1\nmachine = "dgx1-v100"\n')
    with pytest.raises(ShoalError, match="bfloat16"):
        planned(load_run(STDLIB, ['precision.kind="bfloat16"']), path, keep=1)


def test_the_run_file_tells_the_workload() -> None:
    """Sizes, samples and tokens are those of the recipe."""
    run_file = load_run(STDLIB)
    workload = workload_of(run_file)
    assert (workload.model.layers, workload.model.hidden, workload.model.feed_forward) == (4, 128, 384)
    assert workload.tokens == 16 * 128
    assert not stack_of(run_file, cluster_of(run_file, None)).overlap_data
