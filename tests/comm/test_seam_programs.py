"""Programs of PyTorch over a Seam: what they compute over Gloo, and every byte of theirs is in the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.board import Board
from shoal.comm.checking import WaitGraph
from shoal.comm.config import TransportName, WireConfig
from shoal.comm.ledger import Entry, Ledger
from shoal.comm.mesh import connect
from shoal.comm.seam import Seam
from shoal.comm.volume import bytes_sent
from shoal.errors import CollectiveError
from tests.waiting import HANG_S

RELATIVE = 1e-12  # float64; with two ranks a + b = b + a
WIDTH, SAMPLES, STEPS = 12, 8, 2
Program = Callable[[dist.ProcessGroup], list[Tensor]]


class Over:
    """The default group of a process, a Seam (`transport`) or plain Gloo (None), and what its ledger holds."""

    def __init__(self, place, transport: Any, *, check: bool = False, algorithm: Any = "backend") -> None:
        self.place, self.transport, self.check, self.algorithm = place, transport, check, algorithm
        self.ledger = Ledger()

    def __call__(self, program: Program) -> list[Tensor]:
        name = f"{self.transport}-{self.check}-{self.algorithm}"
        backend = "gloo" if self.transport is None else "seam"
        if backend == "seam":
            dist.Backend.register_backend("seam", self._group, devices=["cpu"])
        store = dist.PrefixStore(name, self.place.store)
        dist.init_process_group(
            backend, store=store, rank=self.place.rank, world_size=self.place.size, timeout=timedelta(seconds=HANG_S)
        )  # fmt: skip
        try:
            group = dist.group.WORLD
            assert group is not None
            assert isinstance(group, Seam) == (backend == "seam")
            return program(group)
        finally:
            dist.destroy_process_group()

    def _group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        waits = WaitGraph(Board(store, timeout_s=180), rank)
        waits.enter("program", range(size))
        assert self.transport is not None
        return connect(
            store,
            rank,
            size,
            device=torch.device("cpu"),
            label="program",
            ledger=self.ledger,
            waits=waits,
            wire=WireConfig(
                timeout_s=timeout.total_seconds(),
                transport=self.transport,
                check_collectives=self.check,
                algorithm=self.algorithm,
            ),
        ).group


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 6)).double()


def batch(rank: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def steps(model: nn.Module, rank: int) -> list[Tensor]:
    """Losses and parameters of some steps of SGD."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        loss = model(batch(rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return losses + [p.detach().clone() for p in whole]


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"of-{id(group)}",))


def fully_sharded(group: dist.ProcessGroup) -> list[Tensor]:
    mesh, model = mesh_of(group), network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return steps(model, group.rank())


def tensor_parallel(group: dist.ProcessGroup) -> list[Tensor]:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return steps(parallelize_module(network(), mesh_of(group), plan), 0)


def data_parallel(group: dist.ProcessGroup) -> list[Tensor]:
    return steps(DistributedDataParallel(network(), process_group=group, bucket_cap_mb=1), group.rank())


def pipelined(group: dist.ProcessGroup) -> list[Tensor]:
    rank, size = group.rank(), group.size()
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    stage = PipelineStage(part, rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, want: (out - want).square().sum())
    given, losses = batch(5), []
    if rank == 0:
        schedule.step(given)
    else:
        schedule.step(target=given * 2, losses=losses)
    return [p.grad for p in part.parameters() if p.grad is not None] + [loss.detach() for loss in losses]


def by_name(group: dist.ProcessGroup) -> list[Tensor]:
    """Everything that `torch.distributed` and its functional form make of one tensor or of several in one call."""
    rank, size = group.rank(), group.size()
    own = batch(rank)[: 3 * size].contiguous()
    gathered, part, swapped = own.new_empty(size * len(own), WIDTH), own.new_empty(3, WIDTH), torch.empty_like(own)
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(part, own)
    dist.all_to_all_single(swapped, own)
    sums = [own.clone(), own[:1].clone()]
    with dist._coalescing_manager():
        for each in sums:
            dist.all_reduce(each, op=dist.ReduceOp.MAX)
    wholes = [own.new_empty(size * len(own), WIDTH), own.new_empty(size, WIDTH)]
    with dist._coalescing_manager():
        for whole, piece in zip(wholes, (own, own[:1]), strict=True):
            dist.all_gather_into_tensor(whole, piece)
    parts = [own.new_empty(3, WIDTH), own.new_empty(1, WIDTH)]
    with dist._coalescing_manager(async_ops=True) as under_way:
        for piece, whole in zip(parts, (own, own[:size]), strict=True):
            dist.reduce_scatter_tensor(piece, whole)
    under_way.wait()
    sizes, given = ([2, 4], [2, 3]) if rank == 0 else ([3, 3], [4, 3])
    return [
        gathered, part, swapped, *sums, *wholes, *parts,
        functional.all_reduce(own, "sum", group) + 0,
        functional.all_gather_tensor(own, 0, group) + 0,
        functional.reduce_scatter_tensor(own, "sum", 0, group) + 0,
        functional.all_to_all_single(own, given, sizes, group) + 0,
        functional.broadcast(own, 1, group) + 0,
    ]  # fmt: skip


