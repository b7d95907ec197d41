"""Ranks' places from launchers' variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place, master_from, place_from

NODES = st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda nodes: sum(nodes) > 1)


def torchrun(rank: int, world: int, local: int, local_world: int, node: int) -> dict[str, str]:
    """The variables of one torchrun rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return dict(zip(names, map(str, (rank, world, local, local_world, node)), strict=True))


def slurm_step(nodes: list[int], node: int, local: int) -> dict[str, str]:
    """The variables of one task of a step with `nodes[i]` tasks on node i."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(sum(nodes[:node]) + local),
        "SLURM_NTASKS": str(sum(nodes)),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, nodes)),
        "SLURM_STEP_NODELIST": f"n[1-{len(nodes)}]",
    }


@given(NODES, st.data())
def test_every_slurm_task_finds_its_place(nodes, data):
    """Whatever the tasks a node, a task's rank, local rank and node are those that Slurm gave it."""
    node = data.draw(st.integers(0, len(nodes) - 1))
    local = data.draw(st.integers(0, nodes[node] - 1))
    expected = Place(sum(nodes[:node]) + local, sum(nodes), local, nodes[node], node, "slurm")
    environ = slurm_step(nodes, node, local)
    assert place_from(environ) == expected
    assert master_from(environ)[0] == ("127.0.0.1" if len(nodes) == 1 else "n1")


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_every_torchrun_rank_finds_its_place(nodes, local_world, data):
    """The same from torchrun's variables."""
    node = data.draw(st.integers(0, nodes - 1))
    local = data.draw(st.integers(0, local_world - 1))
    numbers = (node * local_world + local, nodes * local_world, local, local_world, node)
    place = place_from(torchrun(*numbers))
    assert place == Place(*numbers, "torchrun")
    assert place.one_host == (nodes == 1)


def test_mpi_ranks_find_their_places():
    """Open MPI's and MPICH's variables."""
    open_mpi = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in open_mpi.items()}
    assert place_from(environ) == Place(3, 4, 1, 2, 1, "mpi")
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert place_from(mpich) == Place(1, 2, 1, 2, 0, "mpi")


def test_shoals_own_ranks_say_so():
    """SHOAL_LAUNCHER tells Shoal's ranks from torchrun's."""
    place = place_from({**torchrun(0, 2, 0, 2, 0), "SHOAL_LAUNCHER": "1"})
    assert place is not None
    assert place.launcher == "shoal"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {**slurm_step([4], 0, 0), "SLURM_STEP_ID": str(0xFFFFFFFB)},
        slurm_step([1], 0, 0),
        {**slurm_step([4], 0, 0), "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["bare", "salloc", "batch-script", "one-task-step", "one-task-step-of-a-bigger-job"],
)
def test_where_no_launcher_started_this_there_is_no_place(environ):
    """A plain shell, a Slurm allocation, a batch script or a step of one task: Shoal starts the ranks."""
    assert place_from(environ) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "2"}, "RANK is 2"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "²"}, "RANK"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"LOCAL_RANK": "9"}, "LOCAL_RANK is 9"),
        ({"LOCAL_WORLD_SIZE": "4"}, "4 ranks on this host"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0"),
    ],
)
def test_a_contradiction_names_its_variable(change, named):
    """Values that cannot be are refused with the variable's name, whatever they are."""
    environ = {**torchrun(1, 2, 1, 2, 0), **change}
    with pytest.raises(EnvironmentFault, match=named):
        place_from({name: value for name, value in environ.items() if value is not None})


def test_the_masters_port_is_the_jobs():
    """UserObjects values win; Slurm ranks derive one port from the job, below the ports that kernels hand out."""
    environ = slurm_step([1, 1], 0, 0)
    assert master_from(environ) == master_from(slurm_step([1, 1], 1, 0))
    assert 1024 < master_from(environ)[1] < 32768
    assert master_from({**environ, "SLURM_JOB_ID": "4712"})[1] != master_from(environ)[1]
    assert master_from({**environ, "MASTER_ADDR": "tuna", "MASTER_PORT": "29500"}) == ("tuna", 29500)


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_an_impossible_port_is_refused(port):
    """MASTER_PORT is named."""
    with pytest.raises(EnvironmentFault, match="MASTER_PORT"):
        master_from({"MASTER_ADDR": "tuna", "MASTER_PORT": port})


def test_a_missing_master_is_named():
    """Ranks on several hosts cannot guess where rank 0 is."""
    with pytest.raises(EnvironmentFault, match="MASTER_ADDR is missing"):
        master_from(torchrun(0, 4, 0, 2, 0))
    with pytest.raises(EnvironmentFault, match="MASTER_PORT is missing"):
        master_from(torchrun(0, 2, 0, 2, 0))
