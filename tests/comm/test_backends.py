"""The criteria of backend choice, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from shoal.comm.board import Board
from shoal.comm.config import Capabilities, RankCapabilities, TransportName, choose_backend
from shoal.comm.mesh import gather_capabilities
from shoal.comm.nccl import open_nccl
from shoal.errors import EnvironmentFault
from tests.comm.hosts import on_host

ONE = Capabilities("cpu", hosts=("a", "a"))
TWO = Capabilities("cpu", hosts=("a", "a", "b"))
SINGLES = Capabilities("cpu", hosts=("a", "b", "c"))
NO_CORE = "the shared-memory core was not built: install a C compiler, then reinstall Shoal"
NO_MPI = "no MPI launcher started them: mpiexec -n 2 shoal train RUN.toml"


@pytest.mark.parametrize(
    ("asked", "group", "backend"),
    [
        ("auto", Capabilities("cuda", hosts=("", "")), "nccl"),
        ("shm", Capabilities("cuda", hosts=("", "")), "nccl"),
        ("gloo", Capabilities("cuda", hosts=("", "")), "gloo"),
        ("auto", Capabilities("cpu", hosts=("a",)), "gloo"),
        ("auto", ONE, "shm"),
        ("auto", replace(ONE, no_core=NO_CORE), "gloo"),
        ("auto", replace(ONE, by_mpi=True), "shm"),
        ("auto", TWO, "hierarchical"),
        ("auto", replace(TWO, no_core=NO_CORE), "gloo"),
        ("auto", replace(TWO, by_mpi=True), "mpi"),
        ("auto", replace(TWO, by_mpi=True, no_mpi=NO_MPI), "hierarchical"),
        ("auto", SINGLES, "gloo"),
        ("hierarchical", replace(TWO, by_mpi=True), "hierarchical"),
        ("hierarchical", ONE, "shm"),
        ("hierarchical", SINGLES, "gloo"),
        ("gloo", ONE, "gloo"),
        ("shm", ONE, "shm"),
        ("mpi", replace(ONE, by_mpi=True), "mpi"),
    ],
)
def test_the_choice_follows_from_the_capabilities(asked: TransportName, group: Capabilities, backend: str) -> None:
    """Each line of the table."""
    choice = choose_backend(asked, group)
    assert choice.backend == backend
    assert ":" in choice.why


@pytest.mark.parametrize(
    ("asked", "group", "says"),
    [
        ("shm", TWO, 'they are on 2 hosts; set it to "hierarchical"'),
        ("hierarchical", replace(TWO, no_core=NO_CORE), "was not built: install a C compiler"),
        ("hierarchical", replace(ONE, no_core=NO_CORE), "was not built: install a C compiler"),
        ("shm", replace(ONE, no_core=NO_CORE), "was not built: install a C compiler"),
        ("mpi", replace(TWO, no_mpi=NO_MPI), "mpiexec -n 2 shoal train"),
    ],
)
def test_what_was_asked_for_and_cannot_be_is_refused(asked: TransportName, group: Capabilities, says: str) -> None:
    """Nobody gets another transport than the one that was named; the sentence says why and what works."""
    with pytest.raises(EnvironmentFault, match="is not available to these") as refusal:
        choose_backend(asked, group)
    assert says in str(refusal.value)
    assert '"auto"' in str(refusal.value)


def test_two_ranks_on_one_gpu_are_named_before_nccl_refuses_them() -> None:
    """Where Slurm shows two tasks one GPU, say. Over Gloo they may share it; those that nobody can tell apart pass."""
    ranks = [RankCapabilities("a", gpu=name) for name in ("GPU-1", "GPU-2", "GPU-1")]
    group = Capabilities.of_all(ranks, device="cuda")
    with pytest.raises(EnvironmentFault, match=r"ranks 0 and 2 of a group have one GPU.*run\.share_gpus = true"):
        choose_backend("auto", group)
    assert choose_backend("gloo", group).backend == "gloo"
    for others in (ranks[:2], [RankCapabilities("a")] * 2):
        assert choose_backend("auto", Capabilities.of_all(others, device="cuda")).backend == "nccl"


def test_the_lack_of_one_rank_is_the_lack_of_all() -> None:
    """All ranks come to the same choice: a reason of one counts for all, and so do two builds of the core."""
    good = RankCapabilities("a", core="1234", by_mpi=True)
    assert Capabilities.of_all([good, good], device="cpu") == Capabilities("cpu", hosts=("a", "a"), by_mpi=True)
    lame = Capabilities.of_all([good, RankCapabilities("b", no_core=NO_CORE, no_mpi=NO_MPI)], device="cpu")
    assert lame == Capabilities("cpu", hosts=("a", "b"), no_core=NO_CORE, no_mpi=NO_MPI)
    other = Capabilities.of_all([good, RankCapabilities("a", core="5678", by_mpi=True)], device="cpu")
    assert "different versions" in other.no_core


def hosts_of_gpus(place) -> tuple[str, ...]:
    """The hosts that ranks with GPUs find, two ranks on each."""
    with on_host(f"node-{place.rank // 2}"):
        board = Board(place.store, timeout_s=180)
        group = gather_capabilities(board, place.rank, place.size, device=torch.device("cuda"), transport="auto")
    assert choose_backend("auto", group).backend == "nccl"
    return group.hosts


class RecordedNCCL:
    """Stands for `ProcessGroupNCCL`, which a PyTorch without CUDA lacks: keeps what it was told."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    def __init__(self, store: object, rank: int, size: int, options: RecordedNCCL.Options) -> None:
        self.place, self.options, self.connected = (rank, size), options, []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)


@pytest.mark.parametrize("device", [torch.device("cuda", 1), None])
def test_nccl_connects_at_once_with_high_priority_and_the_runs_patience(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | None
) -> None:
    """The rank's own device is bound; one that is not known yet connects in the first call."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", RecordedNCCL, raising=False)
    group = open_nccl(HashStore(), 1, 2, 7.5, device=device)
    assert group.place == (1, 2)
    assert group.options.is_high_priority_stream
    assert group.options._timeout.total_seconds() == 7.5
    assert group.connected == ([] if device is None else [device])


def test_ranks_with_gpus_know_which_of_them_share_a_host(ranks) -> None:
    """The ledger tells bytes inside hosts from those between them, over NCCL too."""
    for hosts in ranks(4, hosts_of_gpus):
        assert len(set(hosts)) == 2
        assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
