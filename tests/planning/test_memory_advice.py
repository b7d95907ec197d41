"""What frees memory, and how much: the footprint's own differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.planning.memory_advice import memory_advice
from shoal.runfile.load import load_run
from tests.cli.project import RUN

RECIPES = Path(__file__).parents[2] / "recipes"


def test_each_change_is_named_with_what_it_frees() -> None:
    """A GPT on two replicas: all ways, the one that frees most first; those that are taken are not offered."""
    advice = memory_advice(load_run(RECIPES / "stdlib-gpt.toml", ["run.processes=2"]))
    parts = advice.partition(": ")[2].split("; ")
    changed = {"batch.micro_samples", "memory.recompute", "memory.loss_chunks", "layout.replicate", "optimizer.kind"}
    assert {part.split("=")[0] for part in parts} == changed
    assert all(float(part.split()[-2]) > 0 for part in parts)
    taken = ["run.processes=2", "layout.shard=2", "batch.micro_samples=1", 'memory.recompute="full"']
    taken.append('optimizer.kind="adamw_8bit"')
    assert memory_advice(load_run(RECIPES / "stdlib-gpt.toml", taken)).startswith("What frees memory: batch.micro")


@pytest.mark.parametrize("recipe", ["stdlib-gpt.toml", "digits.toml"])
def test_state_on_the_host_frees_all_but_three_parts(recipe: str) -> None:
    """Of a GPT by closed forms, and of a traced model; at the default size of a part these small ones gain nothing."""
    given = ["run.processes=1", 'memory.offload.part="1 KiB"', 'optimizer.kind="adamw"']
    advice = memory_advice(load_run(RECIPES / recipe, given))
    assert 'memory.offload.optimizer="host" ' in advice
    assert "memory.offload" not in memory_advice(load_run(RECIPES / recipe, [given[0], given[2]]))


def test_a_model_without_closed_forms_is_traced() -> None:
    """A convolutional net: smaller microbatches keep less for the backward, and each change has its figure."""
    advice = memory_advice(load_run(RECIPES / "digits.toml", ["run.processes=2"]))
    changes = dict(part.split(" ", 1) for part in advice.partition(": ")[2].split("; ") if part.startswith("batch."))
    assert advice.startswith("What frees how much on the fullest rank: ")
    assert [float(size.split()[0]) > 0 for size in changes.values()] == [True]


def test_a_model_that_cannot_be_priced_gets_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is invented: the keys, and what each does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)  # its module, own.py, is not there
    advice = memory_advice(load_run(tmp_path / "run.toml", ["run.processes=2"]))
    assert advice.startswith("What frees memory: batch.micro_samples (smaller microbatches); memory.recompute")
