"""A job asks for what its plan needs, and a plan that cannot fit is refused with one that does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault, UsageError
from shoal.planning.job_request import JobRequest, job_request
from shoal.runfile.load import load_run

RECIPES = Path(__file__).parents[2] / "recipes"
LARGE = (
    "model.width=8192",
    "model.layers=40",
    "model.heads=64",
    "model.feed_forward_width=28672",
    "batch.sequence=4096",
)
"""About 36 billion parameters: 16 bytes each of weights, gradients and moments fill more than seven GPUs."""


def cluster(folder: Path, machine: str = "dgx-h100", nodes: int = 4) -> Path:
    path = folder / "cluster.toml"
    path.write_text(f'[cluster]\nmachine = "{machine}"\nnodes = {nodes}\ndevices_per_node = 8\n')
    return path


def test_hosts_and_gpus_follow_from_the_cluster(tmp_path: Path) -> None:
    """Sixteen ranks fill two hosts of eight GPUs, whose own memory the plan is about; two ranks are a part of one."""
    run_file = load_run(RECIPES / "stdlib-gpt.toml", ("run.device=cuda",))
    assert job_request(run_file, cluster(tmp_path), world_size=16) == JobRequest(2, 8, 8, 2, None)
    assert job_request(run_file, cluster(tmp_path), world_size=2) == JobRequest(1, 2, 2, 2, None)


def test_readers_beside_a_gpu_ask_for_cores(tmp_path: Path) -> None:
    """One core for each, and one for the thread that trains; a rank on a core has that core, however many readers."""
    keys = ("run.device=cuda", "data.readers=6")
    run_file = load_run(RECIPES / "stdlib-gpt.toml", keys)
    assert job_request(run_file, cluster(tmp_path), world_size=8).cpus_per_rank == 7
    run_file = load_run(RECIPES / "stdlib-gpt.toml", keys[1:])
    assert job_request(run_file, cluster(tmp_path, "cpu-2", 1), world_size=2).cpus_per_rank == 1


def test_ranks_on_cores_ask_for_the_memory_of_their_host(tmp_path: Path) -> None:
    """Twice the ranks need more of it, and no GPU."""
    run_file = load_run(RECIPES / "stdlib-gpt.toml", ("model.width=1024", "batch.global_samples=64"))
    two, four = (job_request(run_file, cluster(tmp_path, "cpu-2", 1), world_size=size) for size in (2, 4))
    assert two.gpus_per_node == four.gpus_per_node == 0
    assert two.memory_gib is not None
    assert four.memory_gib is not None
    assert 1 < two.memory_gib < four.memory_gib


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_refused_with_keys_that_do(tmp_path: Path) -> None:
    """Copies of a model that no GPU holds: the sentence has bytes, and overrides with which the request is answered."""
    path, ranks = cluster(tmp_path), ("run.processes=32", "run.device=cuda", "batch.global_samples=64")
    copies = load_run(RECIPES / "stdlib-gpt.toml", (*LARGE, *ranks))
    with pytest.raises(
        EnvironmentFault, match=r"fullest rank needs [\d.]+ GiB, and a device of .* has 8\d?"
    ) as refusal:
        job_request(copies, path, world_size=32)
    keys = re.search(r": (\S+=.*) would fit", str(refusal.value))
    assert keys is not None, refusal.value
    fitting = load_run(RECIPES / "stdlib-gpt.toml", (*LARGE, *ranks, *keys[1].split()))
    assert job_request(fitting, path, world_size=32).nodes == 4


def test_what_no_cluster_of_that_size_holds_is_refused(tmp_path: Path) -> None:
    """Too many ranks, ranks that fill no whole hosts, a model that no layout of two ranks fits."""
    small = load_run(RECIPES / "stdlib-gpt.toml", ("run.device=cuda",))
    with pytest.raises(EnvironmentFault, match=r"has 64 ranks, and .* has 32 devices"):
        job_request(small, cluster(tmp_path), world_size=64)
    with pytest.raises(UsageError, match="do not fill nodes of 8; nearest: 8, 16"):
        job_request(small, cluster(tmp_path), world_size=9)
    large = load_run(RECIPES / "stdlib-gpt.toml", (*LARGE, "run.device=cuda"))
    with pytest.raises(EnvironmentFault, match="no layout of 2 ranks fits"):
        job_request(large, cluster(tmp_path), world_size=2)
