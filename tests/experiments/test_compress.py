"""`shoal compress`: the keys that it chooses, and a run that is pruned, trained on and measured beside what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from shoal.checkpoint.weights import weights_of
from shoal.errors import UsageError
from shoal.experiments.compress import keys_of
from shoal.runfile.load import load_run
from tests import programs

GPT = """
[run]
name = "gpt"
steps = 8
processes = 1
[model]
kind = "gpt"
layers = 2
width = 32
heads = 2
vocabulary = 256
[data]
kind = "stdlib"
held_out_fraction = 0.001
[batch]
global_samples = 8
sequence = 32
[optimizer]
kind = "adamw"
lr = 0.01
[observe]
report = false
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/gpt`."""
    folder = tmp_path_factory.mktemp("compress")
    (folder / "run.toml").write_text(GPT)
    done = programs.run(["-m", "shoal", "train", "run.toml"], cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("to", "table", "key", "value"),
    [
        ("0.25", "sparsity", "density", 0.25),
        ("2:4", "sparsity", "pattern", "2:4"),
        ("rows:.5", "sparsity", "pattern", "rows"),
        ("heads:0.5", "sparsity", "pattern", "heads"),
        ("int4", "quantisation", "bits", 4),
    ],
)
def test_what_is_asked_for_becomes_keys(tmp_path: Path, to: str, table: str, key: str, value: object) -> None:
    """A quarter of the steps at a tenth of the rate; the warm-up fits."""
    (tmp_path / "run.toml").write_text(GPT.replace("steps = 8", "steps = 800"))
    before = load_run(tmp_path / "run.toml", ["schedule.warmup_steps=100"])
    after = load_run(tmp_path / "run.toml", ["schedule.warmup_steps=100", *keys_of(to, before)])
    assert getattr(getattr(after, table), key) == value
    assert (after.run.steps, after.optimizer.lr, after.schedule.warmup_steps) == (200, pytest.approx(0.001), 20)


@pytest.mark.parametrize("to", ["7", "1.5", "5:", "layers:0.5", "heads", "int", ""])
def test_another_form_is_refused(tmp_path: Path, to: str) -> None:
    (tmp_path / "run.toml").write_text(GPT)
    with pytest.raises(UsageError, match="give a density"):
        keys_of(to, load_run(tmp_path / "run.toml"))


def test_experts_are_taken_out_before_and_not_masked(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(GPT)
    assert not any("sparsity" in key for key in keys_of("experts:0.5", load_run(tmp_path / "run.toml")))


@pytest.mark.slow
def test_features_are_taken_out_and_both_models_are_measured(trained: Path) -> None:
    """The smaller model has half of the feed-forwards' features; what is said of each is what an evaluation says."""
    done = programs.run(["-m", "shoal", "compress", "runs/gpt", "--to", "features:0.5", "run.steps=4", "--json"],
                        cwd=trained)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 4
    whole, small = weights_of(trained / "runs/gpt"), weights_of(Path(found["smaller"]))
    name = "blocks.0.feed_forward.up.weight"
    assert 2 * small[name].shape[0] == whole[name].shape[0]
    assert found["after"]["bytes"] == sum(each.numel() * each.element_size() for each in small.values())
    before, after = found["before"], found["after"]
    assert before["flops"] - after["flops"] == 2 * 32 * (numbers(whole) - numbers(small))  # of 32 tokens
    masked = programs.run(["-m", "shoal", "evaluate", "runs/gpt-features-0.5", "--json"], cwd=trained)
    assert json.loads(masked.stdout)["loss/eval"] == pytest.approx(after["evaluation"]["loss/eval"], rel=1e-6)
    again = ["-m", "shoal", "compress", "runs/gpt", "--to", "features:0.5"]
    same = programs.run([*again, "run.steps=4", "--json"], cwd=trained)
    assert json.loads(same.stdout) == found
    other = programs.run([*again, "run.steps=4", "optimizer.lr=2.0"], cwd=trained)
    assert (other.returncode, "compressed in another way" in other.stderr) == (2, True)
    said = programs.run(["-m", "shoal", "evaluate", "runs/gpt", "--json"], cwd=trained)
    assert json.loads(said.stdout) == found["before"]["evaluation"]


def numbers(weights: dict[str, Tensor]) -> int:
    return sum(each.numel() for each in weights.values())


@pytest.mark.slow
def test_bytes_of_a_rounded_model_are_those_of_its_integers(trained: Path) -> None:
    """Half a byte a weight of rounded layers, and a scale a row; embeddings and the head are as they were."""
    command = ["-m", "shoal", "compress", "runs/gpt", "--to", "int4", "run.steps=2", "--json"]
    done = programs.run(command, cwd=trained)
    assert done.returncode == 0, done.stderr
    before, after = (json.loads(done.stdout)[side]["bytes"] for side in ("before", "after"))
    layers = [each for name, each in weights_of(trained / "runs/gpt").items() if name.startswith("blocks.")]
    rounded = [each for each in layers if each.ndim == 2]
    saved = sum(each.numel() * 4 - each.numel() // 2 - each.shape[0] * 4 for each in rounded)
    assert rounded
    assert before - after == saved


@pytest.mark.slow
def test_a_compressed_run_is_not_compressed_again(trained: Path) -> None:
    """Its twin is the run that it came from."""
    text = GPT + "[quantisation]\nbits = 8\n"
    (trained / "rounded.toml").write_text(text)
    with pytest.raises(UsageError, match="already"):
        keys_of("0.5", load_run(trained / "rounded.toml"))