def both(place, program: Program, transport: TransportName, check: bool, algorithm: str = "backend") -> Any:
    """Gloo's tensors, the Seam's, and its ledger."""
    want = Over(place, None)(program)
    ours = Over(place, transport, check=check, algorithm=algorithm)
    return want, ours(program), ours.ledger.take()


def agree(rows: list[Any]) -> list[dict[str, Entry]]:
    """The ledgers, after the tensors of every rank were found to be Gloo's."""
    for want, got, _ in rows:
        assert len(want) == len(got) > 0
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=RELATIVE, atol=RELATIVE)
    return [entries for _, _, entries in rows]


WIRES: list[tuple[TransportName, bool]] = [("gloo", False), ("gloo", True), ("shm", False), ("shm", True)]


@pytest.mark.parametrize(("transport", "check"), WIRES)
def test_fsdp2_over_a_seam_is_fsdp2_over_gloo(ranks, transport: TransportName, check: bool) -> None:
    """The same losses and weights; the ledger has every gradient, 766 float64s in each step."""
    gradients = sum(p.numel() for p in network().parameters()) * 8
    sent = STEPS * bytes_sent("reduce_scatter", gradients, size=2, backend=transport)
    for entries in agree(ranks(2, both, fully_sharded, transport, check)):
        assert entries["reduce_scatter"].bytes_sent == sent
        assert entries["all_gather"].bytes_sent > 0


CALLS = {"all_gather": 4, "reduce_scatter": 4, "all_to_all": 2, "all_reduce": 3, "broadcast": 1}


@pytest.mark.parametrize(("transport", "check"), WIRES)
def test_every_name_of_a_call_is_counted(ranks, transport: TransportName, check: bool) -> None:
    """New names and old ones, several tensors in one call, and what DTensor calls from C++."""
    for entries in agree(ranks(2, both, by_name, transport, check)):
        assert {operation: entry.calls for operation, entry in entries.items()} == CALLS


@pytest.mark.parametrize(("transport", "check"), WIRES)
@pytest.mark.parametrize(
    ("program", "counted"), [(tensor_parallel, "all_reduce"), (data_parallel, "all_reduce"), (pipelined, "send")]
)
def test_other_programs_over_a_seam_are_those_over_gloo(
    ranks, transport: TransportName, check: bool, program: Program, counted: str
) -> None:
    """Tensor parallelism, DDP (which waits for futures), 1F1B."""
    for entries in agree(ranks(2, both, program, transport, check)):
        assert entries[counted].bytes_sent > 0


@pytest.mark.parametrize("program", [fully_sharded, data_parallel, by_name])
def test_programs_over_algorithms_are_those_over_gloo(ranks, program: Program) -> None:
    """Collectives made of messages, for what has a table, and Gloo's for the means of FSDP2."""
    agree(ranks(2, both, program, "gloo", True, "ring"))


def told_apart(place, transport: TransportName) -> str:
    """What is said where rank 1 hands in more than rank 0."""

    def program(group: dist.ProcessGroup) -> list[Tensor]:
        part = torch.ones(3 + group.rank())
        with pytest.raises(CollectiveError) as refused:
            dist.reduce_scatter_tensor(part, torch.ones(2 * len(part)))
        said.append(str(refused.value))
        return []

    said: list[str] = []
    over = Over(place, transport, check=True)
    with contextlib.suppress(CollectiveError):  # a group that was given up cannot be shut down
        over(program)
    return said[0]


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_call_by_a_new_name_is_checked(ranks, transport: TransportName) -> None:
    """`dist.reduce_scatter_tensor` of different sizes: both ranks hear who called what."""
    for sentence in ranks(2, told_apart, transport):
        assert "reduce_scatter (sum) of float32 [6]" in sentence
        assert "reduce_scatter (sum) of float32 [8]" in sentence


def test_old_names_are_the_new_ones() -> None:
    """As torch 2.11 calls them."""
    assert Seam._allgather_base is Seam.all_gather_single
    assert Seam._reduce_scatter_base is Seam.reduce_scatter_single
    assert Seam.alltoall_base is Seam.all_to_all_single
    assert Seam.allgather_into_tensor_coalesced is Seam.all_gather_single_coalesced
    assert Seam.reduce_scatter_tensor_coalesced is Seam.reduce_scatter_single_coalesced
