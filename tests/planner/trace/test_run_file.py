"""`shoal plan` of a run file whose model is the user's own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import typer
from torch import nn
from typer.testing import CliRunner

from shoal.cli.plan import plan
from shoal.errors import ConfigError, UserCodeError
from shoal.planner.simulate.work import Stragglers
from shoal.planner.trace.subject import Subject, TracedSplit
from shoal.planning.answer import planned
from shoal.planning.simulating import simulated
from shoal.planning.tracing import subject_of
from shoal.planning.tried_step import tried_step
from shoal.runfile.load import load_run

RUN = """
[run]
name = "own"
steps = 10
processes = 4
[model]
kind = "python"
build = "{build}"
[data]
kind = "python"
build = "tests.verification.user_models:ragged"
[batch]
global_samples = 16
micro_samples = 4
"""

LLAMA = """kind = "transformers"
architecture = "LlamaForCausalLM"
config = { vocab_size = 64, hidden_size = 8, intermediate_size = 8, num_hidden_layers = 6, num_attention_heads = 4 }"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run file of a model with biases and roles, on samples of three lengths."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(build="tests.verification.user_models:biased"), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_users_model_is_planned_and_its_plan_is_a_run_file(run: Path, tmp_path: Path) -> None:
    """Roles allow tensor ranks; items add up to the peak; what is emitted loads."""
    app, out = typer.Typer(), tmp_path / "planned.toml"
    app.command()(plan)
    result = CliRunner().invoke(app, [str(run), "--json", "--emit", str(out), "--top", "200"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {one["layout"]["tensor"] for one in found["plans"]} == {1, 2, 4}
    best = found["plans"][0]
    assert sum(best["memory"].values()) == pytest.approx(best["memory_bytes"])
    assert load_run(out).layout.layout(4).to_dict() == best["layout"]
    assert found["written"]["microbatch"] == 4


@pytest.mark.slow
def test_splits_of_operators_stand_beside_the_roles(run: Path) -> None:
    """Every parameter with both, and no choice is dearer than that of the roles."""
    app = typer.Typer()
    app.command()(plan)
    result = CliRunner().invoke(app, [str(run), "--json", "--operators", "2"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["operators"]
    assert found["cheapest_s"] <= min(found["by_roles_s"], found["whole_s"])
    by_role = {one["name"]: one["by_role"] for one in found["parameters"]}
    assert by_role["feed_forward.0.weight"] == by_role["feed_forward.0.bias"] == "split 0"
    assert by_role["feed_forward.2.weight"] == "split 1"
    assert by_role["head.weight"] == "whole"  # 61 classes do not divide
    refused = CliRunner().invoke(app, [str(run), "--operators", "3"])
    assert "divide 4 devices" in str(refused.exception)


def test_the_longest_sample_stands_for_all(run: Path) -> None:
    """Memory has to hold it."""
    predictor = planned(load_run(run), None, keep=1).predictor
    assert predictor.workload.sequence == 16
    assert predictor.workload.tokens == 16 * 16


def test_a_model_with_an_embedding_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step is tried, whose optimizer takes no sparse gradients."""
    monkeypatch.chdir(Path(__file__).parents[3])
    dlrm = load_run(Path("recipes/dlrm.toml"), ["run.processes=1"])
    for refused in (tried_step, partial(planned, cluster=None, keep=1)):
        with pytest.raises(UserCodeError, match="the model has an EmbeddingTable, and plans have no price"):
            refused(dlrm)


def test_what_cannot_be_traced_or_played_is_refused(run: Path) -> None:
    """One sentence each: a model that looks at numbers, and a simulation of what has no closed form."""
    with pytest.raises(ConfigError, match="python"):
        simulated(load_run(run), None, stragglers=Stragglers())
    build = 'model.build="tests.planner.trace.models:Looking"'
    with pytest.raises(UserCodeError, match="cannot be traced"):
        planned(load_run(run, [build]), None, keep=1)


CALLS: list[str] = []


def _called(module: nn.Module, *_: object) -> None:
    CALLS.append(type(module).__name__)


def test_a_decoder_of_transformers_is_traced_split_as_it_runs(run: Path) -> None:
    """Over its own logits, and without a mask that no run makes: of the length of a slice, it would fit no scores."""
    pytest.importorskip("transformers")
    own = 'kind = "python"\nbuild = "tests.verification.user_models:biased"'
    run.write_text(run.read_text(encoding="utf-8").replace(own, LLAMA), encoding="utf-8")
    found, _ = subject_of(load_run(run))
    for name, module in found.model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_hook(_called)
    whole = found.of(TracedSplit(2))
    CALLS.clear()
    halves = TracedSplit(2, tensor=2, sequence_parallel=True)
    split = found.of(halves)
    assert len(CALLS) == 1, "its blocks are alike, in parts, too"
    assert split.flops == pytest.approx(whole.flops / 2, rel=0.05)
    assert found.failures == {}
    assert Subject(found.model, found.steps, found.mode, found.units, each=True).of(halves) == split


def test_a_split_that_cannot_be_traced_is_said(run: Path) -> None:
    """A plan that is missing from the table shows nowhere else."""
    told = planned(load_run(run, ['model.build="tests.planner.trace.models:FailsInParts"']), None, keep=1).untraced
    assert told is not None
    assert told.startswith("Left out: layout.tensor = 2 and 4, as the model cannot be traced: ")


def test_statistics_over_all_ranks_are_traced(run: Path) -> None:
    """Which samples of a microbatch count is a question of numbers; a trace has no padding."""
    text = run.read_text(encoding="utf-8").replace('build = "tests.verification.user_models:ragged"', "")
    run.write_text(text, encoding="utf-8")
    given = ['model.build="tests.planner.trace.models:Normed"', 'data.kind="digits"']
    plain, _ = subject_of(load_run(run, [*given, "run.processes=1"]))
    found, _ = subject_of(load_run(run, [*given, 'model.batch_norm="synchronised"']))
    assert found.of(TracedSplit(4)).held_bytes > plain.of(TracedSplit(4)).held_bytes
