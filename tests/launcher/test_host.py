"""One host's part of a run: which ranks it starts, what they find, and what its launcher ends with."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import EnvironmentFault, ShoalError, UsageError
from shoal.launcher.environment import place_from
from shoal.launcher.host import Host, host_from
from tests import programs

SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip


def launch(folder: Path, body: str, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`shoal launch OPTIONS script.py first --second`, on a script of these lines."""
    (folder / "script.py").write_text(body)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_", "RANK"))}
    arguments = ["-m", "shoal", "launch", *options, "script.py", "first", "--second"]
    return programs.run(arguments, cwd=folder, env=kept | environ)


@given(st.integers(1, 16), st.integers(1, 16))
def test_the_ranks_of_all_hosts_are_all_ranks_once(nodes: int, each: int) -> None:
    """Every rank of the world has one host, and the place that torchrun's variables give it."""
    found = []
    for node in range(nodes):
        host = Host(nodes, node, each, "n0", 29_500)
        for rank in range(host.first_rank, host.first_rank + host.ranks):
            place = place_from(host.variables(rank))
            assert place is not None
            assert (place.launcher, place.world_size, place.node_rank) == ("torchrun", nodes * each, node)
            assert (place.local_rank, place.local_world_size) == (rank % each, each)
            found.append(place.rank)
    assert found == list(range(nodes * each))


def test_a_host_knows_itself_by_torchruns_names() -> None:
    """As Kubeflow's Trainer sets them."""
    given_names = {
        "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "5",
    }  # fmt: skip
    assert host_from(given_names) == Host(3, 2, 4, "a", 5)


def test_a_host_knows_itself_by_a_task_of_slurms() -> None:
    """One task a host: the first host of the step's list has rank 0, and the port follows from the job."""
    host = host_from(SLURM, ranks=8)
    assert (host.nodes, host.node_rank, host.ranks, host.master_address) == (2, 1, 8, "n3")
    assert host.master_port == host_from({**SLURM, "SLURM_NODEID": "0"}, ranks=8).master_port


def test_without_a_scheduler_there_is_one_host() -> None:
    """Which meets on loopback."""
    host = host_from({}, ranks=2)
    assert (host.nodes, host.node_rank, host.ranks, host.master_address) == (1, 0, 2, "127.0.0.1")


@pytest.mark.parametrize(
    ("environ", "error", "words"),
    [
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, EnvironmentFault, "host 2 of 2"),
        ({"PET_NNODES": "2:4"}, EnvironmentFault, "whole number"),
        ({"PET_NNODES": "2"}, EnvironmentFault, "PET_MASTER_ADDR is missing"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, UsageError, "8 launchers on 2 hosts"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    environ: dict[str, str], error: type[ShoalError], words: str
) -> None:
    """A host outside its number, a range, no address, several launchers on a host."""
    with pytest.raises(error, match=words):
        host_from(environ, ranks=1)


SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
open("rank-" + os.environ["RANK"], "w").write(json.dumps([[os.environ[n] for n in names], sys.argv, __name__]))
"""


def test_a_script_finds_torchruns_variables_and_its_own_arguments(tmp_path: Path) -> None:
    """Host 1 of 2 with two ranks: ranks 2 and 3, the script's arguments untouched, `__main__`."""
    several = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n0"}
    done = launch(tmp_path, SHOW, "-n", "2", **several)
    assert (done.returncode, done.stderr) == (0, "")
    for rank in (2, 3):
        found = json.loads((tmp_path / f"rank-{rank}").read_text())
        place = [str(value) for value in (rank, 4, rank - 2, 2, 1, "n0")]
        assert found == [place, ["script.py", "first", "--second"], "__main__"]


def test_ranks_meet_over_plain_torch_distributed(tmp_path: Path) -> None:
    """A script that knows nothing of Shoal: `init_process_group` finds the others."""
    body = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
open("sum-" + os.environ["RANK"], "w").write(str(int(total)))
dist.destroy_process_group()
"""
    done = launch(tmp_path, body, "-n", "2")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]


@pytest.mark.parametrize("code", [2, 75])
def test_the_launcher_ends_with_the_code_of_its_ranks(code: int, tmp_path: Path) -> None:
    """2 and 75 come through as they are, by which schedulers tell them apart."""
    assert launch(tmp_path, f"raise SystemExit({code})", "-n", "2").returncode == code


def test_the_rank_that_failed_is_named_with_its_own_traceback(tmp_path: Path) -> None:
    """Rank 3 of 4, on host 1 of 2; the traceback begins in the script."""
    body = 'import os\nif os.environ["RANK"] == "3":\n    raise ValueError("the seventh seal")\n'
    several = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n0"}
    done = launch(tmp_path, body, "-n", "2", **several)
    assert done.returncode == 1
    assert done.stderr.startswith("rank 3 of 4 failed (host ")
    assert "ValueError: the seventh seal" in done.stderr
    assert "runpy" not in done.stderr


def test_a_script_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    """Exit 2, before any rank."""
    done = programs.run(["-m", "shoal", "launch", "absent.py"], cwd=tmp_path)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "shoal")
    assert "there is no file absent.py" in done.stderr
