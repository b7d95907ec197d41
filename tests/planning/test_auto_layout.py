"""`layout.auto`: the planner's choice is one that runs, keeps what the user gave, and stays with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.config.load import dumps, load
from shoal.errors import ConfigError, LayoutError
from shoal.launcher.environment import Place
from shoal.planning.answer import cluster_of
from shoal.planning.auto_layout import with_layout
from shoal.planning.plan_file import written_plan
from shoal.runfile.load import load_run
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile, with_processes
from tests.cli.project import project
from tests.verification.layouts import MOE, corpus, run_file_of

ROOT = Path(__file__).parents[2]
CLUSTER = '[cluster]\nnodes = 4\nmachine = "dgx-h100"\n'


def _auto(folder: Path, processes: int, **tables: dict[str, Any]) -> RunFile:
    layout = {"auto": True, **tables.pop("layout", {})}
    return with_processes(run_file_of(folder, layout=layout, **tables), processes)


def _chosen(folder: Path, processes: int, **tables: dict[str, Any]) -> RunFile:
    return with_layout(_auto(folder, processes, **tables), None).run_file


def _saved(folder: Path, run_file: RunFile) -> None:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "run.toml").write_text(dumps(run_file))


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("model", [None, MOE], ids=["gpt", "mixture"])
def test_the_choice_runs_and_is_written_whole(tmp_path: Path, processes: int, model: dict[str, Any] | None) -> None:
    """No rule between tables is broken; the resolved file says all of it and leaves nothing to the planner."""
    batch = {"global_samples": 24}
    found = _chosen(tmp_path, processes, batch=batch, **({} if model is None else {"model": model}))
    assert refusal(found) is None
    assert found.layout.layout(processes).world_size == processes
    assert not found.layout.auto
    _saved(tmp_path, found)
    assert load(RunFile, tmp_path / "run" / "run.toml") == found


def test_it_is_the_plan_that_shoal_plan_ranks_first() -> None:
    """The same search: the fastest plan that fits, and the sentence names it."""
    run_file = with_processes(load_run(ROOT / "recipes" / "stdlib-gpt.toml", ["layout.auto=true"]), 4)
    chosen = with_layout(run_file, None)
    plan = written_plan(chosen.run_file, cluster_of(chosen.run_file, None))
    assert plan.describe() in chosen.why
    assert "the fastest of" in chosen.why
    assert "\n" not in chosen.why


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"layout": {"tensor": 2}}, "layout.tensor"),
        ({"layout": {"shard": 4}}, "layout.shard"),
        ({"layout": {"replicate": 2}}, "layout.replicate"),
        ({"layout": {"pipeline": 2}, "pipeline": {"microbatches": 4}}, "pipeline.microbatches"),
        ({"layout": {"pipeline": 2}, "pipeline": {"schedule": "ZB-H1"}}, "pipeline.schedule"),
        ({"memory": {"recompute": "full"}}, "memory.recompute"),
        ({"layout": {"shard": 2}, "memory": {"zero": 2}}, "memory.zero"),
        ({"batch": {"micro_samples": 1}}, "batch.micro_samples"),
    ],
)
def test_what_is_given_is_kept(tmp_path: Path, tables: dict[str, Any], key: str) -> None:
    """The planner decides the rest."""
    table, name = key.split(".")
    found = getattr(getattr(_chosen(tmp_path, 8, **tables), table), name)
    assert found == tables[table][name]


def test_the_rules_leave_the_planner_its_freedom(tmp_path: Path) -> None:
    """ZeRO asks for a `layout.shard`, which the planner sets; what has no price is refused by its name."""
    sharded = _auto(tmp_path, 2, memory={"zero": 3})
    assert refusal(sharded) is None
    assert with_layout(sharded, None).run_file.layout.shard == 2
    for tables, words in (
        ({"layout": {"tensor": 4, "tensor_grid": [2, 2]}}, "layout.tensor_grid"),
        ({"pipeline": {"schedule": "PipeDream"}}, '"PipeDream"'),
    ):
        sentence = refusal(_auto(tmp_path, 4, **tables))
        assert sentence is not None
        assert "layout.auto = true with" in sentence
        assert words in sentence


def test_rules_that_the_planner_does_not_know_are_kept(tmp_path: Path) -> None:
    """A compiled model is split by ZeRO-1 or -2 at most; where noise is measured, gradients are whole."""
    compiled = _chosen(tmp_path, 4, run={"compile": True})
    assert compiled.layout.layout(4).size(("pipeline", "context", "tensor")) == 1
    with pytest.raises(LayoutError, match="agrees with what else is asked for"):
        _chosen(tmp_path, 4, run={"compile": True}, layout={"tensor": 2})
    noisy = _chosen(tmp_path, 4, observe={"noise_every_steps": 1})
    assert refusal(noisy) is None


def test_a_run_that_goes_on_keeps_its_layout(tmp_path: Path) -> None:
    """Even where another one would be chosen now; other work, other processes or a request make it choose anew."""
    saved = _chosen(tmp_path, 4, layout={"tensor": 2})
    _saved(tmp_path, saved)
    kept = with_layout(_auto(tmp_path, 4), None)
    assert kept.run_file.layout == saved.layout
    assert "kept from" in kept.why
    assert kept.run_file.layout.tensor == 2
    fresh = _chosen(tmp_path, 4, layout={"replan": True})
    assert fresh.layout.tensor != 2
    assert _chosen(tmp_path, 2).layout.layout(2).world_size == 2
    assert _chosen(tmp_path, 4, batch={"global_samples": 16}).layout.tensor != 2
    assert _chosen(tmp_path, 4, layout={"shard": 4}).layout.shard == 4


def test_a_cluster_file_is_what_it_plans_for(tmp_path: Path) -> None:
    """As many of its nodes as the processes fill; a number that fills none is refused."""
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER)
    chosen = with_layout(_auto(tmp_path, 16, layout={"cluster": str(path)}, batch={"global_samples": 32}), None)
    assert "dgx-h100" in chosen.why
    assert chosen.run_file.layout.layout(16).world_size == 16
    with pytest.raises(ConfigError, match="nearest: 8, 16"):
        _chosen(tmp_path, 12, layout={"cluster": str(path)})


def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    """Several hosts without a cluster file, a batch that nothing divides: a sentence each."""
    far = Place(rank=0, world_size=4, local_rank=0, local_world_size=2, node_rank=0, launcher="slurm")
    with pytest.raises(ConfigError, match="several hosts"):
        with_layout(_auto(tmp_path, 4), far)
    with pytest.raises(LayoutError, match="global batch of 7"):
        _chosen(tmp_path, 4, batch={"global_samples": 7}, layout={"replicate": 4})


@pytest.mark.slow
def test_shoal_train_trains_the_chosen_layout(tmp_path: Path) -> None:
    """The command line says in a line what was chosen; the run directory holds it, and training from there goes on."""
    corpus(tmp_path)
    run_file = run_file_of(tmp_path, layout={"auto": True}, run={"steps": 2, "directory": "run"})
    run_file = msgspec.structs.replace(
        run_file, data=msgspec.structs.replace(run_file.data, path=str(tmp_path / "tokens.bin"))
    )
    folder = project(tmp_path)
    (tmp_path / "auto.toml").write_text(dumps(run_file))
    done = folder.shoal("train", "auto.toml", "run.processes=2", "observe.report=false")
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("layout.auto: ") for line in done.stderr.splitlines()) == 1
    resolved = load_run(tmp_path / "run" / "run.toml")
    assert not resolved.layout.auto
    assert resolved.layout.layout(2).world_size == 2
    again = folder.shoal("train", "run/run.toml", "run.steps=3", "observe.report=false")
    assert again.returncode == 0, again.stderr
