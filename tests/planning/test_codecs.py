"""`shoal plan` and `shoal simulate` price the codec of a run file, and propose one where a link is slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from shoal.cli.plan import plan
from shoal.cli.simulate import simulate
from shoal.codec.config import CastConfig, NoCodec, SignConfig
from shoal.cost.transformer import matrix_shapes
from shoal.models.gpt import GPT
from shoal.planner.explain.codecs import PROPOSED, codec_changes
from shoal.planner.explain.text import help_sentence
from shoal.planner.simulate.work import Stragglers
from shoal.planning.answer import planned, transformer_of
from shoal.planning.plan_file import with_codec
from shoal.planning.simulating import simulated
from shoal.planning.stack import stack_of
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.topology.cluster_file import load_cluster

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/stdlib-gpt.toml"
WIDE = ("model.width=512", "model.heads=8", "run.processes=2", "batch.global_samples=4", "batch.micro_samples=2")
"""Three million numbers, so that bytes matter beside latency."""


def run(*keys: str) -> RunFile:
    return load_run(RECIPE, (*WIDE, *keys))


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the file of two hosts of one core, joined by a link of so many Mbit/s. Nothing was measured here."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "empty"))

    def written(mbit: float, nodes: int = 2) -> Path:
        path = tmp_path / f"{mbit}.toml"
        path.write_text(
            f'[cluster]\nname = "hosts"\nnodes = {nodes}\nmachine = "cpu-2"\ndevices_per_node = {2 // nodes}\n'
            f'[scale_out]\nkind = "ethernet"\ngb_s = {mbit / 8000}\nefficiency = 0.95\nlatency_us = 50\n'
        )
        return path

    return written


@pytest.mark.parametrize("keys", [(), ('model.feed_forward="gelu"',), ("model.tied=false", "model.kv_heads=2")])
def test_the_matrices_are_those_of_the_model(keys: tuple[str, ...]) -> None:
    """Every parameter of two dimensions of the real model, and no other."""
    run_file = run(*keys)
    sizes = transformer_of(run_file.model)
    with torch.device("meta"):
        model = GPT(run_file.model)  # pyright: ignore[reportArgumentType]
    held = sorted(tuple(p.shape) for p in model.parameters() if p.dim() == 2)
    shapes = matrix_shapes(sizes, layers=sizes.layers, embedding=True, head=True)
    assert sorted((rows, columns) for rows, columns, copies in shapes for _ in range(copies)) == held


def test_a_slow_link_gets_a_proposal_with_its_caveat(link: Callable[..., Path]) -> None:
    """Between two hosts at 50 Mbit/s a codec takes most of the step away; the plan itself stays uncoded."""
    found = planned(run("layout.replicate=2"), link(50), keep=1)
    assert found.written is not None
    assert found.codings is not None
    own, *others = found.codings.prices
    assert own.codec == "none"
    assert own.step_s == found.written.step_s
    best = min(others, key=lambda one: one.step_s)
    assert best.step_s < 0.5 * own.step_s
    assert best.residual_bytes > 0
    assert best.caveat is not None
    assert "lossy" in best.caveat
    assert best.codec in found.codings.verdict
    assert best.caveat in found.codings.verdict
    assert "unless you name it" in found.codings.verdict
    assert found.predictor.stack.codecs.gradients == NoCodec()


def test_a_fast_link_gets_none(link: Callable[..., Path]) -> None:
    """At 40 Gbit/s every codec costs more than it saves, and that is said."""
    found = planned(run("layout.replicate=2"), link(40_000), keep=1)
    assert found.codings is not None
    own, *others = found.codings.prices
    assert all(one.step_s > own.step_s for one in others)
    assert found.codings.verdict.startswith("No codec pays here")


def test_a_codec_is_among_what_would_help_with_its_caveat(link: Callable[..., Path]) -> None:
    """On a plan with replicas behind a slow link; changes that round nothing have no caveat, and a coded run gets no
    proposals.
    """
    run_file = run("layout.replicate=2")
    found = planned(run_file, link(50), keep=1)
    assert found.written is not None
    changes = codec_changes(found.predictor, found.written, with_codec(run_file))
    sentences = [help_sentence(change, found.written) for change in changes]
    assert {change.what for change in changes} == {one.key for one in PROPOSED}
    assert all(sentence is not None and "(lossy: held-out loss" in sentence for sentence in sentences)
    assert all(change.caveat is None for change in found.changes if not change.what.startswith(("codec", "optimizer")))
    coded = planned(run("layout.replicate=2", 'codec.kind="cast"'), link(50), keep=1)
    assert coded.written is not None
    assert not codec_changes(coded.predictor, coded.written, with_codec(run_file))


def test_one_replica_has_nothing_to_code(link: Callable[..., Path]) -> None:
    """A pipeline of two: no section, no proposal."""
    found = planned(run("layout.pipeline=2", "batch.micro_samples=1"), link(50), keep=1)
    assert found.written is not None
    assert found.codings is None


def test_the_codec_of_the_run_file_is_what_is_priced(link: Callable[..., Path]) -> None:
    """`[codec]`, an optimizer that sends signs, and what would be without: in the plan and in the simulated step."""
    where = link(50)
    coded, plain = run("layout.replicate=2", 'codec.kind="cast"'), run("layout.replicate=2")
    cluster = load_cluster(where)
    assert stack_of(coded, cluster).codecs.gradients == CastConfig()
    momentum = run("layout.replicate=2", 'optimizer.kind="one_bit_adam"')
    assert stack_of(momentum, cluster).codecs.gradients == SignConfig(block=momentum.optimizer.block)  # type: ignore[union-attr]
    steps = [simulated(one, where, stragglers=Stragglers()) for one in (coded, plain)]
    assert 0.4 < steps[0].outcome.step_s / steps[1].outcome.step_s < 0.7
    assert steps[0].record()["gradients"]["codec"] == "cast dtype=bfloat16"
    assert steps[0].record()["gradients"]["sent_bytes"] == pytest.approx(steps[1].codec.sent_bytes / 2, rel=0.01)
    found = planned(coded, where, keep=1)
    assert found.codings is not None
    assert [one.codec for one in found.codings.prices[:2]] == ["cast dtype=bfloat16", "none"]


def test_both_verbs_print_it(link: Callable[..., Path]) -> None:
    """As text and as JSON."""
    app = typer.Typer()
    app.command("plan")(plan)
    app.command("simulate")(simulate)
    keys = [str(RECIPE), *WIDE, "layout.replicate=2", "--cluster", str(link(50))]
    text = CliRunner().invoke(app, ["plan", *keys, "--all"])
    assert text.exit_code == 0, text.output
    assert "gradients between replicas" in text.stdout
    assert "power_sgd rank=4 would take" in text.stdout
    record = json.loads(CliRunner().invoke(app, ["plan", *keys, "--json"]).stdout)
    assert {one["codec"] for one in record["codecs"]["prices"]} >= {"none", "power_sgd rank=4"}
    text = CliRunner().invoke(app, ["simulate", *keys, 'codec.kind="blockwise"'])
    assert text.exit_code == 0, text.output
    assert "coded by blockwise bits=8" in text.stdout
