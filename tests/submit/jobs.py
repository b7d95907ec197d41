"""Jobs of different run files, for the writers of job files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.runfile.load import load_run
from shoal.submit.job import Resources, SubmittedJob, divide, job_of, world_size_of

RECIPES = Path(__file__).parents[2] / "recipes"
RUNS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "one-rank": ("digits", ("run.processes=1",), {}),
    "replicas": ("digits", (), {"nodes": 4, "ranks_per_node": 2}),
    "gpus": ("stdlib-gpt", ("run.device=cuda",), {"nodes": 2, "ranks_per_node": 8, "gpus_per_node": 8}),
    "limit": ("digits", (), {"nodes": 2, "ranks_per_node": 1, "time_s": 86_400, "save_s": 300}),
    "memory": ("stdlib-gpt", (), {"nodes": 1, "ranks_per_node": 2, "memory_gib": 64, "cpus_per_rank": 12}),
    "shard": ("stdlib-gpt", ("layout.shard=4", "memory.zero=3"), {"nodes": 2}),
    "tensor": ("stdlib-gpt", ("layout.tensor=2", "layout.replicate=2"), {"nodes": 2}),
    "pipeline": ("stdlib-gpt", ("layout.pipeline=2", "pipeline.microbatches=4"), {"nodes": 2}),
    "context": ("stdlib-gpt", ("layout.context=2",), {"nodes": 2}),
    "three-axes": ("stdlib-gpt-3d", (), {"nodes": 2}),
    "experts": ("stdlib-moe", (), {"nodes": 2}),
    "quoted": ("digits", ("run.directory=\"runs/with 'quotes' and blanks\"",), {"nodes": 1, "ranks_per_node": 1}),
}
"""Twelve run files: a recipe, its overrides, what each host gives."""


def job(name: str, folder: Path = Path("/work"), **more: Any) -> SubmittedJob:
    """The job of one of `RUNS`."""
    recipe, overrides, asked = RUNS[name]
    run_file = load_run(RECIPES / f"{recipe}.toml", overrides)
    nodes, each = asked.get("nodes"), asked.get("ranks_per_node")
    world_size = world_size_of(run_file, nodes=nodes, ranks_per_node=each)
    hosts, ranks = divide(world_size, nodes=nodes, ranks_per_node=each)
    resources = Resources(**(asked | {"nodes": hosts, "ranks_per_node": ranks}))
    return job_of(run_file, resources, file=recipe, folder=folder, **more)
